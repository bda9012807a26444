"""Write the accumulation study as tables, sentences, and docs/results/accumulation.md."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..bench.results import OK
from ..bench.tables import folded, geometric_mean, length_label, markdown
from .measure import COMBINATIONS, IN_LOOP, PART, PLAIN, SWEEPS, Combination, Finding, Point
from .plots import SHOWN, TITLES, picture, ratios_of, speed_picture, value
from .speed import Kernel, Time

BASE = Point()
CHANGES = {
    "Q K^T in fp16": Combination(scores="fp16"),
    "P V in fp16": Combination(values="fp16"),
    "both in fp16": Combination(scores="fp16", values="fp16"),
    "P V in fp16, in-loop": Combination(values="fp16", way=IN_LOOP),
    "exp2 in halves": Combination(exp2="halves"),
    "both in fp16, and exp2 in halves": Combination(scores="fp16", values="fp16", exp2="halves"),
}
"""What sentences compare with fp32 sums."""
HALVES = ("exp2 in halves", "both in fp16, and exp2 in halves")
PAYS = 0.97
"""A kernel that takes more of the time is called no faster."""


def cell(finding: Finding | None) -> str:
    """Return an error, or the fraction that overflowed."""
    if finding is None or finding.status != OK:
        return "-"
    if finding.relative is not None:
        return f"{finding.relative:.1e}"
    return f"overflow {100 * (finding.overflow or 0.0):.3g}%"


COLUMNS = ["QK", "PV", "division", "exp2"]
"""A combination, in tables."""
Grid = tuple[list[str], list[list[str]]]
"""A head, and lines."""


def table(sweep: str, findings: Sequence[Finding]) -> Grid:
    """Return the errors of every combination at every point."""
    points = list(dict.fromkeys(f.at for f in findings))
    at = {(f.of, f.at): f for f in findings}
    lines = [[*c.words, *(cell(at.get((c, p))) for p in points)] for c in dict.fromkeys(f.of for f in findings)]
    return [*COLUMNS, *(value(sweep, p) for p in points)], lines


def error_sentences(findings: dict[str, list[Finding]]) -> list[str]:
    """Say what each way costs in accuracy from the fewest to the most keys, and where it overflows."""
    at = {(f.of, f.at): f for f in findings.get("length", ())}
    points = [point for of, point in at if of == PLAIN]
    lines = []
    for combination, (label, _, _) in SHOWN.items():
        ends = [p for p in (points[:1] + points[1:][-1:]) if combination != PLAIN and (combination, p) in at]
        ratios = [(at[combination, p].relative or math.nan) / (at[PLAIN, p].relative or math.nan) for p in ends]
        if ends:
            each = ", ".join(f"{r:.1f} at {value('length', p)}" for r, p in zip(ratios, ends, strict=True))
            broken = "; ".join(overflows(findings, combination)) or "nowhere"
            lines.append(f"{label}: errors over those of fp32 sums, by keys: {each}. Overflow: {broken}.")
    return lines


def overflows(findings: dict[str, list[Finding]], combination: Combination) -> list[str]:
    """Return the points where a combination gave an infinite value or NaN."""
    places = {
        sweep: [value(sweep, f.at) for f in found if f.of == combination and f.overflow]
        for sweep, found in findings.items()
    }
    return [f"{TITLES[sweep]} {', '.join(values)}" for sweep, values in places.items() if values]


def verdicts(findings: dict[str, list[Finding]]) -> Grid:
    """Return each combination's error over that of fp32 sums, and where it overflowed."""
    plain = {f.at: f.relative for found in findings.values() for f in found if f.of == PLAIN}
    lines = []
    for combination in COMBINATIONS:
        ratios: dict[Point, tuple[float, str]] = {}
        broken = overflows(findings, combination)
        for sweep, found in findings.items():
            for f in found:
                if f.of == combination and f.relative is not None and (base := plain.get(f.at)):
                    ratios.setdefault(f.at, (f.relative / base, f"{TITLES[sweep]} {value(sweep, f.at)}"))
        if ratios or broken:
            mean = f"{geometric_mean([r for r, _ in ratios.values()]):.2f}" if ratios else "-"
            worst = "{:.1f}, {}".format(*max(ratios.values(), key=lambda r: r[0])) if ratios else "-"
            lines.append([*combination.words, mean, worst, "; ".join(broken) or "nowhere"])
    return [*COLUMNS, "error over fp32 sums'", "at worst", "overflows at"], lines


