"""Compiles the fp32 backward's main kernel for sm_90 without a GPU: one JSON line a row of its table and kind of call.

Run it in a separate process with TRITON_INTERPRET=0, as offline.py does.
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
from tilewise.call.problem import lse_shape
from tilewise.hopper.fp32 import backward_launch as fp32_backward_launch
from tilewise.hopper.fp32 import launch as fp32_launch
from tilewise.hopper.tiles import KINDS

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
from offline import described, known, meta, read_hopper, read_new, use_target

B, S, H = 2, 1024, 4
CALLS = {
    64: ("full", "causal", "ordered"),
    128: ("causal", "varlen"),
}
"""What is compiled of each head size, at both precisions."""
GROUPED = ("ordered", "varlen")
"""Those with fewer key heads than query heads."""


def options(call: str) -> dict[str, Any]:
    """Of one call per kind of kernel."""
    ends = meta(B + 1, dtype=torch.int32)
    return {
        "full": {},
        "causal": {"mask": tw.Causal()},
        "ordered": {"mask": tw.Causal() & tw.Window(100, 20), "deterministic": True},
        "varlen": {"mask": tw.Causal(), "layout": tw.Varlen(ends, ends, S, S)},
    }[call]


def launches(D: int, precision: str, call: str) -> list[Any]:
    """The backward's launches of a call with meta tensors."""
    rows = (B * S,) if call == "varlen" else (B, S)
    q, k = (meta(*rows, heads, D, dtype=torch.float32) for heads in (H, H // 2 if call in GROUPED else H))
    p, x = described("sm_90", q, k, k, **{"precision": precision, "backend": "hopper", **options(call)})
    assert not against("hopper", p), against("hopper", p)
    lse = meta(*lse_shape(p.q.shape), dtype=torch.float32)
    saved, grads = Saved(torch.empty_like(q), lse), Grads(q, k, k, (None,) * len(x.extra))
    scratch, counter = fp32_backward_launch.empty_scratch(p, q.device), meta(2, dtype=torch.int32)
    do, dlse = torch.empty_like(q), torch.empty_like(lse)
    return fp32_backward_launch.launches(p, fp32_launch.plan(p), x, saved, do, dlse, scratch, grads, counter)


def main() -> Iterator[dict[str, Any]]:
    """Every row of the table, and every kind of call."""
    use_target("sm_90")
    digests = known("hopper/offline_fp32_backward.py")
    for D, calls in CALLS.items():
        for precision in KINDS:
            for call in calls:
                made = {one.kernel.fn.__name__: one for one in launches(D, precision, call)}
                row = {"kernel": "attention_backward_fp32", "D": D, "call": f"{precision} {call}"}
                yield row | read_new(made["attention_backward_fp32"], digests, read_hopper)


if __name__ == "__main__":
    for line in main():
        print(json.dumps({"triton": triton.__version__, **line}), flush=True)
