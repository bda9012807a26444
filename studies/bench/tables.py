"""Tables of rows by length, and the sentences that answer each suite's question."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median_high
from typing import NamedTuple

from .costs import Cost, beside, costs
from .peers import CHANGED
from .results import OK, OURS, REFUSED, WRONG, Row
from .suites import BACKWARD, BOTH, FORWARD, Case
from .variants import VARIANTS

NUMBER = re.compile(r"\**[-+<]?\d")
"""How a number begins, bold or not."""
CUDNN, FLASH, STANDARD, EFFICIENT = "sdpa cudnn", "sdpa flash", "standard", "sdpa efficient"


def is_ours(name: str) -> bool:
    """Tell whether an implementation is one of tilewise's."""
    return name.startswith(OURS)


class Metric(NamedTuple):
    """A column of the results file, as a table shows it."""

    title: str
    read: Callable[[Row], float | None]
    show: Callable[[float], str]
    over: str | None = None
    """Shown as how many times less it is than this implementation's."""


def three_digits(x: float) -> str:
    """Return a number with three significant digits, without an exponent."""
    decimals = max(0, 2 - math.floor(math.log10(abs(x)))) if x else 0
    return f"{x:.{min(decimals, 6)}f}"


TIME = Metric("milliseconds", lambda row: row.milliseconds, three_digits)
RATE = Metric("TFLOP/s", lambda row: row.tflops, three_digits)
GIGA_RATE = Metric("GFLOP/s", lambda row: row.tflops and 1e3 * row.tflops, three_digits)
OF_MATMUL = Metric("% of the matrix product", lambda row: row.of_matmul, lambda x: f"{100 * x:.0f}")
SPREAD = Metric(
    "spread, % of the median (20th to 80th percentile)",
    lambda row: row.milliseconds and (row.milliseconds_p80 - row.milliseconds_p20) / row.milliseconds,  # type: ignore[operator]
    lambda x: f"{100 * x:.1f}",
)
MEMORY = Metric("peak memory above the inputs, MB", lambda row: row.peak_bytes and row.peak_bytes / 1e6, three_digits)
HOST = Metric("host cost of a call, microseconds", lambda row: row.host_microseconds, lambda x: f"{x:.0f}")
ERROR = Metric("largest error against fp64", lambda row: row.error, lambda x: f"{x:.1e}")
SPEEDUP = TIME._replace(title="times as fast as standard attention", show=lambda x: f"{x:.2f}", over=STANDARD)
OVER_EFFICIENT = SPEEDUP._replace(title="times as fast as PyTorch's memory-efficient kernel", over=EFFICIENT)
OVER_BF16 = SPEEDUP._replace(title="times as fast as tilewise in 16 bits", over=OURS)
METRICS = {"rate": RATE, "time": TIME, "matmul": OF_MATMUL, "spread": SPREAD, "memory": MEMORY, "host": HOST,
           "error": ERROR, "speedup": SPEEDUP, "efficient": OVER_EFFICIENT, "eight-bits": OVER_BF16}  # fmt: skip


def in_its_unit(metric: Metric, rows: Sequence[Row]) -> Metric:
    """Return the metric in a readable unit: ratios within the rows, and a CPU's rates in GFLOP/s."""
    if metric.over:
        theirs = {(row.of, row.pass_): metric.read(row) for row in rows if row.implementation == metric.over}

        def ratio(row: Row) -> float | None:
            mine, other = metric.read(row), theirs.get((row.of, row.pass_))
            return other / mine if mine and other else None

        return metric._replace(read=ratio)
    slow = metric is RATE and all((row.tflops or 0.0) < 1.0 for row in rows)
    return GIGA_RATE if slow else metric


class Grid(NamedTuple):
    """A line of cells for each implementation: of one setting and pass by length, or of one length by setting."""

    title: str
    columns: tuple[str, ...]
    lines: dict[str, list[str]]


