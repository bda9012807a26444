"""What `tune` found: candidates with their times, which is best, and the files that keep them."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilewise.host.tables import read

from ..bench.results import OK, SKIPPED, save_states, text, write
from ..bench.suites import Case

MARGIN = 0.01
"""A neighbour replaces the row in use if it is faster by more: less is a matter of the minute."""


@dataclass
class Candidate:
    """A row that was tried. Without times, `why` says what was in the way."""

    row: dict[str, Any]
    status: str = OK
    why: str | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)
    """Medians, by case."""
    spread: dict[str, float] = field(default_factory=dict)
    """From the 20th to the 80th percentile, as a part of the median."""


@dataclass
class Tuned:
    """What was measured of one row of a table; the row in use is the first candidate."""

    backend: str
    table: str
    label: str
    """The row's key, as files have it."""
    title: str
    pass_: str
    cases: list[dict[str, Any]]
    candidates: list[Candidate]
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def present(self) -> Candidate:
        """The row in use."""
        return self.candidates[0]

    @property
    def best(self) -> Candidate | None:
        """The fastest over all cases; None if nothing ran."""
        return max(self.timed, key=self.speed, default=None)

    @property
    def behind(self) -> float | None:
        """Return by which part the best is faster than the row in use; None if that has no times."""
        if self.best is None or self.present.status != OK:
            return None
        return self.speed(self.best) / self.speed(self.present) - 1.0

    @property
    def chosen(self) -> Candidate | None:
        """The best if it is worth a change, else the row in use; None if nothing ran."""
        return self.present if self.behind is not None and self.behind <= MARGIN else self.best

    @property
    def timed(self) -> list[Candidate]:
        """Return the candidates with times in every case."""
        return [candidate for candidate in self.candidates if candidate.status == OK]

    def speed(self, candidate: Candidate) -> float:
        """Return the fastest candidate's time over this one's: a geometric mean over the cases."""
        logs = [
            math.log(min(other.milliseconds[case] for other in self.timed) / own)
            for case, own in candidate.milliseconds.items()
        ]
        return math.exp(sum(logs) / len(logs))

    def change(self, candidate: Candidate) -> str:
        """Say how a candidate differs from the row in use."""
        differences = [
            f"{name} {value}" for name, value in candidate.row.items() if value != self.present.row.get(name)
        ]
        return ", ".join(differences) or "the row in use"

    def verdict(self) -> str:
        """Say the result in one sentence."""
        if self.best is None:
            return f"nothing was timed: {self.present.why}"
        if self.behind is None:
            return f"the row in use has no times ({self.present.why}); best: {self.change(self.best)}"
        noise = max(part for c in (self.best, self.present) for part in c.spread.values())
        lead = (
            "the fastest" if self.best is self.present else f"{100 * self.behind:.1f} % behind {self.change(self.best)}"
        )
        return f"the row in use is {lead} (times spread by up to {100 * noise:.1f} %)"


def row_text(row: dict[str, Any]) -> str:
    """Return a row's fields in words."""
    return ", ".join(f"{name} {value}" for name, value in row.items())


def grid(tuned: Tuned) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of a table of times: fastest first, the best marked, the rest with their reasons."""
    cases = [str(Case(**case)) for case in tuned.cases]
    order = sorted(tuned.timed, key=tuned.speed, reverse=True)
    lines = [
        [
            f"{tuned.change(c)} (best)" if c is tuned.best else tuned.change(c),
            *(f"{c.milliseconds[case]:.4f}" for case in cases), f"{tuned.speed(c):.3f}",
        ]
        for c in order
    ]  # fmt: skip
    return ["milliseconds", *_short(tuned), "speed"], lines


def _short(tuned: Tuned) -> list[str]:
    """Return the cases without what all of them share; batch and heads follow from length and head size."""
    common = len({case["head_size"] for case in tuned.cases}) == 1
    return [
        " ".join(word for word in str(Case(**case)).split()[1:] if word[0] not in ("BHD" if common else "BH"))
        for case in tuned.cases
    ]


def reasons(tuned: Tuned) -> list[str]:
    """Return why the others have no times."""
    return [f"{tuned.change(c)}: {c.status}, {c.why}" for c in tuned.candidates if c.status != OK]


def load(path: Path) -> dict[str, Any]:
    """Read a file of measurements; return an empty one if there is none. Raise ValueError for other content."""
    if not path.exists():
        return {"device": None, "slots": []}
    try:
        content = json.loads(path.read_text())
        content["slots"] = [_tuned(slot) for slot in content["slots"]]
        content["device"].strip()
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} must be a file of `tune`, got other content; name another folder, or remove it"
        ) from error
    return content


def merge(path: Path, device: str, found: Sequence[Tuned]) -> None:
    """Put slots into a file in place of older measurements, unless they were skipped; the others stay.

    Raise ValueError if the file is of another device.
    """
    content = load(path)
    if content["device"] not in (None, device):
        raise ValueError(f"{path} must hold measurements of {device}, got {content['device']}; name another folder")
    slots = {(t.backend, t.table, t.label): t for t in content["slots"]}
    for t in found:
        at = t.backend, t.table, t.label
        if at not in slots or t.present.status != SKIPPED:
            slots[at] = t
    content = {**content, "device": device, "slots": [asdict(t) for t in slots.values()]}
    save_states(content, [t.environment for t in found])
    write(path, content)


def _tuned(slot: dict[str, Any]) -> Tuned:
    return Tuned(**{**slot, "candidates": [Candidate(**candidate) for candidate in slot["candidates"]]})


def load_rows(path: Path) -> dict[str, Any]:
    """Read a file for TILEWISE_TILES; return an empty one if there is none."""
    return read(path) if path.exists() else {"cards": {}}


def write_rows(path: Path, card: str, found: Sequence[Tuned], env: dict[str, Any]) -> int:
    """Merge the chosen rows into a file for TILEWISE_TILES; rows of other GPUs and slots stay. Return how many."""
    content = copy.deepcopy(load_rows(path))
    run = content["cards"].setdefault(card, {"rows": {}})
    run["environment"] = env
    count = 0
    for tuned in found:
        if candidate := tuned.chosen:
            run["rows"].setdefault(tuned.backend, {}).setdefault(tuned.table, {})[tuned.label] = candidate.row
            count += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(content) + "\n")
    read.cache_clear()
    return count
