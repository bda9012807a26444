"""What calls of one kind share: their compiled kernels, and their launches with addresses left open."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..check import seen
from .launch import Launch, current_stream, on_device
from .replay import Replay


class Kept(NamedTuple):
    """Compiled kernels, by kernel, and the launches."""

    compiled: dict[Any, Any]
    replay: Replay


@lru_cache(4096)
def kept(kind: Any) -> Kept:
    """Return what calls of a kind share; at first nothing."""
    return Kept({}, Replay())


def launch_kept(kind: Any, tensors: Sequence[Tensor], make: Callable[[dict[Any, Any]], list[Launch]]) -> None:
    """Launch once more what calls of a kind, with such tensors, have launched before; else what `make` returns.

    `make` gets the kind's cache of compiled kernels. `kind` and what is seen of the tensors must say all that a launch
    depends on but addresses.
    """
    known, stream = kept((kind, seen(tensors))), current_stream(tensors[0].device)
    with on_device(tensors[0]):
        if not known.replay.run(stream, tensors):
            known.replay.run_first(stream, tensors, make(known.compiled))
