"""What layers of transformers get in place of a 4-D mask: tilewise's values, and the tensor only for who asks."""

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...attention.lists import listed
from ...call.check import autocast_type
from ...call.dispatch import intercepted, transformed
from ...values.cached import Cached
from ...values.masks import Mask
from ...values.tables import Dense
from ...values.value import Unsupported

DRAWN = (
    "{}, so that this mask of transformers is drawn as a tensor of all queries and keys: results are right, but its "
    "memory is quadratic in the length"
)
SHARDED: list[Callable[..., Tensor]] = []
"""What computes layers of sharded rows, the last one where several contexts of `tilewise.parallel.using` nest."""
ADDS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


class Values(NamedTuple):
    """What a mask says in tilewise's terms."""

    mask: Mask
    keys: int
    """How many keys, from the first on, the mask is for; no query sees the others."""
    intervals: Mask | None = None
    """The mask within one document, if nothing but packing is added to it."""


class _Waiting(threading.local):
    """The views of this thread that have a question to the device."""

    def __init__(self) -> None:
        self.views: list[weakref.ref[MaskView]] = []


_waiting = _Waiting()
_warned: set[str] = set()


class MaskView:
    """A mask of transformers as tilewise's values, made once per forward and kind of layer.

    Whoever treats it as the bool tensor (B, 1, M, N) that `sdpa` would get finds that tensor, drawn on first use: it
    has that shape, every attribute and operator of a tensor, and torch's functions take it.

    shape: (B, 1, M, N).
    asked: tensors of one number each, which `settle` needs. The first view of a thread that is used reads those of all
        its views together, so that a forward reads the device once at most.
    settle: from these numbers to Values, or None if only a drawn mask can say it; `reason` is then its warning's.
    draw: makes the tensor.
    """

    ndim = 4
    dtype = torch.bool
    sharded: Callable[..., Tensor] | None = None
    """What computes the layer where rows are sharded; a checkpoint finds it here when it runs again."""
    cached: tuple[Mask, Cached] | None = None
    """For one step on a static cache: the mask within a sequence's keys, and which of the cache's rows those are."""
    longest: tuple[int, int] | None = None
    """The longest lengths of packed queries and keys, once a layer of the forward has read them."""

    def __init__(
        self,
        shape: tuple[int, ...],
        asked: Sequence[Tensor],
        settle: Callable[[Sequence[int]], Values | None],
        draw: Callable[[], Tensor],
        reason: str,
    ) -> None:
        self.shape, self._asked, self._settle, self._draw, self._reason = shape, asked, settle, draw, reason
        self._values: Values | None = None
        self._listed: dict[Any, Mask] = {}
        self._drawn: Tensor | None = None
        if asked:
            _waiting.views.append(weakref.ref(self))

    def values(self) -> Values:
        """Return the mask as tilewise's values. The first call may read the device."""
        if self._values is None:
            _settle(self)
        return self._values  # type: ignore[return-value]

    def listed(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, gradients: bool, options: dict[str, Any]) -> Mask:
        """Return the view's mask with its tiles listed: once for all layers whose q, k, v and options are alike.

        Any other mask is returned as it is, and so is every mask where tensors are traced or transformed.
        """
        ours = self._values is not None and mask is self._values.mask
        if not ours or all([part.interval for part in mask.parts]) or intercepted((q, k, v)) or transformed():
            return mask
        kinds = tuple([type(score) for score in options["score"]])
        chosen = options["sink"] is None, options["dropout"] > 0.0, options["deterministic"], gradients
        like = (*[(t.shape, t.dtype, t.device) for t in (q, k, v)], kinds, *chosen, autocast_type(q))
        if like not in self._listed:
            with torch.set_grad_enabled(gradients):
                self._listed[like] = listed(mask, q, k, v, **options)
        return self._listed[like]

    def tensor(self, reason: str = "a model reads its mask as a tensor") -> Tensor:
        """Return the bool tensor (B, 1, M, N), true where the query sees the key. `reason`: for the warning."""
        if self._drawn is None:
            warn_drawn(reason)
            self._drawn = self._draw()
        return self._drawn

    def size(self, dim: int | None = None) -> Any:
        """Return the shape (B, 1, M, N), or one of its numbers."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions, 4."""
        return self.ndim

    def contiguous(self) -> "MaskView":
        """Return the view; generate() asks for it."""
        return self

    def to(self, device: Any, **kwargs: Any) -> "MaskView":
        """Return the view with its values on a device, where accelerate moves what a layer gets."""
        mask, keys, intervals = self.values()
        moved = mask.to(device)
        tensors = [[t for part in each.parts for t in part.tensors] for each in (mask, moved)]
        if all([here is there for here, there in zip(*tensors, strict=True)]):
            return self
        values = Values(moved, keys, intervals)
        return MaskView(self.shape, (), lambda _: values, lambda: self.tensor().to(device), "")

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") else getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in ADDS and any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            raise Unsupported(
                "a model adds this mask to its logits, which is for eager attention's masks; "
                "use attn_implementation='eager' for it"
            )
        args, kwargs = tree_map_only(cls, lambda view: view.tensor(), (args, kwargs or {}))
        return function(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)
    return lambda *operands: MaskView.__torch_function__(function, (), operands)


for _name in ("and", "or", "invert", "add", "radd", "sub", "rsub", "mul", "rmul", "eq", "ne", "lt"):
    setattr(MaskView, f"__{_name}__", _operator(f"__{_name}__"))
MaskView.__hash__ = object.__hash__  # type: ignore[method-assign]


def _settle(view: MaskView) -> None:
    """Settle a view, and with it every view of this thread whose question the same device answers."""
    together = [view]
    if view._asked:
        alive = [other for reference in _waiting.views if (other := reference()) is not None and other is not view]
        together += [other for other in alive if other._asked[0].device == view._asked[0].device]
        _waiting.views = [weakref.ref(other) for other in alive if not any(other is each for each in together)]
    facts = [fact.long().reshape(()) for each in together for fact in each._asked]
    numbers = iter(torch.stack(facts).tolist() if facts else ())
    for each in together:
        values = each._settle([next(numbers) for _ in each._asked])
        each._values = values or Values(Dense(each.tensor(each._reason)), each.shape[3])


@torch.compiler.assume_constant_result
def warn_drawn(reason: str) -> None:
    """Warn that a mask is drawn, once per process and reason."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(DRAWN.format(reason), stacklevel=2)
