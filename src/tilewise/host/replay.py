"""Launch once more what calls have launched before: of all arguments, only addresses of tensors are new."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from ..call.check import seen
from .direct import Map
from .launch import Launch, current_stream, on_device, profiled

Tensors = Sequence[Tensor | None]
Fills = list[tuple[Any, Any, Callable[[Any], Any] | None]]
"""A gap in a list of arguments, which addresses fill it, and what makes an argument of them. A descriptor's gap is a
slice of several parts."""
MOST = 128
"""For how many layers of a model arguments are kept: each has its own addresses."""


class Replay:
    """The launches of a call, with the stream and all addresses left open. The rest follows from the problem."""

    def __init__(self) -> None:
        self.kept: tuple[list[tuple[int, int]], list[tuple[Any, list[Any], Fills]]] | None = None
        """Where a tensor is given a second time, and where first; then launchers in C with their arguments."""
        self.filled: dict[tuple[int, ...], list[tuple[Any, tuple[Any, ...]]]] = {}
        """Launchers with all arguments, by the tensors' addresses and the stream: allocators give these again."""
        self.cannot_keep = False
        """Whether a launch reads a tensor that is not among the call's, such as a copy, or needs Triton's wrapper."""

    def __call__(self, stream: int | None, tensors: Tensors, make: Callable[[], Iterable[Launch]]) -> None:
        """Launch on a stream, given by its handle, what is kept, or what `make` returns.

        `tensors` are all that the launches read or write, in one order; None stands for one that is left out.
        """
        if self.run(stream, tensors):
            return
        made = list(make())
        for each in made:
            each.run(stream)
        if not self.cannot_keep:
            self.keep(made, tensors)

    def run(self, stream: int | None, tensors: Tensors) -> bool:
        """Launch what is kept. Return False if nothing that fits is."""
        if self.kept is None or stream is None or profiled():
            return False
        addresses = (*[0 if t is None else t.data_ptr() for t in tensors], stream)
        launches = self.filled.get(addresses) or self.fill(self.kept, addresses)
        for launch, given in launches:
            launch(*given)
        return bool(launches)

    def fill(self, kept: Any, addresses: tuple[int, ...]) -> list[tuple[Any, tuple[Any, ...]]]:
        """Return launchers with their arguments, and keep them; none if a tensor is no longer given twice."""
        twice, launches = kept
        if any([addresses[n] != addresses[first] for n, first in twice]):
            return []
        if len(self.filled) >= MOST:
            self.filled.clear()
        self.filled[addresses] = found = [(launch, _filled(each, fills, addresses)) for launch, each, fills in launches]
        return found

    def keep(self, launches: Sequence[Launch], tensors: Tensors) -> None:
        """Keep launches that have run, if all tensors among their arguments are among `tensors`."""
        kept, places = [], dict[int, int]()
        firsts = [places.setdefault(id(t), n) for n, t in enumerate(tensors)]
        for launch in launches:
            compiled, rest, at_once = launch.compiled.get((launch.kernel.fn, launch.key), (None, (), None))
            if at_once is None:
                self.cannot_keep = compiled is not None
                return
            start = [launch.programs, 1, 1, None, *at_once.base]
            try:
                given, fills = _open(start, (*launch.arguments, *rest), places, at_once.maps)
            except KeyError:
                self.cannot_keep = True
                return
            kept.append((at_once.launch, given, [(3, -1, None), *fills]))
        self.kept, self.filled = ([(n, first) for n, first in enumerate(firsts) if n != first], kept), {}


def _open(
    kept: list[Any], values: Sequence[Any], places: dict[int, int], maps: Mapping[int, Map]
) -> tuple[list[Any], Fills]:
    """Append values to `kept`, without tensors; return it, and what fills the gaps.

    `places`: where a tensor is among the call's. `maps`: those of descriptors.
    """
    fills: Fills = []
    for n, value in enumerate(values):
        at = len(kept)
        kept.append(value)
        if n in maps:
            kept[at:] = parts = maps[n][value.base.data_ptr()]
            fills.append((slice(at, at + len(parts)), places[id(value.base)], maps[n].__getitem__))
        elif isinstance(value, Tensor):
            fills.append((at, places[id(value)], None))
        elif isinstance(value, tuple):
            inner = _open([], value, places, {})
            if inner[1]:
                fills.append((at, slice(None), partial(_filled, *inner)))
        if fills and fills[-1][0] == at:
            kept[at] = None
    return kept, fills


def _filled(kept: list[Any], fills: Fills, numbers: Sequence[int]) -> tuple[Any, ...]:
    """Return arguments with their gaps filled."""
    given = kept.copy()
    for gap, of, make in fills:
        given[gap] = make(numbers[of]) if make else numbers[of]
    return tuple(given)


@lru_cache(4096)
def of_kind(kind: Any) -> tuple[dict[Any, Any], Replay]:
    """Return what calls of a kind share, at first nothing: compiled kernels, and launches."""
    return {}, Replay()


def launch_kept(
    kind: Any, tensors: Sequence[Tensor], make: Callable[[dict[Any, Any]], list[Launch]], found: Any = None
) -> None:
    """Launch what calls of a kind, with such tensors, have launched before; else what `make` returns.

    `make` gets their compiled kernels. `kind` and what is seen of the tensors must say all that a launch depends on but
    addresses. `found` holds what is seen of them, where the caller has looked.
    """
    compiled, replay = of_kind((kind, found or seen(tensors)))
    with on_device(tensors[0]):
        replay(current_stream(tensors[0].device), tensors, lambda: make(compiled))
