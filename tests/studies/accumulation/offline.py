"""Compiles the experiment's kernel for a chip that is not here: one JSON line a combination, with what its PTX holds.

Run it in a separate process with TRITON_INTERPRET=0; its argument is "sm_80" or "sm_90".
"""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "triton"))
from offline import read, use_target

from studies.accumulation.compiled import compiled, resources
from studies.accumulation.measure import IN_LOOP, Combination, tiles_for
from studies.accumulation.speed import Kernel

SOME = (
    Combination(),
    Combination(scores="fp16"),
    Combination(values="fp16", way=IN_LOOP),
    Combination("fp16", "fp16", exp2="halves"),
)
PRODUCTS = re.compile(r"wgmma\.mma_async\S*?\.(f16|f32)\.f16\.f16|mma\.sync\S*?\.(f16|f32)\.f16\.f16\.f(?:16|32)")


if __name__ == "__main__":
    use_target(sys.argv[1])
    for combination in SOME:
        tiles = tiles_for(64)[0]
        made = compiled(sys.argv[1], Kernel(sys.argv[1], 64, list(tiles[:4]), asdict(combination)), tiles)
        ptx = made.asm["ptx"]
        sums = sorted({a or b for a, b in PRODUCTS.findall(ptx)})
        packed = "ex2.approx.f16x2" in ptx
        row = {"of": asdict(combination), "sums": sums, "packed": packed, "resources": resources(made.asm["cubin"])}
        print(json.dumps(row | read(made)._asdict()), flush=True)
