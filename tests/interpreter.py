"""Make Triton's interpreter quick on few numbers, as tests have them. It computes the same.

There its time goes into types: for each number that a kernel adds, it names them, lists their sizes and counts their
entries. Here that waits until somebody asks. This follows the code of the releases in `KNOWN`; others run as they are.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

KNOWN = ("3.6.",)
"""How the names of these releases begin."""
PLAIN = ("int32", "int64", "fp32", "fp64")
"""Types that need no conversion beside themselves, whatever the operation."""


def quicken() -> None:
    """Replace what is slow in the interpreter, for the whole process."""
    if find_spec("triton") is None:
        return
    import triton
    from triton.runtime import interpreter

    patch_once(interpreter)
    if triton.__version__.startswith(KNOWN):
        name_types_on_demand(interpreter.tl.core)
        look_up_types(interpreter)
        meet_at_once(interpreter)
        drop_checks(interpreter)


def patch_once(interpreter: Any) -> None:
    """Replace triton.language once a kernel. The interpreter looks for what to replace at every call of a device
    function."""
    tl, patch = interpreter.tl, interpreter._patch_lang

    def patch_unless_done(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        done = seen and not any(tl.core.is_builtin(language.load) for language in seen)
        return interpreter._LangPatchScope() if done else patch(fn)

    interpreter._patch_lang = patch_unless_done


def name_types_on_demand(core: Any) -> None:
    """Compute names of block types, types of tuples, and shapes of tensors when they are first read."""
    checked = lru_cache(None)(core.validate_block_shape)

    def tuple_init(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [core._unwrap_if_constexpr(size) for size in shape]
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty, self.numel, self.shape = element_ty, checked((*sizes,)), core.tuple(sizes)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def sizes(tensor: Any) -> list[int]:
        return tensor.type.shape.values if tensor.type.is_block() else []

    core.tuple.__init__, core.block_type.__init__, core.tensor.__init__ = tuple_init, block_type_init, tensor_init
    on_demand(core.tuple, "type", lambda it: core._type_for_tuple_values(it.values))
    on_demand(core.block_type, "name", lambda it: f"<{it.shape}, {it.element_ty}>")
    on_demand(core.tensor, "shape", lambda it: core.tuple([core.constexpr(size) for size in sizes(it)]))
    on_demand(core.tensor, "numel", lambda it: core.constexpr(math.prod(sizes(it))))


def on_demand(kind: Any, name: str, compute: Callable[[Any], Any]) -> None:
    """Make an attribute one that is computed when it is first read, unless it was set."""

    def read(self: Any) -> Any:
        if name not in self.__dict__:
            self.__dict__[name] = compute(self)
        return self.__dict__[name]

    setattr(kind, name, property(read, lambda self, value: self.__dict__.__setitem__(name, value)))


def look_up_types(interpreter: Any) -> None:
    """Keep NumPy's type of each scalar type, in place of a table of all that is built for each look-up."""
    slow, kept = interpreter._get_np_dtype, {}

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in kept:
            kept[scalar.name] = slow(scalar)
        return kept[scalar.name]

    interpreter._get_np_dtype = np_dtype


def meet_at_once(interpreter: Any) -> None:
    """Take two operands as they are if they have one type; make a Python number one of that type directly."""
    semantic, slow = interpreter.TritonSemantic, interpreter.TritonSemantic.binary_op_type_checking_impl

    def fits(number: Any, kind: str) -> bool:
        return (type(number) is int and -(2**31) <= number < 2**31) or (type(number) is float and kind[:2] == "fp")

    def meet(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        one, other = (getattr(getattr(side, "dtype", None), "name", None) for side in (lhs, rhs))
        kind = one or other
        as_they_are = named or options[2:3] == (False,)  # without arithmetic_check
        if as_they_are or kind not in PLAIN or not (one == other or fits(rhs if one else lhs, kind)):
            return slow(self, lhs, rhs, *options, **named)
        if one is None:
            lhs = self.scalar_constant(lhs, rhs.dtype)
        if other is None:
            rhs = self.scalar_constant(rhs, lhs.dtype)
        return self.broadcast_impl_value(lhs, rhs)

    semantic.binary_op_type_checking_impl = meet


def drop_checks(interpreter: Any) -> None:
    """Do not look for overflows of integers: while `debug` is off nothing comes of it, and it takes 43% of the time."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
