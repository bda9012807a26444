"""Problem: an immutable, hashable description of a call, without tensors.

It adds to a `Recipe` the shapes, types, strides and device of the operands. The choices of back end, tiles and kernels
depend on it alone.
"""

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..values.masks import Mask
from ..values.score import Bias, Score
from ..values.value import Value
from .operands import Operands
from .recipe import EIGHT_BITS, KINDS, PREFERENCE, Recipe, hides_later_keys

MAX_HEAD_SIZE = 512


class TensorSpec(NamedTuple):
    """The properties of one tensor on which the choice of a kernel may depend."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    aligned: bool
    """Whether the first element is on a 16-byte boundary."""

    @staticmethod
    def of(tensor: Tensor, real: bool = True) -> "TensorSpec":
        """Return a tensor's spec; fake and meta tensors (`real` false) have no address and count as aligned."""
        aligned = tensor.data_ptr() % 16 == 0 if real else True
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride(), aligned)


class Call(NamedTuple):
    """The fields of a Problem."""

    recipe: Recipe
    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    extra: tuple[TensorSpec, ...]
    max_q: int
    max_k: int
    target: str
    """The chip: "cpu", "sm_90", "gfx942", …"""
    matmul: str | None
    """Torch's setting "highest", "high" or "medium", if q is fp32 and no precision is named; else None."""
    wanted: tuple[bool, ...] = ()
    """Which extra operands need a gradient; filled in for a backward."""


