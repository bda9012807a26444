"""The interpreter that tests run kernels in is quicker than Triton's, and does the same (interpreter.py)."""

import os
import subprocess
import sys

import pytest
import torch
from interpreter import KNOWN

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (knobs.runtime.interpret and triton.__version__.startswith(KNOWN)), reason="it is as Triton made it"
)
TYPES = """
import triton.language as tl
from triton.runtime import interpreter
block, pointers = tl.block_type(tl.bfloat16, [tl.constexpr(16), 32]), tl.block_type(tl.pointer_type(tl.float8e5), [4])
tensor, scalar = tl.tensor(None, block), tl.tensor(None, tl.int1)
kinds = [block, pointers, *(it.type for it in (tensor.shape, tl.tuple([1, tensor]), tl.tuple([scalar], [tl.int1])))]
seen = [str(kind) for kind in kinds]
seen += [(str(it.shape), str(it.numel), str(it.dtype)) for it in (tensor, scalar)]
kinds = block, pointers, tl.int1, tl.uint32, tl.pointer_type(tl.int8)
seen += [str(interpreter._get_np_dtype(kind)) for kind in kinds]
"""


def test_types_are_those_of_triton():
    ours = {}
    exec(TYPES, ours)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", f"{TYPES}\nprint(seen)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(ours["seen"]), done.stderr


def test_no_block_type_is_empty_or_of_another_size_than_a_power_of_two():
    with pytest.raises(TypeError, match="0d block_type is forbidden"):
        tl.block_type(tl.int32, [])
    with pytest.raises(ValueError, match="must be a power of 2"):
        tl.block_type(tl.int32, [3])


@triton.jit
def add(x, y, out):
    tl.store(out + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)) + tl.load(y))


def test_integers_wrap_as_in_triton():
    x, out = torch.tensor([0, 1, 2**31 - 1, -1], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    add[(1,)](x, torch.ones(1, dtype=torch.int32), out)
    assert out.tolist() == [1, 2, -(2**31), 0]
