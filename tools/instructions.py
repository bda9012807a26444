"""For `tools/states.py carry`: compiles every launch for sm_90 without a GPU, and counts instructions.

Runs with a tree's own src and tests on PYTHONPATH; prints, by the kernel's state, ["hopper forward D64 ...", counts].
"""

import importlib.util
import json
import re
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

HOPPER = {
    "attention_forward": "hopper forward", "attention_forward_fp32": "hopper fp32 forward",
    "attention_backward": "hopper backward", "attention_backward_preprocess": "hopper backward",
    "attention_backward_postprocess": "hopper backward", "attention_backward_init_semaphore": "hopper backward",
    "attention_backward_preprocess_fp32": "hopper fp32 backward", "attention_backward_fp32": "hopper fp32 backward",
    "attention_split_fp32": "hopper fp32 forward", "attention_backward_gather": "gradient of a bias",
    "attention_list_tiles": "lists of tiles", "attention_backward_renormalize": "renormalization",
    "attention_backward_sink": "gradient of a sink",
}  # fmt: skip
TRITON = {
    "attention_forward": "triton forward", "attention_backward_delta": "triton backward",
    "attention_backward_dkdv": "triton backward", "attention_backward_dq": "triton backward",
    "attention_backward_gather": "gradient of a bias", "attention_list_tiles": "lists of tiles",
    "attention_backward_renormalize": "renormalization", "attention_forward_single": "triton single",
    "attention_backward_single": "triton single", "attention_backward_sink": "gradient of a sink",
    "attention_backward_chunk": "triton backward in chunks",
    "attention_backward_chunk_sums": "triton backward in chunks",
}  # fmt: skip
STATE = Path(__file__).parents[1] / "studies" / "bench" / "state.py"
GROUPS = {"hopper": HOPPER, "triton": TRITON}
for names in GROUPS.values():
    renamed = runpy.run_path(str(STATE))["RENAMED"]
    names |= {renamed.get(name, name): group for name, group in names.items()}
"""The state that a kernel's function belongs to, under its name of today and that of earlier revisions."""
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def load(name: str, file: str) -> Any:
    """Import a module of the tree's tests."""
    path = next(folder for folder in sys.path if folder.endswith("tests"))
    spec = importlib.util.spec_from_file_location(name, f"{path}/{file}")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def launches() -> Iterator[tuple[str, int, str, Any]]:
    """Yield back end, head size, call, and each of its launches."""
    portable, hopper = load("portable", "triton/offline.py"), load("hopper_offline", "hopper/offline.py")
    fp32 = load("fp32_offline", "hopper/offline_fp32_backward.py")
    portable.use_target("sm_90")
    for D, names in hopper.CALLS.items():
        for name in names:
            for one in hopper.launches(D, hopper.calls()[name]):
                yield "hopper", D, name, one
    for D, names in fp32.CALLS.items():
        for precision, name in product(fp32.KINDS, names):
            for one in fp32.launches(D, precision, name):
                yield "hopper", D, f"{precision} {name} backward", one
    eight = load("eight_bits_offline", "hopper/offline_eight_bits.py")
    for D, precision, name in eight.CASES:
        yield "hopper", D, f"{precision} {name}", eight.launch_of(D, precision, eight.CALLS[name])
    for call in portable.calls("sm_90"):
        for one in portable.launches_of("sm_90", call):
            kind = "fp32 " if call.dtype == torch.float32 else ""
            yield "triton", call.D, f"{kind}{call.variant}", one


def main() -> None:
    """Print a line for each launch."""
    sass = load("reader", "triton/offline.py").sass
    for number, (back, D, name, one) in enumerate(launches()):
        kernel = str(one.kernel.fn.__name__)
        group = GROUPS[back].get(kernel, kernel)
        if back == "triton" and name.startswith("fp32"):
            group = group.replace("triton", "triton fp32")
        if name.startswith(("int8", "fp8")):
            group = group.replace("hopper", "hopper 8-bit")
        counts = Counter(INSTRUCTION.findall(sass(one.compile().asm["cubin"])))
        where = f" D{D}" if "ward" in group or "bias" in group else ""
        print(json.dumps([f"{group}{where} {name} {number}", counts]), flush=True)


if __name__ == "__main__":
    main()
