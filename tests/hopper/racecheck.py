"""Reads racecheck's reports, and tells which of them its control excuses.

A report names an instruction and those it races with, each by kernel, file and line. What matters is where these lines
stand: in two functions that hand something over by an mbarrier, in the launch of the roles, or elsewhere.
"""

import ast
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FILES = {path.name: path for path in ((HERE.parents[1] / "src" / "tilewise" / "hopper").glob("*.py"))}
FILES["control.py"] = HERE / "control.py"
CONTROL, BROKEN = "control", "broken"
"""The control's kernel, with and without waits."""

LAUNCH = "Triton's launch of the roles"
OF_A_WARP = "a hand-over from one warp"
OF_A_GROUP = "a hand-over from a warpgroup"
ELSEWHERE = "elsewhere"
HAND_OVERS = {
    ("control.py lead", "control.py pass_on"): OF_A_WARP,
    ("control.py pass_on", "control.py collect"): OF_A_GROUP,
    ("queue.py hand_on", "queue.py ticket"): OF_A_WARP,
    ("backward.py side_of_v", "backward.py side_of_k"): OF_A_GROUP,
}
"""What an mbarrier orders: a store of the first function, and a load of the second."""

ACCESS = re.compile(
    r"(?:Race reported between|and) (?P<kind>Read|Write) access at (?P<kernel>.+?)\+0x[0-9a-f]+"
    r"(?: in (?P<file>\S+):(?P<line>\d+))?"
)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


class Access(NamedTuple):
    """One instruction of a report."""

    kind: str
    kernel: str
    file: str
    """Its name alone; empty without line numbers."""
    line: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.kernel} at {self.file}:{self.line}, in {place(self)}"


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
        return f"{' and '.join(sorted(self.kinds()))}: {self.access}; " + "; ".join(map(str, self.others))


def read(output: str) -> list[Report]:
    """Every report; a ValueError if some line was not understood, or not printed."""
    reports: list[Report] = []
    for line in output.splitlines():
        if " access at " not in line:
            continue
        if not (found := ACCESS.search(line)):
            raise ValueError(f"not understood: {line}")
        access = Access(found["kind"], found["kernel"], Path(found["file"] or "").name, int(found["line"] or 0))
        if "Race reported" in line:
            reports.append(Report(access, ()))
        else:
            reports[-1] = Report(reports[-1].access, (*reports[-1].others, access))
    summaries = SUMMARY.findall(output)
    displayed, in_all = sum(int(n) for n, _, _ in summaries), sum(int(e) + int(w) for _, e, w in summaries)
    if not summaries or not len(reports) == displayed == in_all:
        raise ValueError(f"{len(reports)} reports were read; {len(summaries)} summaries say {displayed} of {in_all}")
    return reports


def kind_of(access: Access, other: Access) -> str:
    """What two accesses that race are to each other."""
    places = {place(access), place(other)}
    if places == {LAUNCH} and access.file == other.file:
        return LAUNCH
    writer, reader = (access, other) if access.kind == "Write" else (other, access)
    if (writer.kind, reader.kind) != ("Write", "Read"):
        return ELSEWHERE
    return HAND_OVERS.get((f"{writer.file} {place(writer)}", f"{reader.file} {place(reader)}"), ELSEWHERE)


def place(access: Access) -> str:
    """The function that holds an access, or the launch of the roles."""
    return functions(access.file).get(access.line, ELSEWHERE)


@lru_cache
def functions(file: str) -> dict[int, str]:
    """Of each line of ours, which function it stands in; a kernel's head and its `warp_specialize` are the launch."""
    found: dict[int, str] = {}
    tree = ast.parse(FILES[file].read_text()) if file in FILES else ast.Module([], [])
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        roles = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _is_launch(node)]
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        found |= dict.fromkeys(range(first, (function.end_lineno or first) + 1), function.name)
        if roles:
            found |= dict.fromkeys(range(first, function.body[0].lineno), LAUNCH)
        for call in roles:
            found |= dict.fromkeys(range(call.lineno, (call.end_lineno or call.lineno) + 1), LAUNCH)
    return found


def _is_launch(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "warp_specialize"


def kinds(reports: Iterable[Report], kernel: str) -> set[str]:
    """All that is reported of a kernel."""
    return {kind for report in reports if report.kernel == kernel for kind in report.kinds()}


def unexcused(reports: Iterable[Report]) -> list[Report]:
    """Of our kernels' reports, those with a kind that is not reported of the control, or that is none of those known.
    If nothing is reported of the control, that is all of them."""
    reports = list(reports)
    excused = kinds(reports, CONTROL) - {ELSEWHERE}
    return [report for report in reports if report.kernel not in (CONTROL, BROKEN) and report.kinds() - excused]
