"""Launch once more what a problem has launched before: of all arguments, only addresses of tensors are new."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .direct import Map
from .launch import Launch, profiled

Fill = tuple[Any, Callable[[Any], Any] | None]
"""Which of the addresses of a call's tensors an argument is made of, an index or a slice, and by what; None for the
address itself."""
Fills = list[tuple[Any, Any, Callable[[Any], Any] | None]]
"""A gap in a list of arguments, and what fills it. A descriptor's gap is a slice, as the launcher takes several
parts."""
ALL = slice(None)

Kept = tuple[list[tuple[int, int]], list[tuple[Any, list[Any], Fills]]]
"""Where a tensor is given a second time, and where first; then launchers in C with their arguments."""


class Replay:
    """The launches of a call, with the addresses of its tensors left open.

    Everything else that kernels take follows from the problem. Without it, a call of two kernels spends as long on
    building their arguments as on the rest.
    """

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self.hopeless = False
        """Whether a launch reads a tensor that is not among the call's, such as a copy, or needs Triton's wrapper."""

    def run(self, stream: int | None, tensors: Sequence[Tensor]) -> bool:
        """Launch on a stream, given by its handle. Return False, without a launch, if nothing that fits is kept.

        `tensors` are all that the launches read or write, in the same order in every call.
        """
        if self.kept is None or stream is None or profiled():
            return False
        twice, launches = self.kept
        addresses = [t.data_ptr() for t in tensors]
        for n, first in twice:
            if addresses[n] != addresses[first]:
                return False
        for launch, kept, fills in launches:
            given = kept.copy()
            given[3] = stream
            for gap, of, make in fills:
                given[gap] = make(addresses[of]) if make else addresses[of]
            launch(*given)
        return True

    def run_first(self, stream: int | None, tensors: Sequence[Tensor], launches: Iterable[Launch]) -> None:
        """Run launches as they are, and keep them for the next call."""
        made = list(launches)
        for each in made:
            each.run(stream)
        if not self.hopeless:
            self.keep(made, tensors)

    def keep(self, launches: Sequence[Launch], tensors: Sequence[Tensor]) -> None:
        """Keep launches that have run, if all tensors among their arguments are among `tensors`."""
        kept, twice = [], []
        places: dict[int, int] = {}
        for n, t in enumerate(tensors):
            if (first := places.setdefault(id(t), n)) != n:
                twice.append((n, first))
        for launch in launches:
            compiled, rest, at_once = launch.compiled.get((launch.kernel.fn, launch.key), (None, (), None))
            if at_once is None:
                self.hopeless = compiled is not None
                return
            start = [launch.programs, 1, 1, None, *at_once.base]
            try:
                kept.append((at_once.launch, *_open(start, (*launch.arguments, *rest), places, at_once.maps)))
            except KeyError:
                self.hopeless = True
                return
        self.kept = twice, kept


def _open(
    start: list[Any], values: Sequence[Any], places: dict[int, int], maps: Mapping[int, Map]
) -> tuple[list[Any], Fills]:
    """Return `start`, and after it values without their tensors; and what fills each gap.

    `places`: where a tensor is among the call's. `maps`: those of values that are descriptors.
    """
    kept, fills = start, []
    for n, value in enumerate(values):
        if n in maps:
            parts = maps[n][value.base.data_ptr()]
            fills.append((slice(len(kept), len(kept) + len(parts)), places[id(value.base)], maps[n].__getitem__))
            kept += parts
            continue
        if fill := _fill(value, places):
            fills.append((len(kept), *fill))
        kept.append(None if fill else value)
    return kept, fills


def _fill(value: Any, places: dict[int, int]) -> Fill | None:
    """Return what makes an argument again, if it is a tensor or holds some."""
    if isinstance(value, Tensor):
        return places[id(value)], None
    if isinstance(value, tuple):
        kept, fills = _open([], value, places, {})
        return (ALL, partial(_filled, kept, fills)) if fills else None
    return None


def _filled(kept: list[Any], fills: Fills, addresses: Sequence[int]) -> tuple[Any, ...]:
    made = kept.copy()
    for gap, of, make in fills:
        made[gap] = make(addresses[of]) if make else addresses[of]
    return tuple(made)
