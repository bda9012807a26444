"""Compile the kernels that quantize Q, K and V for a chip, without a GPU: registers, spills and loads, one JSON line a
kernel. What is known (known.py) is not compiled, and has a digest alone.

TRITON_INTERPRET=0 python tests/triton/quantize_compiled.py sm_90 [128 …]
"""

import json
import re
import sys
from itertools import product

import torch
import triton
from offline import described, known, read_new, registers_and_spills, use_target

import tilewise as tw
from tilewise.quantize.codes import empty_codes
from tilewise.quantize.launch import quantize_launches


def launches(target, D, precision, pairs):
    """The launches of a call with bf16 operands; with `pairs`, rotary rotates q and k."""
    q, angles = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 4096, 8, D), (4096, D // 2))
    )
    if pairs:
        precision = tw.EightBits(precision, cos=angles, sin=angles, interleaved=pairs == "neighbours")
    p, x = described(target, q, q, q, precision=precision)
    return quantize_launches(p, x, empty_codes(p, q.device), {})


def measure(compiled):
    """Registers and spills; loads, and those of fewer than 16 bytes."""
    text = compiled.asm["ptx"] if "ptx" in compiled.asm else compiled.asm["amdgcn"]
    loads = re.findall(r"(?:ld\.global|global_load|buffer_load)\S*", text)
    wide = [load for load in loads if re.search(r"v4|dwordx4|v2\.b64", load)]
    registers, spills = registers_and_spills(compiled)
    return {"loads": len(loads), "narrow": len(loads) - len(wide), "registers": registers, "spills": spills}


if __name__ == "__main__":
    use_target(sys.argv[1])
    digests = known(f"triton/quantize_compiled.py {sys.argv[1]}")
    for D, pairs in product(map(int, sys.argv[2:] or (64, 128, 256)), (None, "halves", "neighbours")):
        for launch in launches(sys.argv[1], D, "int8" if sys.argv[1] == "sm_80" else "fp8", pairs):
            kernel = launch.kernel.fn.__name__
            row = {"triton": triton.__version__, "kernel": kernel, "D": D, "pairs": pairs}
            print(json.dumps(row | read_new(launch, digests, measure)), flush=True)
