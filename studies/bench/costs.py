"""Compare a variant with the plain call of the same rounds, and with the speed it should have."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .results import OK, OURS, Row
from .suites import BACKWARD, FORWARD
from .variants import VARIANTS

AIMS: dict[str, dict[str, float]] = {
    "GQA 8": {FORWARD: 1.0, BACKWARD: 1.0},
    "softcap": {FORWARD: 0.65, BACKWARD: 0.65},
    "ALiBi": {FORWARD: 0.8, BACKWARD: 0.8},
    "window 1024": {FORWARD: 3.2, BACKWARD: 3.2},
    "sink": {FORWARD: 0.98, BACKWARD: 0.98},
    "dropout 0.1": {FORWARD: 0.5, BACKWARD: 0.5},
    "deterministic": {BACKWARD: 0.7},
    "varlen": {FORWARD: 0.9, BACKWARD: 0.9},
}
"""The speed that a variant should have, in that of the plain call; that of packed sequences is per visited tile."""
AIMS_FULL: dict[str, dict[str, float]] = {"deterministic": {BACKWARD: 0.83}}
"""Without the causal mask."""


class Cost(NamedTuple):
    """A variant, and the plain call of the same rounds."""

    row: Row
    speed: float
    """The plain call's time in the variant's."""
    share: float
    """The tiles that the variant visits, in those of the plain call."""

    @property
    def per_tile(self) -> float:
        """Return the speed if the variant had as many tiles as the plain call."""
        return self.speed * self.share

    @property
    def packed(self) -> bool:
        """Tell whether the aim is a speed per tile."""
        return VARIANTS[self.row.implementation].packed

    @property
    def aim(self) -> float | None:
        """Return the aim, for the speed or for the speed per tile."""
        aims = AIMS if self.row.of.causal else AIMS_FULL
        return aims.get(self.row.implementation, {}).get(self.row.pass_)

    @property
    def aimed(self) -> float:
        """Return the number that the aim is compared with."""
        return self.per_tile if self.packed else self.speed


def costs(rows: Sequence[Row]) -> list[Cost]:
    """Return every variant that was measured with the plain call."""
    plain = {(row.of, row.pass_): row.milliseconds for row in rows if row.implementation == OURS and row.status == OK}
    return [
        Cost(row, own / row.milliseconds, replace(row.of, variant=row.implementation).share)
        for row in rows
        if row.implementation in VARIANTS and row.milliseconds and (own := plain.get((row.of, row.pass_)))
    ]


class Beside(NamedTuple):
    """Our row of a case that is a variant by itself, and the fastest of the others."""

    row: Row
    fastest: Row
    aim: float = 1.0
    """The least ratio of its time over ours."""


def beside(rows: Sequence[Row]) -> list[Beside]:
    """Return every case that is a variant by itself, where somebody else was measured with it."""
    found = []
    for row in (row for row in rows if row.of.variant and row.implementation == OURS and row.status == OK):
        others = [each for each in rows if (each.of, each.pass_) == (row.of, row.pass_) and each.status == OK]
        theirs = [each for each in others if not each.implementation.startswith(OURS) and each.milliseconds]
        if theirs:
            found.append(Beside(row, min(theirs, key=lambda each: each.milliseconds or 0.0)))
    return found
