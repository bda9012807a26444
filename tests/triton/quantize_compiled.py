"""Compile the kernels that quantize Q, K and V for a chip, without a GPU: registers, spills and loads, one JSON line a
kernel.

TRITON_INTERPRET=0 python tests/triton/quantize_compiled.py sm_90 [128 …]
"""

import json
import re
import sys
from itertools import product

import torch

import tilewise as tw
from tilewise.call.check import check_arguments, describe_fake
from tilewise.quantize.codes import empty_codes
from tilewise.quantize.launch import quantize_launches
from tilewise.warm.cross_compile import use_target


def launches(target, D, precision, pairs):
    """The launches of a call with bf16 operands; with `pairs`, rotary rotates q and k."""
    q, angles = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 4096, 8, D), (4096, D // 2))
    )
    if pairs:
        precision = tw.EightBits(precision, cos=angles, sin=angles, interleaved=pairs == "neighbours")
    x, recipe, longest = check_arguments(q, q, q, tw.Full(), (), None, None, 0.0, None, precision, False, None)
    p = describe_fake(x, recipe, longest)._replace(target=target)
    return quantize_launches(p, x, empty_codes(p, q.device), {})


def measure(compiled):
    """Registers and spills; loads, and those of fewer than 16 bytes."""
    text = compiled.asm["ptx"] if "ptx" in compiled.asm else compiled.asm["amdgcn"]
    loads = re.findall(r"(?:ld\.global|global_load|buffer_load)\S*", text)
    wide = [load for load in loads if re.search(r"v4|dwordx4|v2\.b64", load)]
    found = {"loads": len(loads), "narrow": len(loads) - len(wide)}
    if "ptx" in compiled.asm:
        from studies.accumulation.compiled import resources

        found["registers"], found["spills"] = resources(compiled.asm["cubin"])
    else:
        found["registers"], found["spills"] = (
            max(map(int, re.findall(rf"\.{name}:\s*(\d+)", text))) for name in ("vgpr_count", "vgpr_spill_count")
        )
    return found


if __name__ == "__main__":
    use_target(sys.argv[1])
    for D, pairs in product(map(int, sys.argv[2:] or (64, 128, 256)), (None, "halves", "neighbours")):
        for launch in launches(sys.argv[1], D, "int8" if sys.argv[1] == "sm_80" else "fp8", pairs):
            kernel = launch.kernel.fn.__name__
            print(json.dumps({"kernel": kernel, "D": D, "pairs": pairs, **measure(launch.compile())}), flush=True)
