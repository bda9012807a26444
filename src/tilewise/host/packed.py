"""Launch a kernel whose arguments lie packed in memory: one call of the driver, which nothing in Python looks at again.

Triton's launcher in C reads all arguments anew, those known at compile time, too.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from .direct import BASE

Pointer = ctypes.c_void_p
NUMBERS: dict[str, Any] = {
    **{f"i{bits}": getattr(ctypes, f"c_int{max(8, bits)}") for bits in (1, 8, 16, 32, 64)},
    **{f"u{bits}": getattr(ctypes, f"c_uint{max(8, bits)}") for bits in (1, 8, 16, 32, 64)},
    "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
"""Types of arguments by Triton's names; fp16 and bf16 are left to Triton."""
MAP_OFFSET, MAP_SIZE, TO_FOLLOW = 128, 128, 6
"""Where Triton's object holds TMA's description of a tensor, and its size; and what cuda.h calls the attribute by which
a kernel may begin while the one before ends."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [
        ("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60),
    ]  # fmt: skip


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", Pointer), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


@cache
def driver() -> Any:
    """Return the driver's function, or None."""
    try:
        found = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    found.argtypes = [Pointer] * 4
    return found


class Packed:
    """One launch."""

    __slots__ = ("call", "packed")

    def __init__(self, signature: Sequence[Any], given: Sequence[Any]) -> None:
        """`signature` and `given` are what Triton's launcher in C is made of, and takes."""
        grid, (stream, function, cooperative, to_follow), metadata = given[:3], given[3:7], given[9]
        warps, clusters, shared = metadata[:3]
        if cooperative or clusters != 1:
            raise TypeError("a launch must have programs without clusters, got others; leave it to Triton's launcher")
        values = [*pack(signature, given[len(BASE) :]), Pointer(), Pointer()]  # the last are scratch
        addresses = [each if isinstance(each, Address) else ctypes.addressof(each) for each in values]
        parameters = (Pointer * len(values))(*addresses)
        attribute = Attribute(id=TO_FOLLOW, value=1)
        config = Config(*grid, 32 * warps, 1, 1, shared, stream, ctypes.pointer(attribute), int(bool(to_follow)))
        self.packed = values, parameters, attribute, config, given
        self.call = ctypes.addressof(config), function, ctypes.addressof(parameters), None

    def again(self, launch: Any) -> Any:
        """Return the launch by Triton's own launcher, which also keeps the packed arguments."""
        return lambda: launch(*self.packed[-1])


class Address(int):
    """Where an argument lies."""


def pack(signature: Sequence[Any], given: Sequence[Any]) -> Iterator[Any]:
    """Yield each argument that a kernel takes, in its type."""
    values = iter(given)
    for kind in signature:
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind.partition("]")[0].count(",") + 1  # a layout, which may follow, has commas, too
            yield Address(id(next(values)) + MAP_OFFSET)
            yield from [ctypes.c_int32(next(values)) for _ in range(rank)]
            yield from [ctypes.c_int64(next(values)) for _ in range(rank)]
            continue
        value = next(values)
        if isinstance(kind, tuple):
            yield from pack(kind, value)
        elif kind[0] == "*":
            yield ctypes.c_uint64(value or 0)
        elif kind != "constexpr":
            yield NUMBERS[kind](value)


def packed(signature: Sequence[Any], launch: Any, given: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return a launch with its arguments packed, and what else is to be done where it returns an error.

    Where the driver refuses, as in a thread without a context, Triton's launcher does that, or raises the error.
    """
    found = driver()
    try:
        made = Packed(signature, given) if found else None
    except (KeyError, TypeError):
        made = None
    return (launch, given, None) if made is None else (found, made.call, made.again(launch))
