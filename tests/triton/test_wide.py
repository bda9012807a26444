"""Head sizes above 256 in Triton's interpreter, with the tiles that GPUs have for them, and chunks of every size."""

from dataclasses import replace

import pytest
import torch
from conformance import rule
from conformance.cases import Case, alibi, bias, both, causal, dense, documents, make, padding, prefix, window

import tilewise as tw

pytest.importorskip("triton")
import triton

from tilewise.call import calls
from tilewise.triton import tiles
from tilewise.triton.chunked import launch as chunked
from tilewise.triton.chunked import tiles as rows

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter"),
]

KINDS = [(kind, size) for kind in ("hopper", "ampere", "other") for size in (2, 4)]
WIDE = Case("", B=1, M=41, N=70, D=512)
CASES = (
    replace(WIDE, name="causal, GQA", H=4, mask=causal),
    replace(WIDE, name="D_v, sink, dropout, padding", D=320, D_v=24, sink=torch.float32, dropout=0.2,
            mask=both(causal, padding)),
    replace(WIDE, name="bias, alibi, dense", B=2, M=20, N=37, D=511, score=(bias("HMN"), alibi()), mask=dense("MN")),
)  # fmt: skip


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]} {8 * kind[1]}-bit")
def chip(request, monkeypatch):
    """The interpreter with a chip's rows."""
    name, size = request.param
    for table in (*tiles.TABLES.values(), tiles.BIAS):
        for key in [key for key in table if key[:3] == (name, size, 512)]:
            monkeypatch.setitem(table, ("interpreter", 4, 512, *key[3:]), table[key])
    monkeypatch.setitem(rows.CHUNKS, ("interpreter", 4), rows.CHUNKS[name, size])
    calls.forget()
    yield request.param
    calls.forget()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_chips_tiles_are_as_accurate_as_torch(case, chip):
    case = replace(case, precision="ieee" if chip[1] == 4 else None)
    call = make(case, "cpu")
    true = rule.truth(case, call)
    rule.assert_as_accurate_as_torch(rule.run(case, call, "triton"), true, rule.bounds(case, call, true))


IN_CHUNKS = Case("", B=2, H=4, H_k=2, M=40, N=70, D=264)
CHUNKS = (
    replace(IN_CHUNKS, name="full"),
    replace(IN_CHUNKS, name="causal, MQA", H_k=1, mask=causal),
    replace(IN_CHUNKS, name="more queries than keys", M=70, N=40, mask=causal),
    replace(IN_CHUNKS, name="window, dropout", mask=window(20, 3), dropout=0.2),
    replace(IN_CHUNKS, name="prefix & padding", mask=both(prefix, padding)),
    replace(IN_CHUNKS, name="documents", mask=documents),
    replace(IN_CHUNKS, name="bias, dense", score=(bias("HMN"),), mask=dense("MN")),
    replace(IN_CHUNKS, name="varlen", lengths=((40, 70), (0, 5), (7, 0)), unowned=(9, 4), mask=causal),
    replace(IN_CHUNKS, name="sink, through lse", sink=torch.float32, loss="lse"),
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_chunks_of_any_size_give_the_same_gradients(case, size, monkeypatch):
    """A chunk has part of a head, whole heads, or all of them; what no row sees has zeros."""
    monkeypatch.setattr(chunked, "LEAST", size)
    monkeypatch.setattr(chunked, "WORKSPACE", 0)
    calls.forget()
    call = make(case, "cpu")
    true = rule.truth(case, call)
    rule.assert_as_accurate_as_torch(rule.run(case, call, "triton"), true, rule.bounds(case, call, true))
    calls.forget()


def test_a_chunk_has_whole_heads_where_it_can():
    """Workspaces hold at least 16 key tiles, and up to 256 MiB of P and dS."""
    for N, H, H_k, told in (
        (1024, 8, 8, "128 key tiles 128x128, 256 columns of a gradient, 8 warps; P and dS take 64 MiB"),
        (8192, 8, 8, "64 key tiles 128x128, 256 columns of a gradient, 8 warps; P and dS take 256 MiB"),
        (8192, 8, 1, "16 key tiles 128x128, 256 columns of a gradient, 8 warps; P and dS take 512 MiB"),
    ):
        q, k = (torch.empty(2, N, heads, 512, dtype=torch.bfloat16, device="meta") for heads in (H, H_k))
        tiles_of = tw.explain(q, k, k, mask=tw.Causal(), device="sm_90", backend="triton").backward_tiles
        assert f"backward in chunks of {told}" in str(tiles_of)
