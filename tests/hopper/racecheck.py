"""Reads racecheck's reports, and tells which of them its control excuses.

A report names an instruction and those it races with, each by kernel, file and line. What matters is where these lines
stand: in two functions that hand something over by an mbarrier, in what Triton makes of a launch or of an atomic, or
elsewhere.
"""

import ast
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "src/tilewise/hopper"
FILES = {path.relative_to(KERNELS).as_posix(): path for path in KERNELS.rglob("*.py")} | {
    "control.py": HERE / "control.py"
}
"""By their paths below hopper/, and the control."""
CONTROL, BROKEN = "control", "broken"
"""The control's kernel, with and without waits."""

LAUNCH = "Triton's launch of the roles"
DRAW = "Triton's broadcast of a warp's atomic"
FROM_A_WARP = "a hand-over from one warp"
FROM_A_GROUP = "a hand-over from a warpgroup"
AGAIN = ", written again"
ELSEWHERE = "elsewhere"
ORDERED = {
    "control.py fetch_next_tile": ("control.py fetch_next_tile", DRAW),
    "parts/queue.py fetch_next_tile": ("parts/queue.py fetch_next_tile", DRAW),
    "parts/queue.py leave": ("parts/queue.py leave", DRAW),
    "parts/channel.py wait_equal": ("parts/channel.py until", DRAW),
    "control.py lead": ("control.py pass_on", FROM_A_WARP),
    "parts/queue.py send_tile": ("parts/queue.py receive_tile", FROM_A_WARP),
    "control.py pass_on": ("control.py collect", FROM_A_GROUP),
    "backward/items.py send": ("backward/items.py receive", FROM_A_WARP),
    "backward/by_gradient.py dv_of_keys": ("backward/by_gradient.py dk_of_keys", FROM_A_GROUP),
}
"""Where something is written, where it is read, and what that is: in order by a warp's barrier or by an mbarrier."""
WAITS = ("control.py wait", "parts/channel.py wait")
"""They load nothing; ptxas may give their line to the load behind them."""

ACCESS = re.compile(
    r"(?:(?P<begins>Race reported between)|and) (?P<kind>Read|Write) access at (?P<kernel>.+?)\+0x[0-9a-f]+"
    r"(?: in (?P<file>\S+):(?P<line>\d+))?"
)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


class Access(NamedTuple):
    """One instruction of a report."""

    kind: str
    kernel: str
    file: str
    """As in FILES, or what racecheck says where that is none of ours; empty without line numbers."""
    line: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.file}:{self.line} ({place(self)})"


class Report(NamedTuple):
    """An access, and those that it races with."""

    access: Access
    others: tuple[Access, ...]

    @property
    def kernel(self) -> str:
        """Where it happened."""
        return self.access.kernel

    def kinds(self) -> set[str]:
        """What the pairs of accesses are."""
        return {kind_of(self.access, other) for other in self.others}

    def __str__(self) -> str:
        others = sorted(set(map(str, self.others)))
        return f"{self.kernel}, {' and '.join(sorted(self.kinds()))}: {self.access} with {'; '.join(others)}"


def read(output: str) -> list[Report]:
    """Every report; a ValueError if some line was not understood, or not printed."""
    reports: list[Report] = []
    for line in output.splitlines():
        found = list(ACCESS.finditer(line))
        if len(found) != line.count(" access at "):
            raise ValueError(f"not understood: {line}")
        for match in found:
            access = Access(match["kind"], match["kernel"], name_of(match["file"] or ""), int(match["line"] or 0))
            if match["begins"]:
                reports.append(Report(access, ()))
            else:
                reports[-1] = Report(reports[-1].access, (*reports[-1].others, access))
    if alone := [str(report) for report in reports if not report.others]:
        raise ValueError(f"not understood: no access that races with {alone}")
    summaries = SUMMARY.findall(output)
    displayed, in_all = sum(int(n) for n, _, _ in summaries), sum(int(e) + int(w) for _, e, w in summaries)
    if not summaries or not len(reports) == displayed == in_all:
        raise ValueError(f"{len(reports)} reports were read; {len(summaries)} summaries say {displayed} of {in_all}")
    return reports


def name_of(path: str) -> str:
    """The name in FILES of a path, or of the end of one; the path itself if it is none of ours, or could be several."""
    found = [name for name, file in FILES.items() if path and file.as_posix().endswith(f"/{path.lstrip('/')}")]
    return found[0] if len(found) == 1 else path


def kind_of(access: Access, other: Access) -> str:
    """What two accesses that race are to each other."""
    if place(access) == place(other) == LAUNCH and access.file == other.file:
        return LAUNCH
    writer, second = (access, other) if access.kind == "Write" else (other, access)
    origin, found = (f"{one.file} {place(one)}" for one in (writer, second))
    reader, kind = ORDERED.get(origin, ("", ELSEWHERE))
    if writer.kind == second.kind:
        return kind + AGAIN if writer.kind == "Write" and origin == found in ORDERED else ELSEWHERE
    return kind if found in (reader, *WAITS) else ELSEWHERE


def place(access: Access) -> str:
    """The function that holds an access, or the launch of the roles."""
    return places(access.file).get(access.line, ELSEWHERE)


@lru_cache
def places(file: str) -> dict[int, str]:
    """Of each line of ours, which function it stands in. A kernel's head, and the statement of its body that starts the
    roles, are the launch."""
    found: dict[int, str] = {}
    tree = ast.parse(FILES[file].read_text()) if file in FILES else ast.Module([], [])
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        found |= dict.fromkeys(range(first, (function.end_lineno or 0) + 1), function.name)
        starts = [statement for statement in function.body if "gl.warp_specialize(" in ast.unparse(statement)]
        if starts:
            found |= dict.fromkeys(range(first, function.body[0].lineno), LAUNCH)
        for statement in starts:
            found |= dict.fromkeys(range(statement.lineno, (statement.end_lineno or 0) + 1), LAUNCH)
    return found


def kinds(reports: Iterable[Report], kernel: str) -> set[str]:
    """All that is reported of a kernel."""
    return {kind for report in reports if report.kernel == kernel for kind in report.kinds()}


def unexcused(reports: Iterable[Report]) -> list[Report]:
    """Of our kernels' reports, those with a kind that is not reported of the control, or that is none of those known.
    If nothing is reported of the control, that is all of them."""
    reports = list(reports)
    excused = kinds(reports, CONTROL) - {ELSEWHERE}
    return [report for report in reports if report.kernel not in (CONTROL, BROKEN) and report.kinds() - excused]
