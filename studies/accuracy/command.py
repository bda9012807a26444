"""python -m studies accuracy: how accurate is fp32?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from ..bench import results
from ..console import err, out, progress, sentences, table
from ..options import check_names, pick_device, results_file
from . import page as study_page
from .measure import PART, SWEEPS, Finding, Point, quick, run


def accuracy(
    sweep: Annotated[
        list[str] | None, typer.Option(help=f"One or more of: {', '.join(SWEEPS)}; all if left out.")
    ] = None,
    quickly: Annotated[bool, typer.Option("--quick", help="Two short points of each sweep.")] = False,
    longest: Annotated[int | None, typer.Option(help="Leave out points with more tokens.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    results_folder: Annotated[
        Path | None, typer.Option("--results", help="Merge the findings into <device name>/bench.json in this folder.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw pictures as <name>-<sweep>.png, from this name.")] = None,
) -> None:
    """Measure errors of o, dq, dk and dv in fp32 against fp64: every precision, and PyTorch's kernels."""
    with sentences():
        where = pick_device(device)
        check_names("sweep", sweep, SWEEPS)
        file = results_file(results_folder, where)
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


def measure(sweep: str, points: Sequence[Point], device: torch.device) -> list[Finding]:
    """Return all findings of a sweep, with a progress bar."""
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
