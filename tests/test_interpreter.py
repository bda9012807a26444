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
from triton.runtime import interpreter  # noqa: E402

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
def operate(x, y, out, OPERATION: tl.constexpr):
    a, b = tl.load(x + tl.arange(0, 4)), tl.load(y)
    if OPERATION == "add":
        c = a + b
    elif OPERATION == "sub":
        c = a - b
    else:
        c = a * b
    tl.store(out + tl.arange(0, 4), c)


def result(operation, entry, by, dtype):
    """What the kernel stores for one entry of four."""
    x, out = torch.tensor([0, 1, entry, 3], dtype=dtype), torch.zeros(4, dtype=dtype)
    operate[(1,)](x, torch.tensor([by], dtype=dtype), out, operation)
    return out[2].item()


@pytest.mark.parametrize(
    ("operation", "entry", "by", "expected"),
    [("add", 2**31 - 1, 1, 2**31), ("sub", -(2**31), 1, -(2**31) - 1), ("mul", 2**30, 2, 2**31)],
)
def test_an_overflow_is_found(operation, entry, by, expected):
    with pytest.raises(interpreter.InterpreterError, match=f"int32 overflow detected for operation {operation}"):
        result(operation, entry, by, torch.int32)
    assert result(operation, entry, by, torch.int64) == expected


def test_the_least_number_is_none():
    assert result("mul", -(2**30), 2, torch.int32) == -(2**31)
    assert result("sub", -(2**31) + 1, 1, torch.int32) == -(2**31)
