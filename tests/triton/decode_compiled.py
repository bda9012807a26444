"""Compile the kernels that split keys for a chip, without a GPU: registers, spills and loads, one JSON line a kernel.
What is known (known.py) is not compiled, and has a digest alone.

TRITON_INTERPRET=0 python tests/triton/decode_compiled.py sm_90
"""

import json
import re
import sys
from itertools import chain

import torch
import triton
from offline import described, known, read_new, registers_and_spills, use_target

import tilewise as tw
from tilewise.call.operands import Saved
from tilewise.triton.split_keys import launch as decode_launch
from tilewise.triton.tiles import WITH_FP8

CASES = {
    "D128 page 64": {},
    "D128 page 16": {"page": 16},
    "D128 page 1": {"page": 1},
    "D128 contiguous": {"page": 0},
    "D64 page 64": {"D": 64},
    "D256 page 64": {"D": 256},
    "D80 page 64": {"D": 80},
    "D128 chunks": {"invariant": 1024, "mask": tw.Causal() & tw.Window(1023, 0), "score": tw.SoftCap(50.0)},
    "D128 prefill": {"M": 512},
    "D256 prefill": {"M": 512, "D": 256},
    "D128 e4m3": {"eight": True},
    "D128 e4m3 page 16": {"eight": True, "page": 16},
    "D256 e4m3": {"eight": True, "D": 256},
    "D128 e4m3 prefill": {"eight": True, "M": 512},
    "D256 e4m3 prefill": {"eight": True, "M": 512, "D": 256},
    "D128 fp32": {"dtype": torch.float32},
    "D256 fp32": {"dtype": torch.float32, "D": 256},
    **{f"latents {name}": {"D": 576, "H": 16, "H_k": 1, "latent": True, **case} for name, case in (
        ("page 64", {}), ("page 16", {"page": 16}), ("contiguous", {"page": 0}), ("128 heads", {"H": 128, "M": 2}),
        ("prefill", {"M": 512}), ("fp32", {"dtype": torch.float32}),
        ("chunks", {"invariant": 1024, "mask": tw.Causal() & tw.Window(1023, 0), "score": tw.SoftCap(50.0)}),
    )},
    "D576 page 64": {"D": 576, "H": 16, "H_k": 1},
}  # fmt: skip


def launches(
    target, D=128, page=64, M=1, invariant=0, mask=None, score=(), dtype=torch.bfloat16, eight=False, H=32, H_k=8,
    latent=False,
):  # fmt: skip
    """The launches of a case on a chip, with tensors on the meta device; with `latent`, V is K's first columns."""
    B, n, D_v = 64, 4096, min(D, 512)
    empty = lambda *shape, kind=dtype: torch.empty(shape, dtype=kind, device="meta")  # noqa: E731
    table = empty(B, n // page, kind=torch.int32) if page else None
    cache = empty(1024, page, H_k, D) if page else empty(B, n, H_k, D)
    if eight:
        cache = tw.Quantized(cache.to(torch.float8_e4m3fn), empty(H_k, kind=torch.float32))
    layout = tw.Cached(empty(B, kind=torch.int32), table, invariant=invariant)
    options = {"mask": mask or tw.Causal(), "score": score, "layout": layout, "backend": "triton"}
    values = cache if eight else cache[..., :D_v] if latent else torch.empty_like(cache[..., :D_v])
    p, x = described(target, empty(B, M, H, D), cache, values, **options)
    saved = Saved(empty(B, M, H, D_v), empty(B, H, M, kind=torch.float32))
    pl = decode_launch.plan(p)
    return decode_launch.launches(p, pl, x, saved, empty(pl.partial, kind=torch.float32))


def measure(compiled):
    """Registers, spills and bytes of shared memory, how K and V are loaded, and what orders kernels."""
    registers, spills = registers_and_spills(compiled)
    found = {"registers": registers, "spills": spills, "shared": compiled.metadata.shared}
    if "ptx" in compiled.asm:
        ptx = compiled.asm["ptx"]
        found["copies"] = len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10", ptx))
        found["waits"] = sorted({int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)})
        found["order"] = sorted(set(re.findall(r"griddepcontrol\.(\w+)", ptx)))
    else:
        found["copies"] = len(re.findall(r"(?:global|buffer)_load_dwordx4", compiled.asm["amdgcn"]))
        found["waits"] = []
    return found


if __name__ == "__main__":
    use_target(sys.argv[1])
    digests = known(f"triton/decode_compiled.py {sys.argv[1]}")
    for name, case in CASES.items():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        if case.get("eight") and sys.argv[1] not in WITH_FP8:
            continue
        for launch in chain(launches(sys.argv[1], **case)):
            kernel = launch.kernel.fn.__name__
            if kernel == "attention_decode" or name in ("D128 page 64", "D128 chunks"):
                row = {"triton": triton.__version__, "case": name, "kernel": kernel}
                print(json.dumps(row | read_new(launch, digests, measure)), flush=True)