def length_label(length: int) -> str:
    """Return a length as text, such as 4k for 4096."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def setting(case: Case) -> Case:
    """Return a case without its length."""
    return replace(case, length=0, batch=0)


def describe(case: Case) -> str:
    """Describe a setting in words: bf16, head size 128, causal."""
    mask = "causal" if case.causal else "full"
    more = [f"dropout {case.dropout}"] * (case.dropout > 0.0) + [case.variant] * bool(case.variant)
    return ", ".join([case.dtype, f"head size {case.head_size}", mask, *more])


def grids(rows: Sequence[Row], metric: Metric) -> list[Grid]:
    """Return all rows that have this metric, or a reason not to, as tables."""
    found = []
    for group in _unique((setting(row.of), row.pass_) for row in rows):
        mine = [row for row in rows if (setting(row.of), row.pass_) == group]
        lengths = tuple(_unique(row.of.length for row in mine))
        lines = {}
        for name in _unique(row.implementation for row in mine):
            at = {row.of.length: row for row in mine if row.implementation == name}
            line = [_cell(at[n], metric) if n in at else "" for n in lengths]
            if any(cell not in ("", "-") for cell in line):
                lines[name] = line
        if lines:
            found.append(Grid(f"{describe(group[0])}, {group[1]}", tuple(map(length_label, lengths)), lines))
    return found


def slowdown(rows: Sequence[Row]) -> Metric:
    """Return the metric of an ablation: the changed kernel's time over the unchanged one's."""
    times = {(row.of, row.pass_, row.implementation): row.milliseconds for row in rows if row.status == OK}

    def read(row: Row) -> float | None:
        own = times.get((row.of, row.pass_, CHANGED.get(row.implementation, "")))
        return row.milliseconds / own if own and row.milliseconds else None

    return Metric("time with one change, in times of the kernel as it is", read, lambda x: f"{x:.2f}")


def worth(rows: Sequence[Row]) -> list[Grid]:
    """Return ablations by head size and mask, for each changed kernel and each length; none if nothing was changed."""
    metric, found = slowdown(rows), []
    changed = [row for row in rows if row.implementation in CHANGED]
    for peer, length in _unique((CHANGED[row.implementation], row.of.length) for row in changed):
        mine = [row for row in changed if (CHANGED[row.implementation], row.of.length) == (peer, length)]
        cases = _unique(row.of for row in mine)
        columns = tuple(f"{case.head_size} {'causal' if case.causal else 'full'}" for case in cases)
        at = {(row.of, row.implementation): _cell(row, metric) for row in mine}
        lines = {name: [at.get((case, name), "") for case in cases] for name in _unique(n for _, n in at)}
        lines = {name: line for name, line in lines.items() if set(line) - {"", "-"}}
        found.append(Grid(f"{peer}, {length_label(length)} tokens", columns, lines))
    return [grid for grid in found if grid.lines]


COST = TIME._replace(title="what a variant costs")


def prices(rows: Sequence[Row]) -> list[Grid]:
    """Return variants by case and pass; none if none was measured."""
    found = {cost.row: cost for cost in costs(rows)}
    columns = ("ms", "speed", "tiles allow", "per tile", "aim")
    grids_ = []
    for case, pass_ in _unique((row.of, row.pass_) for row in found):
        mine = [row for row in rows if (row.of, row.pass_) == (case, pass_) and row.status != REFUSED]
        lines = {
            row.implementation: [_cell(row, TIME), *(_price(found[row]) if row in found else ("",) * 4)] for row in mine
        }
        grids_.append(Grid(f"{case}, {pass_}", columns, lines))
    return grids_


def _price(cost: Cost) -> tuple[str, ...]:
    fewer = (f"{1.0 / cost.share:.2f}", f"{cost.per_tile:.2f}") if cost.share != 1.0 else ("", "")
    aim = "" if cost.aim is None else f"{cost.aim:.2f}" + (" a tile" if cost.packed else "")
    return f"{cost.speed:.2f}", *fewer, aim


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return one line for the implementations whose cells are empty for one reason in the same places."""
    empty = [row for row in rows if row.status != OK]
    names: dict[str, list[str]] = {}
    for name, why in _unique((row.implementation, row.why) for row in empty):
        where = [row for row in empty if (row.implementation, row.why) == (name, why)]
        everywhere = len(where) == sum(row.implementation == name for row in rows)
        cases = _unique(str(row.of) for row in where)
        place = (
            "" if everywhere else f" ({cases[0]})" if len(cases) == 1 else f" ({len(cases)} cases, {cases[0]} first)"
        )
        names.setdefault(f"{why}{place}", []).append(name)
    return [f"{', '.join(who)}: {why}" for why, who in names.items()]


def _cell(row: Row, metric: Metric) -> str:
    value = metric.read(row)
    if value is not None and (row.status == OK or metric is ERROR):
        return metric.show(value)
    return "wrong" if row.status == WRONG else "-"


