"""Recipe: the options of a call, without tensors. It passes through PyTorch's dispatcher as text."""

import ast
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..values import intervals, masks, score, tables
from ..values.layout import Cached, Varlen
from ..values.origin import Origin
from ..values.products import EightBits, Quantized
from ..values.value import Value

KINDS: dict[str, type[Value]] = {
    name: kind
    for module in (intervals, tables, masks, score)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Value) and hasattr(kind, "device")
}
"""Every class of mask or score that a recipe can name: those in values/ that name kernel functions."""

SAVED = masks.Full, masks.And, masks.Listed, *KINDS.values(), Origin, Varlen, Cached, Quantized, EightBits
"""What torch.load may find."""
torch.serialization.add_safe_globals([*SAVED])
torch.serialization.add_safe_globals(  # by their names in 0.1.0
    [(kind, f"tilewise.{file}.{kind.__name__}") for kind in SAVED for file in ("mask", "score", "layout")]
)

PRECISIONS = ("ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3", "tf32")
EIGHT_BITS = ("int8", "fp8")
"""Names of precision for fp16 and bf16: approximations, never chosen by None or by torch's settings."""
PREFERENCE = {
    "highest": ("bf16x6", "ieee"),
    "high": ("fp16x3", "tf32x3", "bf16x6", "ieee"),
    "medium": ("tf32", "fp16x3", "tf32x3", "bf16x6", "ieee"),
}
"""What `precision=None` selects for each torch.get_float32_matmul_precision(): the first that is available."""


class Recipe(NamedTuple):
    """The caller's options, without tensors. A mask or score is (class name, numbers...).

    A layout is (class name, names of its tensors, numbers...), or () for a padded batch.
    """

    mask: tuple[tuple[Any, ...], ...] = ()
    score: tuple[tuple[Any, ...], ...] = ()
    sink: bool = False
    layout: tuple[Any, ...] = ()
    scale: float | None = None
    dropout: float = 0.0
    precision: str | None = None
    deterministic: bool = False
    backend: str | None = None
    packed: bool = False
    """Whether q, k and v are views of one tensor; then their gradients must be, too."""
    out_dtype: str | None = None
    """"float32" for results of 16-bit inputs in fp32; None for results in the inputs' type."""
    place: tuple[int, int, int, int, int] | None = None
    """The whole's row, column, head, number of heads and batch entry, from which dropout counts; None without it."""
    quantized: bool = False
    """Whether q, k and v are in e4m3; then their three scales (B, H_k) follow the sink."""
    given: bool = False
    """Whether K's mean and the balance of 8-bit products, (B, H_k, D), follow these."""
    rotary: str | None = None
    """How pairs lie where 8-bit products turn q and k, "halves" or "neighbours"; then cos and sin, (positions, R / 2),
    follow. None for no rotary."""

    @property
    def varlen(self) -> bool:
        """Tell whether the rows are packed sequences, as `Varlen` describes them."""
        return self.layout[:1] == (Varlen.__name__,)

    @property
    def cached(self) -> bool:
        """Tell whether the keys are in a cache, as `Cached` describes it."""
        return self.layout[:1] == (Cached.__name__,)

    @property
    def of_layout(self) -> int:
        """Return how many of the extra operands, the last ones, are what 8-bit products are told, or the layout's."""
        return 3 * self.quantized + 2 * self.given + 2 * bool(self.rotary) + (len(self.layout[1]) if self.layout else 0)

    def encode(self) -> str:
        """Write the recipe as text for `decode`; literals only, so that torch.compile and torch.export can carry it."""
        return repr(tuple(self))

    def of_gradients(self) -> "Recipe":
        """Return the recipe of a forward's gradients under autograd, which wants them in the inputs' types."""
        return self if self.out_dtype is None else self._replace(out_dtype=None)

    @staticmethod
    @lru_cache(4096)
    def decode(text: str) -> "Recipe":
        """Read the recipe that `encode` wrote."""
        recipe = Recipe(*ast.literal_eval(text))
        if isinstance(recipe.layout, bool):  # version 0.1.0 wrote whether the layout was a Varlen
            recipe = recipe._replace(layout=("Varlen", ("cu_q", "cu_k")) if recipe.layout else ())
        return recipe


@lru_cache(64)
def hides_later_keys(part: tuple[Any, ...]) -> bool:
    """Tell whether a part of a recipe's mask hides every key after its query, whatever its tensors hold."""
    kind: Any = KINDS[part[0]]
    return not kind.captures and kind.rebuild(part[1:], ()).hides_later_keys


def batched_ranks(recipe: Recipe) -> tuple[int, ...]:
    """Return for every extra operand of a padded batch its number of dimensions if the first is the batch."""
    ranks = [len(shape) for name, *_ in recipe.mask + recipe.score for shape in KINDS[name].shapes]
    of_codes = [2] * 3 * recipe.quantized + [3] * 2 * recipe.given + [3] * 2 * bool(recipe.rotary)
    return (*ranks, *[2] * recipe.sink, *of_codes)  # a sink (H,) and rotary's tables (positions, R / 2) have no batch
