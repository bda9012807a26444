"""Launch once more what a problem has launched before: of all arguments, only addresses of tensors are new."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from .direct import BASE
from .launch import Launch, profiled

Fill = Callable[[Sequence[int]], Any]
"""It returns an argument for given addresses of a call's tensors."""


class Replay:
    """The launches of a call, with the addresses of its tensors left open.

    Everything else that kernels take follows from the problem. Without it, a call of two kernels spends as long on
    building their arguments as on the rest.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Any, list[Any], list[tuple[int, Fill]]]] = []

    def run(self, stream: int | None, tensors: Sequence[Tensor]) -> bool:
        """Launch on a stream, given by its handle. Return False, without a launch, if nothing is kept."""
        if not self.launches or stream is None or profiled():
            return False
        addresses = [t.data_ptr() for t in tensors]
        for launch, kept, fills in self.launches:
            given = kept.copy()
            given[3] = stream
            for n, fill in fills:
                given[n] = fill(addresses)
            launch(*given)
        return True

    def keep(self, launches: Sequence[Launch], tensors: Sequence[Tensor]) -> None:
        """Keep launches that have run, if all tensors among their arguments are the call's own, each given once."""
        kept, places = [], {id(t): n for n, t in enumerate(tensors)}
        if len(places) < len(tensors):
            return
        for launch in launches:
            compiled, rest, at_once = launch.compiled.get((launch.kernel.fn, launch.key), (None, (), None))
            if compiled is None or at_once is None or at_once.maps:
                return
            try:
                open_, fill = _open((*launch.arguments, *rest), places)
            except KeyError:  # a tensor that the call made, such as a copy
                return
            start = [launch.programs, 1, 1, None, *at_once.base]
            kept.append((at_once.launch, [*start, *open_], [(len(BASE) + n, each) for n, each in fill]))
        self.launches = kept


def _open(values: Sequence[Any], places: dict[int, int]) -> tuple[list[Any], list[tuple[int, Fill]]]:
    """Return values without their tensors, and what fills each gap. `places`: where a tensor is among the call's."""
    kept, fills = list(values), []
    for n, value in enumerate(values):
        if isinstance(value, Tensor):
            kept[n] = None
            fills.append((n, itemgetter(places[id(value)])))
        elif isinstance(value, tuple):
            inner, gaps = _open(value, places)
            if gaps:
                kept[n] = None
                fills.append((n, _filled(inner, gaps)))
    return kept, fills


def _filled(kept: list[Any], fills: list[tuple[int, Fill]]) -> Fill:
    def fill(addresses: Sequence[int]) -> tuple[Any, ...]:
        made = kept.copy()
        for n, each in fills:
            made[n] = each(addresses)
        return tuple(made)

    return fill