def ratios(rows: Sequence[Row], peer: str, read: Callable[[Row], float | None], ours: str = OURS) -> dict[Row, float]:
    """Return the peer's number over ours for every row of ours where both exist."""
    at = {(row.of, row.pass_, row.implementation): read(row) for row in rows if row.status == OK}
    found = {}
    for row in rows:
        mine, other = at.get((row.of, row.pass_, ours)), at.get((row.of, row.pass_, peer))
        if row.implementation == ours and mine and other:
            found[row] = other / mine
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean; nan of no values."""
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def headlines(suite: str, rows: Sequence[Row]) -> list[str]:
    """Say in sentences what the suite shows about tilewise."""
    lines = HEADLINES[suite](rows)
    for ours in _unique(row.implementation for row in rows if is_ours(row.implementation)):
        forwards = [row for row in rows if row.implementation == ours and row.pass_ == FORWARD]
        hosts = [row.host_microseconds for row in forwards if row.host_microseconds is not None]
        alone = [row.host_microseconds_no_grad for row in forwards if row.host_microseconds_no_grad is not None]
        if hosts:
            cost = f"{median_high(hosts):.0f} microseconds"
            cost += f", {median_high(alone):.0f} without gradients" if alone else ""
            lines.append(f"Host cost of one forward call of {ours}: {cost} (median of the cases).")
    ours = [row for row in rows if is_ours(row.implementation) or row.implementation in CHANGED | VARIANTS]
    wrong = [row for row in ours if row.status == WRONG]
    if wrong:
        lines.append(f"WRONG: {len(wrong)} rows of tilewise break the accuracy rule and were not timed.")
    return lines


def _paper(rows: Sequence[Row]) -> list[str]:
    lines = []
    for ours in (OURS, f"{OURS} triton"):
        for pass_ in (FORWARD, BACKWARD):
            for sizes in ((64, 128), (256,)):
                where = f"{pass_}, head size {' and '.join(map(str, sizes))}, from 1k tokens"
                lines += _against(
                    rows, CUDNN, where,
                    lambda row, pass_=pass_, sizes=sizes: (
                        row.pass_ == pass_ and row.of.head_size in sizes and row.of.length >= 1024
                    ), ours,
                )  # fmt: skip
    return lines


def _against(rows: Sequence[Row], peer: str, where: str, chosen: Callable[[Row], bool], ours: str = OURS) -> list[str]:
    found = {row: r for row, r in ratios(rows, peer, lambda row: row.milliseconds, ours).items() if chosen(row)}
    if not found:
        return []
    worst = min(found, key=lambda row: found[row])
    return [
        f"{ours} runs at {geometric_mean(found.values()):.2f} of the speed of {peer} ({where}; geometric mean of "
        f"{len(found)} cells, lowest {found[worst]:.2f} at {worst.of})."
    ]


def _classic(rows: Sequence[Row]) -> list[str]:
    lines = []
    faster = ratios(rows, STANDARD, lambda row: row.milliseconds)
    smaller = ratios(rows, STANDARD, lambda row: row.peak_bytes)
    for case in _unique(setting(row.of) for row in rows):
        speed = [f"{r:.1f}x at {row.of.length}" for row, r in faster.items() if setting(row.of) == case]
        memory = [f"{r:.1f}x at {row.of.length}" for row, r in smaller.items() if setting(row.of) == case]
        if speed:
            lines.append(f"{describe(case)}: faster than standard attention {', '.join(speed)} tokens.")
        if memory:
            lines.append(f"{describe(case)}: less memory than standard attention {', '.join(memory)} tokens.")
    return lines


def _long(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case, pass_ in _unique((setting(row.of), row.pass_) for row in rows):
        mine = [
            row for row in rows
            if row.implementation == OURS and (setting(row.of), row.pass_) == (case, pass_) and row.peak_bytes
        ]  # fmt: skip
        if len(mine) > 1:
            each = ", ".join(f"{(row.peak_bytes or 0) / row.of.length:.0f}" for row in mine)
            lengths = ", ".join(str(row.of.length) for row in mine)
            lines.append(f"{describe(case)}, {pass_}: {each} bytes a token at {lengths} tokens.")
    return lines


def _ablation(rows: Sequence[Row]) -> list[str]:
    metric, lines = slowdown(rows), []
    for name, peer in CHANGED.items():
        found = {row: r for row in rows if row.implementation == name and (r := metric.read(row))}
        if found:
            least, most = (pick(found, key=lambda row: found[row]) for pick in (min, max))
            lines.append(
                f"{name}: {geometric_mean(found.values()):.2f} times the time of {peer} (geometric mean of "
                f"{len(found)} cells, {found[least]:.2f} at {least.of} to {found[most]:.2f} at {most.of})."
            )
    return lines


def _cpu(rows: Sequence[Row]) -> list[str]:
    lines = []
    for pass_ in (FORWARD, BOTH):
        for ours in (OURS, f"{OURS} tiled"):
            for dtype in ("fp32", "bf16"):
                lines += _against(
                    rows, "sdpa", f"{dtype}, {pass_}",
                    lambda row, dtype=dtype, pass_=pass_: row.of.dtype == dtype and row.pass_ == pass_, ours,
                )  # fmt: skip
    for row, r in ratios(rows, STANDARD, lambda row: row.peak_bytes).items():
        lines.append(f"{row.of}, {row.pass_}: {r:.1f}x less memory than standard attention.")
    return lines


def _short_cpu(rows: Sequence[Row]) -> list[str]:
    found = ratios(rows, "sdpa", lambda row: row.milliseconds)
    return [f"{row.of}, {row.pass_}: {r:.2f} of the speed of sdpa." for row, r in found.items()]


def _fastest(rows: Sequence[Row]) -> list[str]:
    """Say where the fastest of PyTorch's kernels is faster, and by how much."""
    against = [ratios(rows, peer, lambda row: row.milliseconds) for peer in (CUDNN, FLASH)]
    found = {row: min(each[row] for each in against if row in each) for row in {**against[0], **against[1]}}
    slower = {row: r for row, r in found.items() if r < 1}
    lines = [f"tilewise is at least as fast as cuDNN and flash in {len(found) - len(slower)} of {len(found)} cells."]
    return lines + [f"{row.of}, {row.pass_}: {r:.2f} of the speed of the faster." for row, r in slower.items()]


