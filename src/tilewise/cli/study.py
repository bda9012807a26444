"""tilewise study: questions that a benchmark does not answer. How accurate is fp32? Does accumulating in fp16 pay?"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ..bench import accumulation as sums
from ..bench import accumulation_page, accumulation_plots, accumulation_speed, results, study_page
from ..bench.study import PART, SWEEPS, Finding, Point, quick, run
from ..problem import target_of
from .console import err, out, pick_device, progress, sentences, table

TIMED = ("kernels", "speed")
"""Parts of the accumulation study that are no sweeps."""

study = typer.Typer(help="Studies of tilewise's numbers.", no_args_is_help=True)


@study.command()
def accuracy(
    sweep: Annotated[
        list[str] | None, typer.Option(help=f"One or more of: {', '.join(SWEEPS)}; all if left out.")
    ] = None,
    quickly: Annotated[bool, typer.Option("--quick", help="Two short points of each sweep.")] = False,
    longest: Annotated[int | None, typer.Option(help="Leave out points with more tokens.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    results_folder: Annotated[
        Path | None, typer.Option("--results", help="Merge the findings into <device name>.json in this folder.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw pictures as <name>-<sweep>.png, from this name.")] = None,
) -> None:
    """Errors of o, dq, dk and dv in fp32 against fp64: every precision, and PyTorch's kernels."""
    with sentences():
        where = pick_device(device)
        _check_names("sweep", sweep, SWEEPS)
        file = _results_file(results_folder, where)
    every: list[Finding] = []
    for name in dict.fromkeys(sweep or SWEEPS):
        points = [p for p in (quick(SWEEPS[name]) if quickly else SWEEPS[name]) if p.length <= (longest or p.length)]
        env, found = results.environment(where), measure(name, points, where)
        every += found
        _show(name, found)
        if file:
            results.merge(file, name, found, env, quickly or len(points) < len(SWEEPS[name]), part=PART)
            err.print(f"findings of {name} are in {file}")
        if plot:
            path = plot.with_name(f"{plot.stem}-{name.replace('_', '-')}.png")
            study_page.picture(name, found, path)
            err.print(f"picture: {path}")
    out.print("[bold]Errors over those of standard attention, geometric mean (and at worst)[/]")
    for line in study_page.summary(every):
        out.print(escape(line), soft_wrap=True)
    for line in study_page.reasons(every):
        out.print(f"[dim]not measured: {escape(line)}[/]", soft_wrap=True)


@study.command()
def accumulation(
    part: Annotated[
        list[str] | None, typer.Option(help=f"One or more of: {', '.join((*sums.SWEEPS, *TIMED))}; all if left out.")
    ] = None,
    quickly: Annotated[bool, typer.Option("--quick", help="Two short points of each sweep, three lengths.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Chips to compile for, such as sm_90; the GPU's own, else sm_80 and sm_90.")
    ] = None,
    results_folder: Annotated[
        Path | None, typer.Option("--results", help="Merge the findings into <device name>.json in this folder.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw <name>-errors.png and <name>-speed.png, from this name.")
    ] = None,
) -> None:
    """fp16 sums: error, overflow, registers, spills and time of every combination (experimental.attention)."""
    with sentences():
        where = pick_device(device)
        _check_names("part", part, (*sums.SWEEPS, *TIMED))
        targets = target or ([target_of(where)] if where.type == "cuda" else ["sm_80", "sm_90"])
        if unknown := [name for name in targets if not re.fullmatch(r"sm_\d+", name)]:
            raise ValueError(f"target must be a chip of NVIDIA such as sm_90, got {', '.join(unknown)}")
        file = _results_file(results_folder, where)
    chosen = tuple(dict.fromkeys(part or (*TIMED[:1], *sums.SWEEPS, *TIMED[1:])))
    found: dict[str, list[Any]] = {}
    for name in chosen:
        env = results.environment(where)
        found[name] = measure_part(name, where, targets, quickly)
        if file and found[name]:
            results.merge(file, name, found[name], env, quickly, part=sums.PART)
            err.print(f"{name} is in {file}")
    accumulation_page.show(found, lambda text: out.print(escape(text), soft_wrap=True), table)
    if plot:
        for path in accumulation_plots.pictures(found, plot.with_suffix("")):
            err.print(f"picture: {path}")


def measure_part(name: str, device: torch.device, targets: Sequence[str], quickly: bool) -> list[Any]:
    """All rows of a part of the accumulation study, with a progress bar."""
    if name == "speed" and device.type != "cuda":
        err.print("speed: nothing is timed on a CPU, where the kernel is emulated")
        return []
    if name == "kernels" and find_spec("triton") is None:
        err.print("kernels: compiling needs Triton; pip install 'tilewise\\[triton]'")
        return []
    rows: list[Any] = []
    with progress("now") as bar:
        task = bar.add_task(name, total=_count(name, targets, quickly), now="")
        for title, step in _steps(name, device, targets, quickly, lambda text: bar.update(task, now=text)):
            rows += step
            bar.advance(task)
            if not err.is_terminal:
                err.print(f"{name}: {title}", markup=False)
        bar.update(task, now="")
    return rows


def _steps(
    name: str, device: torch.device, targets: Sequence[str], quickly: bool, watch: Callable[[str], None]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """The rows of a part, some at a time, and what they are of."""
    if name == "kernels":
        for target in targets:
            yield target, accumulation_speed.kernels(target, watch)
    elif name == "speed":
        for times in accumulation_speed.times(device, watch, _lengths(quickly)):
            yield str(times[0].on), times
    else:
        for found in sums.run(_points(name, quickly), device, watch):
            yield str(found[0].at), found


def _count(name: str, targets: Sequence[str], quickly: bool) -> int:
    """How many steps a part takes."""
    if name == "kernels":
        return len(targets)
    return len(sums.TILES) * len(_lengths(quickly)) if name == "speed" else len(_points(name, quickly))


def _points(name: str, quickly: bool) -> Sequence[sums.Point]:
    return sums.quick(sums.SWEEPS[name]) if quickly else sums.SWEEPS[name]


def _lengths(quickly: bool) -> Sequence[int]:
    return accumulation_speed.LENGTHS[::2] if quickly else accumulation_speed.LENGTHS


def _check_names(option: str, given: Sequence[str] | None, known: Iterable[str]) -> None:
    for name in given or ():
        if name not in known:
            raise ValueError(f"there is no {option} {name!r}; choose from {', '.join(known)}")


def _results_file(folder: Path | None, device: torch.device) -> Path | None:
    """Where findings go. A file that cannot be merged is told before, not after, the measurement."""
    if folder is None:
        return None
    file = folder / f"{results.slug(results.device_name(device))}.json"
    results.load(file)
    return file


def measure(sweep: str, points: Sequence[Point], device: torch.device) -> list[Finding]:
    """All findings of a sweep, with a progress bar."""
    found: list[Finding] = []
    with progress("now") as bar:
        task = bar.add_task(sweep, total=len(points), now="")
        for at_point in run(points, device, lambda text: bar.update(task, now=text)):
            found += at_point
            bar.advance(task)
            if not err.is_terminal:
                err.print(f"{sweep}: {at_point[0].at}", markup=False)
        bar.update(task, now="")
    return found


def _show(sweep: str, found: list[Finding]) -> None:
    head, lines = study_page.table(sweep, found, lambda finding: finding.relative)
    table(f"Errors by {study_page.TITLES[sweep]}", head, lines, numbers_from=2)