def kernel_table(kernels: Sequence[Kernel]) -> Grid:
    """Return registers of every kernel of one target, and spills where there are any, with a column for each head size
    and tile."""
    columns = list(dict.fromkeys((k.head_size, *k.tiles) for k in kernels))
    at = {(k.of, (k.head_size, *k.tiles)): k for k in kernels}
    head = [f"D{size}: {r} x {c}, {warps} warps" for size, r, c, warps, _ in columns]
    lines = [[*c.words, *(_resources(at.get((c, x))) for x in columns)] for c in dict.fromkeys(k.of for k in kernels)]
    return [*COLUMNS, *head], lines


def _resources(kernel: Kernel | None) -> str:
    if kernel is None or kernel.registers is None:
        return "-"
    return f"{kernel.registers} + {kernel.spills} B" if kernel.spills else str(kernel.registers)


def by_target(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Group kernels by chip."""
    return {target: [k for k in kernels if k.target == target] for target in dict.fromkeys(k.target for k in kernels)}


def kernel_sentences(kernels: Sequence[Kernel]) -> list[str]:
    """Say how many registers fp16 sums save."""
    lines = []
    for target, every in by_target(kernels).items():
        made = [k for k in every if k.registers]
        registers = {(k.of, (k.head_size, *k.tiles)): k.registers or 0 for k in made}
        places = [at for of, at in registers if of == PLAIN]
        saved = {
            name: [registers[PLAIN, at] - registers[changed, at] for at in places if (changed, at) in registers]
            for name, changed in CHANGES.items()
        }
        each = "; ".join(f"{name} {_span(numbers)}" for name, numbers in saved.items() if numbers)
        whole = _span([registers[PLAIN, at] for at in places])
        spilled = f"{len([k for k in made if k.spills])} of {len(made)} kernels spill"
        lines.append(f"{target}: registers saved a thread, of {whole} with fp32 sums: {each}. {spilled}.")
    return lines


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def speed_sentences(times: Sequence[Time]) -> list[str]:
    """Say whether fp16 sums pay, and which fraction of the time of fp32 sums the kernels take."""
    lines = []
    for size in dict.fromkeys(t.on.head_size for t in times):
        ratios = ratios_of(times, size)
        found = {name: ratios[str(c)] for name, c in CHANGES.items() if str(c) in ratios}
        if not found:
            continue
        best = {
            what: min(geometric_mean(found[name]) for name in found if (name in HALVES) == (what in HALVES))
            for what in ("fp16 sums", "exp2 in halves")
        }
        verdict = ", ".join(f"{what} {_pays(what, ratio)}" for what, ratio in best.items())
        each = (f"{name} {geometric_mean(r):.2f} ({min(r):.2f} to {max(r):.2f})" for name, r in found.items())
        lines.append(
            f"Head size {size}: {verdict}. Times over those of fp32 sums in the same kernel, each with its best tiles, "
            f"in the geometric mean (and from, to): {'; '.join(each)}."
        )
    return lines


def _pays(what: str, ratio: float) -> str:
    singular = what in HALVES
    if ratio < PAYS:
        return "pays" if singular else "pay"
    return "does not pay" if singular else "do not pay"


def speed_table(times: Sequence[Time], head_size: int) -> Grid:
    """Return TFLOP/s by length, the tiles chosen, and the time over that of fp32 sums."""
    mine = [t for t in times if t.on.head_size == head_size]
    lengths, ratios, lines = list(dict.fromkeys(t.on.length for t in mine)), ratios_of(times, head_size), []
    for name in dict.fromkeys(t.implementation for t in mine):
        at = {t.on.length: t for t in mine if t.implementation == name}
        first = next(iter(at.values()))
        words = Combination(**first.combination).words if first.combination else ["", "", name, ""]
        tiles = "{} x {}, {} warps, {} stages".format(*first.tiles) if first.tiles else ""
        rates = [f"{at[n].tflops:.0f}" if n in at and at[n].tflops else "-" for n in lengths]
        lines.append([*words, tiles, *rates, f"{geometric_mean(ratios[name]):.3f}" if name in ratios else "-"])
    return [*COLUMNS, "tiles", *map(length_label, lengths), "time over fp32 sums'"], lines


def reasons(rows: Sequence[Any]) -> list[str]:
    """Return what has no number, and why."""
    absent: dict[str, int] = {}
    for row in rows:
        if row.why:
            name = row.implementation if isinstance(row, Time) else str(row.of)
            absent[f"{name}: {row.why}"] = absent.get(f"{name}: {row.why}", 0) + 1
    return [f"{note} ({count} times)" for note, count in absent.items()]


def show(found: dict[str, list[Any]], say: Callable[[str], None], print_table: Callable[..., None]) -> None:
    """Print everything found, by part."""
    sweeps = {name: rows for name, rows in found.items() if name in SWEEPS}
    for sweep, rows in sweeps.items():
        print_table(f"Errors by {TITLES[sweep]}", *table(sweep, rows))
    if sweeps:
        print_table("Against fp32 sums", *verdicts(sweeps))
    kernels = found.get("kernels", [])
    for target, made in by_target(kernels).items():
        print_table(f"Registers, and bytes spilled, {target}", *kernel_table(made))
    times = found.get("speed", [])
    for size in dict.fromkeys(t.on.head_size for t in times):
        print_table(f"TFLOP/s, head size {size}", *speed_table(times, size))
    for line in (*error_sentences(sweeps), *kernel_sentences(kernels), *speed_sentences(times)):
        say(line)
    for note in reasons([row for rows in found.values() for row in rows]):
        say(f"not measured: {note}")


# The page


def section(content: dict[str, Any], stem: Path, origin: Callable[[dict[str, Any], bool], str]) -> list[str]:
    """Return one device's part of the page; draw its pictures as <stem>-errors.png and <stem>-speed.png."""
    runs = content[PART]
    findings = {sweep: [Finding(**row) for row in runs[sweep]["rows"]] for sweep in SWEEPS if sweep in runs}
    kernels = [Kernel(**row) for row in runs.get("kernels", {"rows": ()})["rows"]]
    times = [Time(**row) for row in runs.get("speed", {"rows": ()})["rows"]]
    lines = [f"## {content['device']}\n"]
    lines += [origin(run["environment"], run["partial"]) + "\n" for run in _origins(runs.values())]
    lines += ["### Does it pay?\n", *_speed_part(times, stem.with_name(f"{stem.name}-speed.png"))]
    if kernels:
        lines += [*(f"- {line}" for line in kernel_sentences(kernels)), ""]
        for target, made in by_target(kernels).items():
            lines.append(folded(f"Registers, and bytes spilled, {target}", *kernel_table(made)))
    if findings:
        path = stem.with_name(f"{stem.name}-errors.png")
        picture(findings, path)
        lines += ["### When does it break?\n", f"![Errors and overflow](../images/{path.name})\n"]
        lines += [*(f"- {line}" for line in error_sentences(findings)), ""]
        lines += ["Over all points where it does not overflow, in the geometric mean, and at worst:\n"]
        lines += [markdown(*verdicts(findings)), ""]
        lines += [folded(f"Errors by {TITLES[sweep]}", *table(sweep, found)) for sweep, found in findings.items()]
    if notes := reasons([*(f for found in findings.values() for f in found), *kernels, *times]):
        lines += ["Not measured:\n", *(f"- {note}" for note in notes), ""]
    return lines


def _origins(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first of the parts that were measured together."""
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        first.setdefault(repr({**run["environment"], "when": run["partial"]}), run)
    return list(first.values())


def _speed_part(times: Sequence[Time], path: Path) -> list[str]:
    if not any(t.milliseconds for t in times):
        return ["Not timed on this device.\n"]
    speed_picture(times, path)
    lines = [*(f"- {line}" for line in speed_sentences(times)), "", f"![Times](../images/{path.name})\n"]
    sizes = dict.fromkeys(t.on.head_size for t in times)
    return [*lines, *(folded(f"TFLOP/s, head size {size}", *speed_table(times, size)) for size in sizes)]
