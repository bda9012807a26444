"""Problem: an immutable, hashable description of a call, without tensors.

It adds to a `Recipe` the shapes, types, strides and device of the operands. The choices of back end, tiles and kernels
depend on it alone.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..values.dropout import Dropout
from ..values.layout import Layout, Sizes
from ..values.masks import Mask
from ..values.origin import Origin, origin_of
from ..values.products import PREFERENCE, Products
from ..values.score import Score
from .operands import Operands
from .recipe import KINDS, Recipe

MAX_HEAD_SIZE, MAX_VALUE_SIZE = 576, 512
F = TypeVar("F", bound=Callable[..., Any])


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


def inside(k: Tensor, v: Tensor, real: bool = True) -> bool:
    """Tell whether v is the first columns of k, in the same memory; of fake and meta tensors, in the same storage."""
    alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
    same = k.data_ptr() == v.data_ptr() if real else alias(k, v) and k.storage_offset() == v.storage_offset()
    strides = [(a, b) for a, b, size in zip(k.stride(), v.stride(), k.shape, strict=False) if size != 1]
    return same and k.dtype == v.dtype and v.shape[-1] <= k.shape[-1] and all([a == b for a, b in strides])


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
    within: bool = False
    """Whether v is the first columns of k, in the same memory."""


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
    def computed(self) -> dict[Any, Any]:
        """Return what `once` has computed of the problem."""
        return {}

    @property
    def sink_at(self) -> int:
        """Return where the sink is among the extra operands, if there is one."""
        return len(self.extra) - self.recipe.own - 1

    @cached_property
    def layout(self) -> Layout:
        """Return the layout, with specs in place of tensors."""
        return self.recipe.layout_of(self.extra)

    @cached_property
    def products(self) -> Products:
        """Return the products, with specs in place of tensors."""
        return self.recipe.products_of(self.extra)

    @cached_property
    def dropout(self) -> Dropout:
        """Return the dropout."""
        return Dropout(self.recipe.dropout)

    @cached_property
    def origin(self) -> Origin:
        """Return from where dropout counts."""
        return origin_of(self.recipe.origin)

    @cached_property
    def sizes(self) -> Sizes:
        """Return the sizes that follow from the layout."""
        return self.layout.sizes(self.q.shape, self.k.shape, (self.max_q, self.max_k))

    @cached_property
    def B(self) -> int:  # noqa: N802
        """Return the number of batch entries or packed sequences."""
        return self.sizes.B

    @cached_property
    def M(self) -> int:  # noqa: N802
        """Return the number of queries of the longest batch entry."""
        return self.sizes.M

    @cached_property
    def N(self) -> int:  # noqa: N802
        """Return the number of keys of the longest batch entry; of a cache, its capacity."""
        return self.sizes.N

    @cached_property
    def batch(self) -> int:
        """Return how many batch entries have rows of q of their own: 1 for packed sequences, which share them."""
        return math.prod(self.q.shape[:-3])

    @cached_property
    def queries(self) -> int:
        """Return the rows of q, of all batch entries."""
        return math.prod(self.q.shape[:-2])

    def query_blocks(self, size: int) -> int:
        """Return how many blocks of `size` queries a head has; of packed sequences, all together."""
        return self.layout.blocks(self.q.shape[-3], self.B, size)

    def key_blocks(self, size: int) -> int:
        """Return how many blocks of `size` keys a head has; of packed sequences, all together."""
        return self.layout.blocks(self.sizes.keys, self.B, size)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of q, k and v by name."""
        return {"q": self.q.shape, "k": self.k.shape, "v": self.v.shape}

    def check_devices(self, named: Mapping[str, Any]) -> None:
        """Raise ValueError unless tensors, given by their names, are on q's device."""
        for name, spec in named.items():
            if spec.device != self.q.device:
                raise ValueError(
                    f"{name} must be on q's device {self.q.device}, got {spec.device}; move it with .to(...)"
                )

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
        return self.products.dtype(self.q.dtype)

    @cached_property
    def out_dtype(self) -> torch.dtype:
        """Return the type of o, dq, dk and dv."""
        return self.dtype if self.recipe.out_dtype is None else torch.float32

    @cached_property
    def scale(self) -> float:
        """Return the factor on the logits."""
        return self.D**-0.5 if self.recipe.scale is None else self.recipe.scale

    @cached_property
    def kinds(self) -> tuple[Any, ...]:
        """Return the classes of all mask parts, then of all scores; of functions, instances without tensors."""
        return tuple(KINDS[plain[0]] for plain in self.recipe.mask + self.recipe.score)

    @cached_property
    def past(self) -> bool:
        """Tell whether the mask hides every key after its query, as a causal mask does."""
        return any([mask.hides_later_keys for mask in self.masks])

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        """Return the mask's parts, with specs in place of tensors."""
        return self.values(self.extra)[0]  # type: ignore[arg-type]

    @cached_property
    def listed(self) -> bool:
        """Tell whether a kernel first lists the tiles to compute: the mask is no interval, or one that is read from
        tables, in packed sequences."""
        packed = "packed" in self.layout.needs
        return not all([kind.interval and (kind.varlen or not packed) for kind in self.kinds[: len(self.recipe.mask)]])

    @cached_property
    def splits_keys(self) -> bool:
        """Tell whether a forward may split the keys of a sequence among programs."""
        return self.layout.splits_keys(self)

    @cached_property
    def few_rows(self) -> bool:
        """Tell whether a padded batch has few queries for many keys, so that the forward splits the keys."""
        recipe = self.recipe
        left_out = recipe.dropout or recipe.out_dtype or self.listed or self.biased or self.products.codes
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
        """Tell whether logits may be of any size, as with a bias."""
        return any([kind.unbounded for kind in self.kinds])

    @property
    def needs(self) -> frozenset[str]:
        """Return what a back end must be able to read and compute, by the names of `call.backend.NEEDS`."""
        return self.layout.needs | self.products.needs

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


def once(make: F) -> F:
    """Let a function of a Problem, and of hashable arguments, compute its result once for each Problem."""

    @wraps(make)
    def found(p: Problem, *args: Any) -> Any:
        at = make, *args
        if at not in p.computed:
            p.computed[at] = make(p, *args)
        return p.computed[at]

    return found  # type: ignore[return-value]


def lse_shape(q: tuple[int, ...]) -> tuple[int, ...]:
    """Return lse's shape for q's: (B, H, M), packed (H, T)."""
    *batch, M, H, _ = q
    return *batch, H, M


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