def _llmc(rows: Sequence[Row]) -> list[str]:
    lines = []
    for ours in _unique(row.implementation for row in rows if is_ours(row.implementation)):
        for size, pass_ in _unique((row.of.head_size, row.pass_) for row in rows):
            mine = [row for row in rows if (row.of.head_size, row.pass_) == (size, pass_)]
            for peer in (EFFICIENT, STANDARD):
                found = ratios(mine, peer, lambda row: row.milliseconds, ours)
                each = [f"{r:.2f}x at {row.of.length}" for row, r in found.items()]
                if each:
                    lines.append(f"{ours}, head size {size}, {pass_}, against {peer}: {', '.join(each)} tokens.")
    return lines


def _variants(rows: Sequence[Row]) -> list[str]:
    aimed = [(cost, cost.aim) for cost in costs(rows) if cost.aim]
    short = [(cost, aim) for cost, aim in aimed if cost.aimed < aim]
    lines = [f"{len(aimed) - len(short)} of {len(aimed)} aims are met."] if aimed else []
    for cost, aim in short:
        row, per_tile = cost.row, " per visited tile" if cost.packed else ""
        mask = "causal" if row.of.causal else "full"
        lines.append(
            f"{row.implementation}, {mask}, {row.pass_}: {cost.aimed:.2f} of the plain call's speed{per_tile}, "
            f"the aim is {aim:.2f}."
        )
    for row, other, aim in beside(rows):
        speed = other.milliseconds / row.milliseconds  # type: ignore[operator]
        said = "held" if speed >= aim else "MISSED"
        lines.append(
            f"{row.of}, {row.pass_}: {speed:.2f} of the speed of {other.implementation}, at least {aim}: {said}."
        )
    return lines


def _host(rows: Sequence[Row]) -> list[str]:
    """Say what a forward of every peer costs the host; `headlines` adds ours."""
    lines = []
    for row in rows:
        if row.pass_ == FORWARD and not is_ours(row.implementation) and row.host_microseconds_no_grad is not None:
            alone = f"{row.host_microseconds_no_grad:.1f} microseconds without gradients"
            lines.append(f"One forward call of {row.implementation}: {alone}, {row.host_microseconds:.1f} with them.")
    return lines


def _eight_bits(rows: Sequence[Row]) -> list[str]:
    """Say how fast 8 bits are at the longest length of each head size, without a mask."""
    lines = []
    for row in rows:
        longest = max(other.of.length for other in rows)
        if row.of.length == longest and not row.of.causal and row.milliseconds and is_ours(row.implementation):
            own = [r for r in rows if (r.of, r.implementation) == (row.of, OURS) and r.milliseconds]
            if own and row.implementation != OURS:
                times = own[0].milliseconds / row.milliseconds  # type: ignore[operator]
                lines.append(
                    f"Head size {row.of.head_size}, {length_label(longest)} tokens, {row.implementation}: "
                    f"{times:.2f} times as fast as 16 bits."
                )
    return lines


HEADLINES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "paper": _paper,
    "classic": _classic,
    "long": _long,
    "cpu": _cpu,
    "short-cpu": _short_cpu,
    "short": _fastest,
    "decode": _fastest,
    "prefill": _fastest,
    "llmc": _llmc,
    "ablation": _ablation,
    "variants": _variants,
    "eight-bits": _eight_bits,
    "host": _host,
}


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown. Columns of numbers, whatever their units, are aligned right."""
    marks = []
    for n in range(len(head)):
        found = [line[n] for line in lines if line[n] not in ("", "-")]
        marks.append("---:" if found and all(NUMBER.match(cell) for cell in found) else "---")
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, marks, *lines))


def folded(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write a table under its title, which opens it."""
    return f"<details><summary>{title}</summary>\n\n{markdown(head, lines)}\n</details>\n"


def _unique(items: Iterable) -> list:
    return list(dict.fromkeys(items))
