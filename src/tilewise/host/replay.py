"""Launch once more what calls have launched before: of all arguments, only addresses of tensors are new."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..call.calls import find, keep, plain
from .direct import Map
from .launch import Launch, current_stream, on_device, profiled
from .packed import packed

Tensors = Sequence[Tensor | None]
Fills = list[tuple[Any, Any, Callable[[Any], Any] | None]]
"""A gap in a list of arguments, which addresses fill it, and what makes an argument of them. A descriptor's gap is a
slice of several parts."""
FIRST = 15
"""How often addresses come before arguments are packed, which takes 15 times as long as filling gaps: what is packed
then costs at most twice the least, however often it comes."""
MOST = 512
"""For how many sets of addresses arguments are kept: each layer of a model has its own, or some."""


class Replay:
    """The launches of a call, with the stream and all addresses left open. The rest follows from the problem."""

    def __init__(self) -> None:
        self.launches: tuple[list[tuple[int, int]], list[tuple[Any, list[Any], Fills]]] | None = None
        """Where a tensor is given a second time, and where first; then launchers in C with their arguments."""
        self.filled: dict[tuple[int, ...], list[tuple[Any, tuple[Any, ...], Any]]] = {}
        """Launchers with all arguments, by the tensors' addresses and the stream: allocators give these again."""
        self.met: dict[tuple[int, ...], int] = {}
        """How often addresses have come."""
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
        if self.launches is None or stream is None or profiled():
            return False
        addresses = (*[0 if t is None else t.data_ptr() for t in tensors], stream)
        launches = self.filled.get(addresses) or self.fill(addresses)
        for launch, given, again in launches:
            if launch(*given):
                again()
        return bool(launches)

    def fill(self, addresses: tuple[int, ...]) -> list[tuple[Any, tuple[Any, ...], Any]]:
        """Return launchers with their arguments, and what to do where one returns an error; none if nothing is kept, or
        a tensor is no longer given twice. What comes often is packed, and kept."""
        if self.launches is None:
            return []
        twice, launches = self.launches
        if any([addresses[n] != addresses[first] for n, first in twice]):
            return []
        made = [(direct, _filled(each, fills, addresses)) for direct, each, fills in launches]
        count = self.met[addresses] = self.met.get(addresses, 0) + 1
        if count <= FIRST and made[0][0].signature is not None:
            if len(self.met) > 8 * MOST:
                self.met.clear()
            return [(direct.launch, given, None) for direct, given in made]
        if len(self.filled) >= MOST:
            self.filled.clear()
            self.met.clear()
        self.filled[addresses] = found = [_launcher(*each) for each in made]
        return found

    def keep(self, launches: Sequence[Launch], tensors: Tensors) -> None:
        """Keep launches that have run, if all tensors among their arguments are among `tensors`."""
        open_launches, places = [], dict[int, int]()
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
            open_launches.append((at_once, given, [(3, -1, None), *fills]))
        twice = [(n, first) for n, first in enumerate(firsts) if n != first]
        self.launches, self.filled = (twice, open_launches), {}


def _open(
    filled: list[Any], values: Sequence[Any], places: dict[int, int], maps: Mapping[int, Map]
) -> tuple[list[Any], Fills]:
    """Append values to `filled`, without tensors; return it, and what fills the gaps.

    `places`: where a tensor is among the call's. `maps`: those of descriptors.
    """
    fills: Fills = []
    for n, value in enumerate(values):
        at = len(filled)
        filled.append(value)
        if n in maps:
            filled[at:] = parts = maps[n][value.base.data_ptr()]
            fills.append((slice(at, at + len(parts)), places[id(value.base)], maps[n].__getitem__))
        elif isinstance(value, Tensor):
            fills.append((at, places[id(value)], None))
        elif isinstance(value, tuple):
            inner = _open([], value, places, {})
            if inner[1]:
                fills.append((at, slice(None), partial(_filled, *inner)))
        if fills and fills[-1][0] == at:
            filled[at] = None
    return filled, fills


def _filled(filled: list[Any], fills: Fills, numbers: Sequence[int]) -> tuple[Any, ...]:
    """Return arguments with their gaps filled."""
    given = filled.copy()
    for gap, of, make in fills:
        given[gap] = make(numbers[of]) if make else numbers[of]
    return tuple(given)


def _launcher(direct: Any, given: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return what launches a kernel, the arguments that it takes, and what to do if it returns an error."""
    signature = direct.signature
    return (direct.launch, given, None) if signature is None else packed(signature, direct.launch, given)


def replays_of(kind: Any, tensors: Sequence[Tensor]) -> tuple[dict[Any, Any], Replay]:
    """Return what calls of a kind, with such tensors, share, at first nothing: compiled kernels, and launches.

    `kind` and the tensors' specs must say all that a launch depends on but addresses.
    """
    key = kind, tuple([t.data_ptr() % 16 == 0 for t in tensors])
    if (found := find(key, tensors)) is None:
        found = {}, Replay()
        if plain(tensors):
            keep(key, tensors, found)
    return found


def launch_replayed(kind: Any, tensors: Sequence[Tensor], make: Callable[[dict[Any, Any]], list[Launch]]) -> None:
    """Launch what calls of a kind, with such tensors, have launched before; else what `make` returns, which gets their
    compiled kernels."""
    compiled, replay = replays_of(kind, tensors)
    with on_device(tensors[0]):
        replay(current_stream(tensors[0].device), tensors, lambda: make(compiled))
