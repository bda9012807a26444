"""Compiles the Hopper kernels without a GPU and reads what came out: one JSON line a kernel of every call in `calls`.

    python tests/hopper/offline.py               every call in `CALLS`
    python tests/hopper/offline.py streaming     one call in all its sizes; this one where CONTRIBUTING.md was followed

Run it in a separate process with TRITON_INTERPRET=0, as tests/triton/offline.py does, whose tools it uses.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

import tilewise as tw
from tilewise.call.backend import against
from tilewise.call.operands import Grads, Saved
from tilewise.hopper import launch, plan
from tilewise.hopper.fp32 import backward_launch as fp32_backward_launch
from tilewise.hopper.fp32 import launch as fp32_launch
from tilewise.hopper.split_keys import launch as decode_launch
from tilewise.hopper.split_keys.choice import splits
from tilewise.hopper.tiles import BIAS, padded
from tilewise.host.gather import empty_sums

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
from offline import described, known, meta, read_hopper, read_new, use_target

B, S, H = 2, 1024, 4
DTYPES = torch.bfloat16, torch.float32


CALLS = {
    64: (
        "full", "long causal", "causal", "short", "short causal", "narrow", "scored", "combined", "fp16x3", "bf16x6",
        "fp16x3 varlen", "biased", "wide", "pages of 16", "decode pages of 16", "functions",
    ),
    128: (
        "full", "causal", "single", "short causal", "varlen", "scored", "bounded", "dropout", "placed dropout",
        "combined", "ordered", "grouped", "fp16x3", "bf16x6", "biased", "wide", "wide varlen", "spans",
        "scored placed", "prefix placed", "pages of 8", "pages of 16", "pages of 128", "cache, window",
        "decode", "decode pages of 16", "decode pages of 128", "decode scored", "functions", "a causal function",
    ),
    256: ("causal", "dropout", "placed dropout", "grouped", "listed", "biased", "wide", "pages of 16"),
    96: ("causal", "scored", "wide varlen"),
    160: ("causal", "dropout"),
    192: ("causal", "bounded", "dropout", "latents", "latents, long", "latents, varlen", "latents, dropout"),
    224: ("causal", "wide varlen"),
    512: ("causal", "scored", "varlen", "full"),
    576: ("MLA, 16 rows", "MLA, 32 rows"),
}  # fmt: skip
"""What is compiled of each head size: every row of the tables, and every kind of kernel once."""


def sinks_and_window(b, h, i, j):
    return ((j <= i) & (i - j < 300)) | (j < 4)


def by_distance(s, b, h, i, j, table):
    return s + table[h, i - j + S]


def calls() -> dict[str, dict[str, Any]]:
    """Options of one call per kind of kernel."""
    table = torch.zeros(H, 2 * S, dtype=torch.bfloat16)
    ints, ends = meta(B, dtype=torch.int32), meta(B + 1, dtype=torch.int32)
    numbers, packed = meta(H, dtype=torch.float32), tw.Varlen(ends, ends, S, S)
    causal, narrow, placed = {"mask": tw.Causal()}, tw.Causal() & tw.Window(300, 0), tw.Origin(64, 128)
    scores = {"score": [tw.SoftCap(50.0), tw.Alibi(numbers)], "sink": numbers}
    bias = {"score": tw.Bias(meta(1, H, S, S, dtype=torch.bfloat16))}

    def pages(page: int, **more: Any) -> dict[str, Any]:
        table = meta(B, S // page, dtype=torch.int32)
        return causal | {"H_k": 1, "page": page, "layout": tw.Cached(ints, table, **more)}

    return {
        "full": {},
        "latents": causal | {"D_v": 128},
        "latents, long": causal | {"D_v": 128, "S": 16384},
        "latents, varlen": causal | {"D_v": 128, "layout": packed},
        "latents, dropout": causal | {"D_v": 128, "dropout": 0.1},
        "single": {"S": 64},
        "short": {"S": 128},
        "narrow": {"S": 197},
        "short causal": causal | {"S": 128},
        "causal": causal,
        "long causal": causal | {"S": 8192},
        "varlen": causal | {"layout": packed},
        "ordered": causal | {"deterministic": True},
        "grouped": causal | {"H_k": 1},
        "listed": {"mask": tw.Dense(meta(S, S, dtype=torch.bool))},
        "fp16x3": causal | {"precision": "fp16x3"},
        "bf16x6": causal | {"precision": "bf16x6"},
        "fp16x3 varlen": {"precision": "fp16x3", "layout": packed},
        **{f"pages of {page}": pages(page, cu_q=ends, max_q=S) for page in (8, 16, 128)},
        "decode": {"queries": 1, "H_k": 1},
        **{f"decode pages of {page}": pages(page) | {"queries": 4} for page in (16, 128)},
        "decode scored": scores
        | {"mask": narrow, "queries": 2, "H_k": 2, "page": S, "layout": tw.Cached(ints, starts=ints, index=ints)},
        **{
            f"MLA, {name}": {"queries": 1, "H": heads, "H_k": 1, "D_v": 512, "within": True} | of_cache
            for name, heads, of_cache in (
                ("16 rows", 16, pages(64)),
                ("32 rows", 32, {"page": S, "layout": tw.Cached(ints)}),
            )
        },
        "cache, window": {"mask": narrow, "H_k": 1, "page": S, "layout": tw.Cached(ints)},
        "wide": causal | {"out_dtype": torch.float32},
        "wide varlen": causal | {"layout": packed, "out_dtype": torch.float32},
        "spans": {"mask": tw.Causal() & tw.Spans(*(meta(B, S, dtype=torch.int32) for _ in range(2)))},
        "scored placed": causal | {"score": tw.Alibi(numbers), "origin": placed},
        "prefix placed": {"mask": tw.Prefix(ints), "origin": placed},
        "functions": {"mask": tw.Mask.of(sinks_and_window), "score": tw.Score.of(by_distance, table).to("meta")},
        "a causal function": {"mask": tw.Mask.of(lambda b, h, i, j: j <= i, align="last")},
        "biased": causal | bias,
        "scored": causal | {"score": tw.Alibi(numbers)},
        "bounded": causal | {"score": tw.SoftCap(50.0)},
        "dropout": causal | {"dropout": 0.1},
        "placed dropout": causal | {"dropout": 0.1, "origin": tw.Origin(64, 128, 1, 8)},
        "combined": causal | scores | {"dropout": 0.1},
        **({"streaming": {"mask": tw.Streaming(4, 300)}} if hasattr(tw, "Streaming") else {}),
    }


def launches(D: int, options: dict[str, Any]) -> list[Any]:
    """Forward and backward of a call with meta tensors."""
    options = dict(options)
    batch, length, heads = options.pop("B", B), options.pop("S", S), options.pop("H", H)
    dtype, packed = DTYPES["precision" in options], getattr(options.get("layout"), "cu_q", None) is not None
    shape, page = (batch * length,) if packed else (batch, length), options.pop("page", None)
    q = meta(*shape[:-1], options.pop("queries", shape[-1]), heads, D, dtype=dtype)
    k = meta(*((batch * length // page, page) if page else shape), options.pop("H_k", heads), D, dtype=dtype)
    D_v = options.pop("D_v", D)
    v = k[..., :D_v] if options.pop("within", False) else k.new_empty((*k.shape[:-1], D_v))
    p, x = described("sm_90", q, k, v, **{"backend": "hopper", **options})
    assert not against("hopper", p), against("hopper", p)
    seed = meta(dtype=torch.int64) if p.recipe.dropout else None
    lse = meta(*((heads, batch * length) if packed else (batch, heads, q.shape[1])), dtype=torch.float32)
    biases = [t if t.ndim == 4 else None for t in x.extra]
    p = p._replace(wanted=tuple(t is not None for t in biases))
    of_o, of_q, of_k, of_v = (torch.empty_like(t, dtype=p.out_dtype) for t in (x.q[..., : v.shape[-1]], q, k, v))
    saved, grads = Saved(of_o, lse, seed), Grads(of_q, of_k, of_v, tuple(biases))
    counter = meta(2, dtype=torch.int32)
    if q.dtype == torch.float32:
        keys = fp32_backward_launch.empty_keys(p, q.device)
        return fp32_launch.forward_launches(p, fp32_launch.plan(p), x, saved, keys, counter)
    if splits(p):
        pl = decode_launch.plan(p)
        return decode_launch.launches(p, pl, x, saved, meta(pl.partial, dtype=torch.float32))
    pl = plan.plan(p)
    if p.layout.page(p) is not None or pl.backward is None:
        return launch.forward_launches(p, pl, x, saved, counter)
    scratch, do = pl.empty_scratch(p, q.device), torch.empty_like(of_o, dtype=q.dtype)
    narrow = saved._replace(o=do)  # a backward reads o in q's type
    backward = launch.backward_launches(
        p, pl, x, narrow, do, torch.empty_like(lse), scratch, grads, counter,
        empty_sums(p, x, grads, BIAS[padded(p)]),
    )  # fmt: skip
    return [*launch.forward_launches(p, pl, x, saved, counter), *backward]


MULTIPLY = (
    "attention_forward", "attention_forward_fp32", "attention_backward", "attention_backward_by_gradient",
    "attention_decode",
)  # fmt: skip
BIASED = ("attention_backward_gather",)


def main(only: str | None = None) -> Iterator[dict[str, Any]]:
    """Every kernel that multiplies, per head size and call; of "biased" that of the gradient alone."""
    use_target("sm_90")
    digests = known("hopper/offline.py")
    chosen = CALLS if only is None else {D: (only,) for D in CALLS if D <= 256}
    for D, names in chosen.items():
        for name in names:
            for one in launches(D, calls()[name]):
                kernel = one.kernel.fn.__name__
                if kernel in (BIASED if name == "biased" else MULTIPLY):
                    yield {"kernel": kernel, "D": D, "call": name} | read_new(one, digests, read_hopper)


if __name__ == "__main__":
    for line in main(*sys.argv[1:]):
        print(json.dumps({"triton": triton.__version__, **line}), flush=True)
