"""How the fp32 backward splits P and dS in registers: its PTX, carried out on the CPU."""

import ast
import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewise.hopper.fp32 import backward_products

Registers = dict[str, Tensor]
TYPES = {2: torch.float16, 3: torch.bfloat16}
ROUNDED = {2: 2.0**-22, 3: 2.0**-24}
"""What is lost of a number, by the number of pieces."""
NUMBERS = torch.cat([
    torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, 2.0**15, -3.1415927, 1 / 3, 32767.998]),
    torch.linspace(-9.0, 9.0, 119).exp2(),
])  # fmt: skip


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def as_floats(x: Tensor) -> Tensor:
    return x.view(torch.float32)


def convert(name: str) -> Callable[..., Tensor]:
    """cvt.rn to two 16-bit numbers, the first of them in the upper half."""
    dtype = torch.bfloat16 if ".bf16x2" in name else torch.float16
    largest = torch.finfo(dtype).max

    def half(x: Tensor) -> Tensor:
        x = as_floats(x)
        x = x.clamp(-largest, largest) if ".satfinite" in name else x
        return x.to(dtype).view(torch.int16).to(torch.int32) & 0xFFFF

    return lambda high, low: half(high) << 16 | half(low)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "cvt.f32.f16": lambda x: as_bits(x.to(torch.int16).view(torch.float16).float()),
    "sub.f32": lambda x, y: as_bits(as_floats(x) - as_floats(y)),
    "shl.b32": lambda x, n: x << n,
    "and.b32": lambda x, y: x & y,
    "mov.b32": lambda x: x,
}


def carry_out(text: str, registers: Registers) -> None:
    """Instruction by instruction."""
    for line in filter(None, (part.strip(" {}\n") for part in re.split(r";", text.replace("{a, b}", "a_and_b")))):
        name, _, operands = line.partition(" ")
        if name == ".reg":
            continue
        to, *given = (word.strip() for word in operands.split(","))
        values = [registers[x] if x in registers else torch.tensor(int(x, 0) - (int(x, 0) >> 31 << 32)) for x in given]
        made = (convert(name) if name.startswith("cvt.rn") else OPERATIONS[name])(*values)
        if to == "a_and_b":
            registers["a"], registers["b"] = made & 0xFFFF, made >> 16 & 0xFFFF
        else:
            registers[to] = made.to(torch.int32)


def cut(x: Tensor, count: int) -> Tensor:
    """The pieces of numbers, as `backward_products.split_registers` makes them."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(backward_products.split_registers.fn)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "cvt.rn" in node.value
    ]
    text = texts[count - 2]
    registers = {f"${count}": as_bits(x[::2].contiguous()), f"${count + 1}": as_bits(x[1::2].contiguous())}
    carry_out(text, registers)
    made = torch.stack([registers[f"${n}"] for n in range(count)])
    halves = torch.stack([made & 0xFFFF, made >> 16 & 0xFFFF], -1).flatten(1)
    return halves.to(torch.int16).view(TYPES[count])


@pytest.mark.parametrize("count", TYPES)
def test_finite_numbers_are_the_sum_of_their_pieces(count):
    x = NUMBERS[NUMBERS.isfinite()]
    pieces = cut(x, count)
    assert pieces.isfinite().all()
    assert ((pieces.double().sum(0) - x.double()).abs() <= ROUNDED[count] * x.double().abs() + 2.0**-25).all()


@pytest.mark.parametrize("count", TYPES)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_an_infinity_stands_in_the_last_piece_alone(count, number):
    """In another one, the rest of it would be inf - inf."""
    pieces = cut(torch.tensor([number, 1.0]), count).float()
    if number == number:  # noqa: PLR0124, NaN
        assert pieces[:-1, 0].isfinite().all()
        assert pieces[-1, 0] == number
    else:
        assert pieces[:, 0].isnan().all()
    assert pieces[:, 1].sum() == 1.0


@pytest.mark.parametrize("count", TYPES)
def test_products_of_pieces_keep_the_sign_of_an_infinity(count):
    """What reaches dK: dS of some rows is infinite, and the rows of Q that it meets have one sign."""
    ds, q = torch.tensor([torch.inf, torch.inf, 3.0, -torch.inf]), torch.tensor([0.3, 0.7, -0.2, -0.001])
    a, b = cut(ds, count).float(), cut(q, count).float()
    parts = [a[n] * b[s - n] for s in range(count) for n in range(s + 1)]
    assert torch.stack(parts).sum() == torch.inf