class Problem(Call):
    """A call: hashable, without tensors."""

    def __hash__(self) -> int:
        """Return the hash, computed once: every call looks up its back end and its plan."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __getstate__(self) -> None:
        """Leave what is computed once out of a pickle, as another process hashes text to other numbers."""

    @cached_property
    def B(self) -> int:  # noqa: N802
        """Return the number of batch entries or packed sequences."""
        if self.recipe.cached:
            return self.in_layout("lengths").shape[0]
        return self.extra[-1].shape[0] - 1 if self.recipe.varlen else self.q.shape[0]

    @cached_property
    def M(self) -> int:  # noqa: N802
        """Return the number of queries of the longest batch entry."""
        if self.recipe.cached and self.rows_packed:
            return self.max_q or self.q.shape[0]
        return self.max_q if self.recipe.varlen else self.q.shape[1]

    @cached_property
    def N(self) -> int:  # noqa: N802
        """Return the number of keys of the longest batch entry; of a cache, its capacity."""
        if (table := self.in_layout("table")) is not None:
            return table.shape[1] * self.k.shape[1]
        return self.max_k if self.recipe.varlen else self.k.shape[1]

    @cached_property
    def rows_packed(self) -> bool:
        """Tell whether q is (T, H, D), without a dimension for the batch."""
        return len(self.q.shape) == 3

    @property
    def after_sink(self) -> int:
        """Return where the `Recipe.of_layout` extra operands after the sink begin."""
        return len(self.extra) - self.recipe.of_layout

    def in_layout(self, name: str, extra: tuple[Any, ...] | None = None) -> Any:
        """Return a layout's tensor from `extra`, by default its spec; None if the layout has none of that name."""
        extra = self.extra if extra is None else extra
        names = self.recipe.layout[1] if self.recipe.layout else ()
        return extra[len(extra) - len(names) + names.index(name)] if name in names else None

    @cached_property
    def H(self) -> int:  # noqa: N802
        """Return the number of query heads."""
        return self.q.shape[-2]

    @cached_property
    def H_k(self) -> int:  # noqa: N802
        """Return the number of key heads."""
        return self.k.shape[-2]

    @cached_property
    def D(self) -> int:  # noqa: N802
        """Return the head size of q and k."""
        return self.q.shape[-1]

    @cached_property
    def D_v(self) -> int:  # noqa: N802
        """Return the head size of v and o."""
        return self.v.shape[-1]

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the type of q, k and v; where these are in e4m3, that of o."""
        return torch.bfloat16 if self.recipe.quantized else self.q.dtype

    @cached_property
    def out_dtype(self) -> torch.dtype:
        """Return the type of o, dq, dk and dv."""
        return self.dtype if self.recipe.out_dtype is None else torch.float32

    @cached_property
    def scale(self) -> float:
        """Return the factor on the logits."""
        return self.D**-0.5 if self.recipe.scale is None else self.recipe.scale

    @cached_property
    def place(self) -> tuple[int, int, int, int, int]:
        """Return from where dropout counts: row, column, head, of how many heads, and batch entry."""
        return self.recipe.place or (0, 0, 0, self.H, 0)

    @cached_property
    def kinds(self) -> tuple[type[Value], ...]:
        """Return the classes of all mask parts, then of all scores."""
        return tuple(KINDS[plain[0]] for plain in self.recipe.mask + self.recipe.score)

    @cached_property
    def past(self) -> bool:
        """Tell whether the mask hides every key after its query, as a causal mask does."""
        return any(map(hides_later_keys, self.recipe.mask))

    @cached_property
    def listed(self) -> bool:
        """Tell whether the mask is no interval, so that a kernel first lists the tiles to compute."""
        return not all([kind.interval for kind in self.kinds])

    @cached_property
    def off_counters(self) -> list[str]:
        """Return why a GPU's dropout cannot begin at the place, whose counters are for 16 rows and 64 keys."""
        row, column, *_ = self.place
        if not self.recipe.place or not (row % 16 or column % 64):
            return []
        return [
            f"its dropout counts rows in 16s and keys in 64s, got place with row {row} and column {column}; "
            "choose multiples of these"
        ]

    @cached_property
    def few_rows(self) -> bool:
        """Tell whether a padded batch has few queries for many keys, so that the forward splits the keys."""
        recipe = self.recipe
        left_out = recipe.layout or recipe.dropout or recipe.out_dtype or self.listed or self.biased
        left_out = left_out or recipe.precision in EIGHT_BITS
        return (
            not left_out
            and self.dtype.itemsize == 2
            and 0 < self.M * (self.H // self.H_k) <= 64
            and self.M <= 16
            and self.N >= max(16 * self.M, 64)
            and 0 < self.B <= 1024
            and max(self.D, self.D_v) <= 256
        )

    @cached_property
    def biased(self) -> bool:
        """Tell whether there is a bias, so that logits may be as large as its entries."""
        return any([issubclass(kind, Bias) for kind in self.kinds])

    def precision(self, available: tuple[str, ...]) -> str | None:
        """Return the best of `available` that is accurate enough for the request; None if none is. Only for fp32."""
        asked = (self.recipe.precision,) if self.recipe.precision else PREFERENCE[self.matmul or "highest"]
        return next((name for name in asked if name in available), None)

    def values(self, extra: tuple[Tensor, ...]) -> tuple[tuple[Mask, ...], tuple[Score, ...], Tensor | None]:
        """Rebuild the mask's parts, the scores and the sink with their tensors."""
        tensors = iter(extra)
        built: list[Any] = []
        for name, *numbers in self.recipe.mask + self.recipe.score:
            kind = KINDS[name]
            built.append(kind.rebuild(tuple(numbers), tuple(next(tensors) for _ in kind.captures)))
        count = len(self.recipe.mask)
        return tuple(built[:count]), tuple(built[count:]), next(tensors) if self.recipe.sink else None


def empty_parts(p: Problem, x: Operands) -> tuple[Tensor, ...]:
    """Allocate dq, dk and dv, unwritten; as views of one tensor if q, k and v are."""
    if p.recipe.packed:
        *rows, H, D = x.q.shape
        return x.q.new_empty((*rows, 3, H, D), dtype=p.out_dtype).unbind(-3)
    return tuple([torch.empty(t.shape, dtype=p.out_dtype, device=t.device) for t in x[:3]])


def matmul_setting() -> str:
    """Return torch's setting for fp32 products, "highest", "high" or "medium", by either of its two interfaces."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set through torch.backends.….fp32_precision, where "tf32" means "high"
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


@lru_cache(64)
def target_of(device: torch.device) -> str:
    """Return the chip of a device: "cpu", "sm_90", "gfx942", …; the type of any other device."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
