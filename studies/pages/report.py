"""The measured parts of docs/results, from the results files and nothing else.

A page's own text stands in the page; what is written here lies between its comments <!-- measured -->.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from .. import ablation  # noqa: F401, adds its suite
from ..accumulation import measure as accumulation
from ..accumulation.page import section as accumulation_section
from ..accuracy import measure as study
from ..accuracy.page import section as accuracy_section
from ..bench import state
from ..bench.results import OK, OURS, changed, kernels_of, load, rows_of
from ..bench.suites import SUITES
from ..bench.tables import (
    MEMORY,
    METRICS,
    OF_MATMUL,
    Grid,
    grids,
    headlines,
    in_its_unit,
    is_ours,
    markdown,
    prices,
    reasons,
    slowdown,
    worth,
)
from ..training import contests as trainings
from ..training import contexts
from ..tune import tuned
from . import field, marked, plots
from . import fp32 as fp32_page
from . import variants as variants_page

TILES = """Measured by `python -m studies tune`. A candidate is the row in use, or that row with one
change. Each must pass the rule of accuracy, and all take turns. Speed is the fastest candidate's time over this one's,
as a geometric mean over the cases. The whole forward or backward is timed, even if the row is of one kernel only.
"""
PRICES = """Speed is the plain call's time over the variant's, in the same rounds; the plain call is the row tilewise. A
window and packed sequences visit fewer tiles of 128 x 128. *Tiles allow* says how many times fewer, and *per tile* is
speed over that. GQA n: n query heads share a key head. Softcap: tanh at 50. Window 1024: a query sees its position and
the 1023 keys before it. Sink: learnable, with its gradient. Varlen: the tokens packed as sequences of {lengths}.
"""
ACCURACY = ("hopper fp32", "triton fp32", "mask causal", "cpu")
TRAINING = ("hopper fp32 forward D64", "hopper fp32 backward D64", "mask causal", "cpu")
SUMS = ("fp16 sums",)
"""Beginnings of the names of the kernels that studies and trainings depend on."""
DETAILS = (OF_MATMUL, MEMORY)
"""Folded below the first tables. Errors, spreads and host costs stay in the results files."""
ABLATION = "../internals/hopper-forward.md#what-each-technique-is-worth"
HERE = Path(__file__).parents[2] / "docs" / "results"


class Origin(NamedTuple):
    """Tells when, where and of which kernels a file's results were measured, and what has changed since."""

    content: dict[str, Any]
    carried: dict[str, str]
    """States whose kernels were only renamed, and their heirs."""
    names: Iterable[str] = ()
    """Beginnings of the names of the kernels that the results depend on."""

    def __call__(self, env: dict[str, Any], partial: bool) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
        commit = env["commit"] or "unknown"
        text = f"Measured {env['when'][:10]} at commit {commit}, kernels {env['kernels']}; {versions}."
        if partial:
            text += " Not the whole suite."
        old = self.changed_since(env)
        if old is None:
            return f"{text} **Which kernels these were is not known.**"
        if old:
            have, their = ("have", "their") if len(old) > 1 else ("has", "its")
            text += f" **{', '.join(old)} {have} changed since: {their} rows are of older kernels.**"
        return text

    def changed_since(self, env: dict[str, Any]) -> list[str] | None:
        """Return which kernels are others today; None if what they were is not known."""
        before = self.content.get("kernels", {}).get(env["kernels"])
        return None if before is None else changed(before, self.names, self.carried)

    def stamp(self, env: dict[str, Any]) -> str:
        """Say the version, commit and date of results whose kernels are not those of today; nothing of others."""
        if self.changed_since(env) == []:
            return ""
        parts = f"v{env['versions']['tilewise']}", (env["commit"] or "")[:7], env["when"][:10]
        return f" ({', '.join(filter(None, parts))})"


def write(results: Path, docs: Path) -> Path:
    """Draw the pictures under docs/images, and fill in the pages of docs/results.

    Raises ValueError if there is no results file.
    """
    measured = sorted(results.glob("*/tune.json"))
    files = sorted(results.glob("*/bench.json"))
    if not files and not measured:
        raise ValueError(f"there is no results file in {results}; run a suite with --results {results} first")
    contents = dict(sorted(((file, load(file)) for file in files), key=lambda each: _on_a_cpu(each[1])))
    carried = state.carried(results)
    sections: dict[bool, list[str]] = {False: [], True: []}
    fp32, studied, summed = [], [], []
    for file, content in contents.items():
        stem, heading = docs / "images" / file.parent.name, [f"## {content['device']}\n"]
        if study.PART in content:
            studied += accuracy_section(
                content, stem.with_name(f"{stem.name}-accuracy"), Origin(content, carried, ACCURACY)
            )
        if accumulation.PART in content:
            of_sums = stem.with_name(f"{stem.name}-accumulation")
            summed += accumulation_section(content, of_sums, Origin(content, carried, SUMS))
        if of_suites := _sections(content, carried, [suite for suite in SUITES if suite != fp32_page.SUITE], stem):
            of_suites += field.section(file, content) + variants_page.section(file, content)
            sections[_on_a_cpu(content)] += heading + of_suites
        of_fp32 = _sections(content, carried, [fp32_page.SUITE], stem)
        if trainings.PART in content:
            of_trainings = stem.with_name(f"{stem.name}-training")
            of_fp32 += trainings.section(content, of_trainings, Origin(content, carried, TRAINING))
            of_fp32 += contexts.section(trainings.contests_of(content), of_trainings)
        if of_fp32:
            fp32 += heading + of_fp32
    tiles = [line for file in measured for line in _tiles(tuned.load(file), carried)]
    parts = {
        "fp32": [*fp32_page.absent(contents.values()), *fp32],
        "accuracy": studied,
        "accumulation": summed,
        "tables": [*sections[False], *tiles, *sections[True]],
    }
    return [_fill(docs / "results" / f"{name}.md", lines) for name, lines in parts.items() if lines][-1]


