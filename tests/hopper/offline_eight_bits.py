"""Compiles Hopper's 8-bit forward without a GPU: one JSON line for each head size, precision and call. What is known
(known.py) is not compiled, and has a digest alone.

Run it in a separate process with TRITON_INTERPRET=0, as offline.py, whose tools it uses.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

import tilewise as tw
from tilewise.call.operands import Saved
from tilewise.call.problem import lse_shape
from tilewise.hopper import launch, plan
from tilewise.quantize.codes import empty_codes

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
from offline import described, innermost_loops, known, meta, read_hopper, read_new, sass, use_target

B, S, H = 2, 1024, 16
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", re.MULTILINE)
CALLS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"mask": tw.Causal()}, "window": {"mask": tw.Window(100, 0)},
    "softcap": {"score": tw.SoftCap(50.0)}, "bias": {"score": tw.Bias(meta(H, S, S, dtype=torch.float32))},
    "sink": {"sink": meta(H, dtype=torch.float32)},
    "varlen": {"layout": tw.Varlen(*[meta(B + 1, dtype=torch.int32)] * 2, S, S)},
}  # fmt: skip


CASES = [
    (D, precision, name) for D, precision in product((64, 128, 256), ("int8", "fp8"))
    for name in (CALLS if D == 128 else ("full",))
]  # fmt: skip
"""Every row of the table without a mask, and at head size 128 every call."""


def launch_of(D: int, precision: str | None, options: dict[str, Any], of_e4m3: bool = False) -> Any:
    """The launch of a forward of 16-bit tensors, or of e4m3 ones as they are."""
    shape = (B * S,) if "layout" in options else (B, S)
    o = meta(*shape, H, D, dtype=torch.bfloat16)
    q = tw.Quantized(meta(*shape, H, D, dtype=torch.float8_e4m3fn), meta(H, dtype=torch.float32)) if of_e4m3 else o
    p, x = described("sm_90", q, q, q, **{"precision": precision, "backend": "hopper", **options})
    lse = meta(*lse_shape(p.q.shape), dtype=torch.float32)
    saved, counter = Saved(torch.empty_like(o), lse), meta(2, dtype=torch.int32)
    if precision:
        saved = saved._replace(extra=empty_codes(p, o.device).present())
    return launch.forward_launches(p, plan.plan(p), x, saved, counter)[-1]


def loop(kernel: Any) -> dict[str, int]:
    """How often each instruction stands in the longest loop of products."""
    bodies = innermost_loops(sass(kernel.asm["cubin"]), r"\b(HGMMA|QGMMA|IGMMA)\b")
    return max((Counter(INSTRUCTION.findall(body)) for body in bodies), key=lambda found: found.total())


def main() -> Iterator[dict[str, Any]]:
    """All cases, and 16 bits for comparison. Inputs that are e4m3 already count as a precision "e4m3"."""
    use_target("sm_90")
    digests = known("hopper/offline_eight_bits.py")
    of_e4m3 = [(D, "e4m3", name) for D in (64, 128, 256) for name in (("full", "varlen") if D == 128 else ("full",))]
    for D, precision, name in [(D, None, "full") for D in (64, 128, 256)] + CASES + of_e4m3:
        wide = precision == "e4m3"
        one = launch_of(D, "fp8" if wide else precision, CALLS[name], of_e4m3=wide)
        row = {"triton": triton.__version__, "D": D, "precision": precision, "call": name}
        yield row | read_new(one, digests, lambda kernel: {"counts": loop(kernel)} | read_hopper(kernel))


if __name__ == "__main__":
    for line in main():
        print(json.dumps(line), flush=True)
