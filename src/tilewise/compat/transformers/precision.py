"""8-bit products for the layers of a model, chosen by their names."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ...values.products import EIGHT_BITS

PRECISION = "_tilewise_precision"
"""The attribute of a layer that holds its precision."""


def set_precision(model: nn.Module, precision: str | None, leave_out: Sequence[str] = ()) -> None:
    """Compute Q K^T of a model's layers in 8 bits, and with "fp8" P V too, where attention is tilewise.

    Prompts and trainings take it. A step of generation, which has one query, stays in 16 bits: it waits for its keys,
    and quantizing them takes longer. A second call replaces the first.

    Args:
        model: a model of transformers, or any module that holds one, in fp16 or bf16.
        precision: "int8", "fp8", or None for 16 bits again.
        leave_out: names of modules, as `model.named_modules()` gives them, whose layers stay in 16 bits; * stands for
            any part, as in "model.layers.0.*".

    Raises ValueError for another precision, and for a name in leave_out that fits no module.
    """
    if precision is not None and precision not in EIGHT_BITS:
        raise ValueError(f"precision must be None, int8 or fp8, got {precision!r}; leave it out for 16 bits")
    names = dict(model.named_modules())
    patterns = [leave_out] if isinstance(leave_out, str) else leave_out
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            examples = ", ".join([name for name in names if name.endswith(("attn", "attention"))][:3])
            raise ValueError(
                f"leave_out must have names of the model's modules, got {pattern!r}; write names such as {examples}"
            )
    for name, module in names.items():
        exact = precision is None or any(fits(name, pattern) for pattern in patterns)
        setattr(module, PRECISION, None if exact else precision)


def fits(name: str, pattern: str) -> bool:
    """Tell whether a pattern names a module, or one that holds it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