def _fill(page: Path, lines: list[str]) -> Path:
    """Puts what was measured into a page, or into a copy of this project's."""
    if not page.exists():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text((HERE / page.name).read_text())
    return marked.write(page, {"measured": "\n\n" + "\n".join(lines).strip("\n") + "\n\n"})


def _on_a_cpu(content: dict[str, Any]) -> bool:
    """Whether no run of a file knows of CUDA; such a file comes last."""
    runs = [run for part in content.values() if isinstance(part, dict) for run in part.values()]
    environments = [run["environment"] for run in runs if isinstance(run, dict) and "environment" in run]
    return not any("cuda" in environment["versions"] for environment in environments)


def _sections(content: dict[str, Any], carried: dict[str, str], suites: Sequence[str], stem: Path) -> list[str]:
    """Return the sections of the suites that were run."""
    ran = [suite for suite in suites if suite in content["suites"]]
    origins = {suite: Origin(content, carried, kernels_of_run(content, suite)) for suite in ran}
    return [
        line
        for suite in ran
        for line in _section(content, suite, stem.with_name(f"{stem.name}-{suite}"), origins[suite])
    ]


def _section(content: dict[str, Any], suite: str, stem: Path, origin: Origin) -> list[str]:
    rows, run = rows_of(content, suite), content["suites"][suite]
    lines = [f"### {suite}: {SUITES[suite].title}\n", origin(run["environment"], run["partial"]) + "\n"]
    pictures = [f"![{shows}](../images/{path.name})\n" for path, shows in plots.draw(suite, rows, stem)]
    lines += pictures
    if changes := worth(rows):
        lines.append(f"[Hopper]({ABLATION}) says what each row changes.\n")
        lines.append(f"{slowdown(rows).title}:\n\n{_tables(changes)}\n")
    if found := prices(rows):
        packed = ", ".join(map(str, replace(rows[0].of, variant="varlen").lengths))
        lines += [PRICES.format(lengths=packed), _tables(found) + "\n"]
    if said := headlines(suite, rows):
        lines += ["<details><summary>In sentences</summary>\n", *(f"- {line}" for line in said), "\n</details>\n"]
    first = [METRICS[name] for name in SUITES[suite].tables]
    for metric in dict.fromkeys((*(in_its_unit(metric, rows) for metric in first), *DETAILS)):
        if found := grids(rows, metric):
            title = metric.title[0].upper() + metric.title[1:]
            lines.append(f"<details><summary>{title}</summary>\n\n{_tables(found)}\n\n</details>\n")
    if notes := reasons(rows):
        lines += ["Not measured:\n", *(f"- {note}" for note in notes), ""]
    return lines


def _tiles(content: dict[str, Any], carried: dict[str, str]) -> list[str]:
    """Return a GPU's tables of tiles: the rows in use, the best neighbours, and every time behind them."""
    slots: list[tuned.Tuned] = content["slots"]
    lines = [f"## Tiles of {content['device']}\n", TILES]
    for environment, of in groupby(slots, key=lambda slot: slot.environment):
        names = {f"{slot.backend} {slot.pass_}" for slot in of}
        lines.append(Origin(content, carried, names)(environment, False) + "\n")
    head = ["row", "in use", "candidates", "timed", "verdict"]
    table = []
    for slot in slots:
        counts = str(len(slot.candidates)), str(len(slot.timed))
        table.append([slot.title, tuned.row_text(slot.present.row), *counts, slot.verdict()])
    lines.append(markdown(head, table))
    for slot in slots:
        columns, cells = tuned.grid(slot)
        drawn = [*([markdown(columns, cells)] if cells else ()), "", *(f"- {reason}" for reason in tuned.reasons(slot))]
        lines += [f"\n<details><summary>{slot.title}</summary>\n", *drawn, "\n</details>"]
    return [*lines, ""]


def kernels_of_run(content: dict[str, Any], suite: str) -> set[str]:
    """Return the kernels on which a suite's rows depend."""
    states = content.get("kernels", {}).get(content["suites"][suite]["environment"]["kernels"], {})
    rows = [row for row in rows_of(content, suite) if row.status == OK]
    return {name for row in rows for name in kernels_of(row.of, row.implementation, row.pass_, states)}


def _tables(found: Sequence[Grid]) -> str:
    """Return all grids of one metric, each a table no wider than a phone under its title; ours in bold."""
    parts = []
    for grid in found:
        lines = []
        for name, cells in grid.lines.items():
            bold = "**" if name == OURS or (OURS not in grid.lines and is_ours(name)) else ""
            lines.append([f"{bold}{cell}{bold}" if cell else "" for cell in (name, *cells)])
        parts += [f"{grid.title}:", markdown(["name", *grid.columns], lines)]
    return "\n\n".join(parts)
