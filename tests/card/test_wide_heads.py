"""Head sizes from 257 to 512 on a GPU, forward and backward: fresh memory is NaN, lengths are ragged, the truth is in
fp64. Where it has passed, `BY_DEFAULT` in triton/tiles.py lets calls come here by default."""

from dataclasses import replace

import pytest
import torch
from conformance import rule
from conformance.cases import (
    Case,
    alibi,
    bias,
    both,
    causal,
    dense,
    documents,
    fp32,
    make,
    padding,
    prefix,
    softcap,
    window,
)  # fmt: skip

from tilewise.call import calls
from tilewise.triton.chunked import launch as chunked

from .sizes import TYPES, on_gpu

PAIRS = (
    (257, 257), (264, 264), (320, 320), (384, 384), (448, 448), (511, 511), (512, 512),
    (512, 64), (64, 512), (512, 256), (320, 1), (511, 264), (72, 320),
)  # fmt: skip
LENGTHS = (
    (200, 200), (131, 333), (333, 131), (1, 257),
)  # fmt: skip
WIDE = Case("", B=2, H=4, H_k=2, M=203, N=331, D=512, size="large")
VARIANTS = {
    "causal": replace(WIDE, mask=causal),
    "many keys, MQA": replace(WIDE, B=1, M=65, N=1500, H_k=1),
    "more queries than keys": replace(WIDE, M=331, N=100, mask=causal, sink=fp32),
    "window": replace(WIDE, mask=window(40, 3)),
    "prefix & padding": replace(WIDE, mask=both(prefix, padding)),
    "documents": replace(WIDE, mask=documents),
    "dense": replace(WIDE, mask=dense("HMN")),
    "softcap, alibi": replace(WIDE, score=(softcap(), alibi()), mask=causal),
    "bias": replace(WIDE, score=(bias("HMN"),)),
    "bias, dense": replace(WIDE, score=(bias("B1MN"),), mask=dense("MN"), D=320),
    "dropout": replace(WIDE, dropout=0.2, mask=causal),
    "varlen": replace(WIDE, lengths=((200, 300), (0, 5), (7, 0), (130, 130)), unowned=(9, 40), mask=causal),
    "sliced": replace(WIDE, D=511, strides="sliced", mask=causal),
    "qkvpacked": replace(WIDE, M=203, N=203, H_k=4, D=320, strides="qkvpacked", mask=causal),
    "through lse": replace(WIDE, loss="lse"),
}


def judge(case: Case) -> None:
    """The call twice: by the rule of the conformance tests, and with the same bits."""
    call = make(case, "cuda")
    true = rule.truth(case, call)
    first, again = (rule.run(case, call, "triton") for _ in range(2))
    rule.assert_as_accurate_as_torch(first, true, rule.bounds(case, call, true))
    assert all(torch.equal(first[name].nan_to_num(nan=7.0), again[name].nan_to_num(nan=7.0)) for name in true)


@on_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("D", "D_v"), PAIRS)
def test_wide_heads(D, D_v, dtype):
    for M, N in LENGTHS:
        name = f"wide D {D} D_v {D_v} {dtype} {M} {N}"
        judge(replace(WIDE, name=name, M=M, N=N, D=D, D_v=D_v, dtype=TYPES[dtype], mask=causal))


@on_gpu
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("variant", ["causal", "window", "dense", "varlen"])
def test_chunks_of_any_size(variant, size, monkeypatch):
    monkeypatch.setattr(chunked, "LEAST", size)
    monkeypatch.setattr(chunked, "WORKSPACE", 0)
    calls.forget()
    judge(replace(VARIANTS[variant], name=f"chunks of {size} {variant}", dtype=torch.bfloat16))
    calls.forget()


@on_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_wide_heads_in_every_variant(variant, dtype):
    judge(replace(VARIANTS[variant], name=f"wide {variant} {dtype}", dtype=TYPES[dtype]))
