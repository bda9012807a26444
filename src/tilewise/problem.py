"""Problem: an immutable, hashable description of a call, without tensors.

A `Recipe` holds the caller's options and passes through torch's dispatcher as text. A `Problem` adds the shapes, types,
strides and device of the operands. The choices of back end, tiles and kernels depend on it alone.
"""

import ast
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import mask as masks
from . import score as scores
from .layout import Cached, Varlen
from .mask import Mask, Value
from .place import Origin
from .quantized import EightBits, Quantized
from .score import Bias, Score

KINDS: dict[str, type[Value]] = {
    name: kind
    for name, kind in (*vars(masks).items(), *vars(scores).items())
    if isinstance(kind, type) and issubclass(kind, Value) and hasattr(kind, "device")
}
"""Every class of mask or score that a recipe can name: those in mask.py and score.py that name kernel functions."""

torch.serialization.add_safe_globals(
    [masks.Full, masks.And, masks.Listed, *KINDS.values(), Origin, Varlen, Cached, Quantized, EightBits]
)  # for torch.load

FLOATING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_SIZE = 512

PRECISIONS = ("ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3", "tf32")
EIGHT_BITS = ("int8", "fp8")
"""Names of precision for fp16 and bf16: approximations, never chosen by None or by torch's settings."""
PREFERENCE = {
    "highest": ("bf16x6", "ieee"),
    "high": ("fp16x3", "tf32x3", "bf16x6", "ieee"),
    "medium": ("tf32", "fp16x3", "tf32x3", "bf16x6", "ieee"),
}
"""What `precision=None` selects for each torch.get_float32_matmul_precision(): the first that is available."""


class Unsupported(NotImplementedError, ValueError):  # noqa: N818, users type this name
    """No back end can run the call, or the requested one cannot; the message gives the reasons and a remedy.

    It is a ValueError, and through NotImplementedError a RuntimeError, which users of other libraries may catch.
    """


class Operands(NamedTuple):
    """The tensors of a call: q, k, v; then those of mask, score, sink and layout, in the order of Problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor, ...]


class Saved(NamedTuple):
    """The results of a forward: o (B, M, H, D_v) and lse (B, H, M), packed (T, H, D_v) and (H, T), and dropout's seed.

    `kept` holds tensors that the back end saved for its backward, which must also work without them.
    """

    o: Tensor
    lse: Tensor
    seed: Tensor | None = None
    kept: tuple[Tensor, ...] = ()


class Grads(NamedTuple):
    """The gradients dq, dk and dv, and one gradient or None per extra operand."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor | None, ...]

    def packed(self) -> Tensor:
        """Return the tensor (..., 3, H, D) of which dq, dk and dv are views, as `empty_parts` made them."""
        *rows, H, D = self.q.shape
        return self.q.as_strided((*rows, 3, H, D), (*self.q.stride()[:-2], H * D, D, 1))


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


@lru_cache(64)
def hides_later_keys(part: tuple[Any, ...]) -> bool:
    """Tell whether a part of a recipe's mask hides every key after its query, whatever its tensors hold."""
    kind: Any = KINDS[part[0]]
    return not kind.captures and kind.rebuild(part[1:], ()).hides_later_keys


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


def batched_ranks(recipe: Recipe) -> tuple[int, ...]:
    """Return for every extra operand of a padded batch its number of dimensions if the first is the batch."""
    ranks = [len(shape) for name, *_ in recipe.mask + recipe.score for shape in KINDS[name].shapes]
    of_codes = [2] * 3 * recipe.quantized + [3] * 2 * recipe.given + [3] * 2 * bool(recipe.rotary)
    return (*ranks, *[2] * recipe.sink, *of_codes)  # a sink (H,) and rotary's tables (positions, R / 2) have no batch
