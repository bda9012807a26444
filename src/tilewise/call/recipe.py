"""Recipe: the options of a call, without tensors. It passes through PyTorch's dispatcher as text."""

import ast
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..values import by_head, intervals, listed, masks, score, tables
from ..values.cached import Cached
from ..values.function import MADE, Kinds
from ..values.layout import PADDED, Layout, Padded, Varlen
from ..values.origin import Origin
from ..values.products import EXACT, EightBits, Exact, Products, Scaled, products_of
from ..values.quantized import Quantized
from ..values.value import Value

KINDS = Kinds({
    name: kind
    for module in (intervals, tables, by_head, listed, masks, score)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Value) and hasattr(kind, "rule")
    and not issubclass(kind, masks.Several)
} | MADE)  # fmt: skip
"""Every class of mask or score that a recipe can name: those in values/ that have a rule; and functions."""

SAVED = (
    masks.Full, masks.And, listed.Listed, by_head.Blocks, *KINDS.values(), Origin, Varlen, Cached, Quantized,
    EightBits, Padded,
)  # fmt: skip
"""What torch.load may find."""
torch.serialization.add_safe_globals([*SAVED])
for name in ("tilewise.mask", "tilewise.score", "tilewise.layout"):  # where 0.1.0 had them: its files name these
    earlier = sys.modules[name] = ModuleType(name)
    earlier.__dict__.update({kind.__name__: kind for kind in SAVED})
    torch.serialization.add_safe_globals([(kind, f"{name}.{kind.__name__}") for kind in SAVED])


class Recipe(NamedTuple):
    """The caller's options, without tensors.

    A mask or score is (class name, numbers...), or for a function (its program's text, numbers...), which other
    versions may not read. Layout and products are (class name, names of their tensors, numbers...). The origin is its
    numbers, () of a whole.
    """

    mask: tuple[tuple[Any, ...], ...] = ()
    score: tuple[tuple[Any, ...], ...] = ()
    sink: bool = False
    layout: tuple[Any, ...] = PADDED.plain
    scale: float | None = None
    dropout: float = 0.0
    products: tuple[Any, ...] = EXACT.plain
    deterministic: bool = False
    backend: str | None = None
    packed: bool = False
    """Whether q, k and v are views of one tensor; then their gradients must be, too."""
    out_dtype: str | None = None
    """"float32" for results of 16-bit inputs in fp32; None for results in the inputs' type."""
    origin: tuple[int | None, ...] = ()
    """From where dropout counts."""

    @property
    def precision(self) -> str | None:
        """Return the name of the products asked for."""
        return self.products[2]

    @property
    def uniform(self) -> bool:
        """Tell whether all batch entries have M queries and N keys."""
        return OPTIONS[self.layout[0]].uniform

    @property
    def own(self) -> int:
        """Return how many of the extra operands, the last ones, are those of products and layout."""
        return len(self.products[1]) + len(self.layout[1])

    def layout_of(self, tensors: Sequence[Any]) -> Layout:
        """Return the layout with its tensors, which are the last, or with their specs."""
        return _rebuilt(self.layout, tensors[len(tensors) - len(self.layout[1]) :])

    def products_of(self, tensors: Sequence[Any]) -> Products:
        """Return the products with their tensors, which are in front of the layout's, or with their specs."""
        first = len(tensors) - self.own
        return _rebuilt(self.products, tensors[first : first + len(self.products[1])])

    def exact(self, precision: str | None = None) -> "Recipe":
        """Return the recipe with products of the inputs' type. All tensors stay; nothing reads those of products."""
        return self._replace(products=(Exact.__name__, self.products[1], precision))

    def up_to(self, most: int) -> "Recipe":
        """Return the recipe for those sequences of a cache that have at most so many queries."""
        return self._replace(layout=(*self.layout[:-1], most))

    def encode(self) -> str:
        """Write the recipe as text for `decode`; literals only, so that torch.compile and torch.export can carry it."""
        return repr(tuple(self))

    def of_gradients(self) -> "Recipe":
        """Return the recipe of a forward's gradients under autograd, which wants them in the inputs' types."""
        return self if self.out_dtype is None else self._replace(out_dtype=None)

    @staticmethod
    @lru_cache(4096)
    def decode(text: str) -> "Recipe":
        """Read the recipe that `encode` wrote, in 0.1.0, too."""
        recipe = Recipe(*ast.literal_eval(text))
        if isinstance(recipe.layout, bool):  # whether the layout was a Varlen, and the name of a precision
            layout = ("Varlen", ("cu_q", "cu_k")) if recipe.layout else PADDED.plain
            recipe = recipe._replace(layout=layout, products=products_of(recipe.products).plain)  # type: ignore[arg-type]
        return recipe


OPTIONS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Padded, Varlen, Cached, Exact, EightBits, Scaled)}
"""Every layout and kind of products that a recipe can name."""


def _rebuilt(plain: tuple[Any, ...], tensors: Sequence[Any]) -> Any:
    return OPTIONS[plain[0]].rebuild(plain, tensors)


def reads_batch(recipe: Recipe) -> bool:
    """Tell whether a mask or score depends on numbers of batch entries."""
    return any([KINDS[name].reads_batch for name, *_ in recipe.mask + recipe.score])


def batched_ranks(recipe: Recipe) -> list[int | None]:
    """Return for every extra operand of a padded batch its number of dimensions if the first is the batch; None for
    one that has no batch."""
    of_values = [rank for name, *_ in recipe.mask + recipe.score for rank in KINDS[name].batched_ranks()]
    of_products = [OPTIONS[recipe.products[0]].ranks.get(name) for name in recipe.products[1]]
    return [*of_values, *[None] * recipe.sink, *of_products]
