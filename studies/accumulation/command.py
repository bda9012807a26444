"""python -m studies accumulation: does accumulating in fp16 pay?"""

import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from tilewise.call.problem import target_of

from ..bench import results
from ..console import err, out, progress, sentences, table
from ..options import check_names, pick_device, results_file
from . import measure as sums
from . import page as accumulation_page
from . import plots as accumulation_plots
from . import speed as accumulation_speed

TIMED = ("kernels", "speed")
"""Parts of the study that are no sweeps."""


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
        Path | None, typer.Option("--results", help="Merge the findings into <device name>/bench.json in this folder.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw <name>-errors.png and <name>-speed.png, from this name.")
    ] = None,
) -> None:
    """Measure fp16 sums: error, overflow, registers, spills and time of every combination
    (studies.accumulation.attention)."""
    with sentences():
        where = pick_device(device)
        check_names("part", part, (*sums.SWEEPS, *TIMED))
        targets = target or ([target_of(where)] if where.type == "cuda" else ["sm_80", "sm_90"])
        if unknown := [name for name in targets if not re.fullmatch(r"sm_\d+", name)]:
            raise ValueError(f"target must be a chip of NVIDIA such as sm_90, got {', '.join(unknown)}")
        file = results_file(results_folder, where)
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
    """Return all rows of a part of the study, with a progress bar."""
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
    """Yield the rows of a part, some at a time, and their names."""
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
    """Count the steps of a part."""
    if name == "kernels":
        return len(targets)
    return len(sums.TILES) * len(_lengths(quickly)) if name == "speed" else len(_points(name, quickly))


def _points(name: str, quickly: bool) -> Sequence[sums.Point]:
    return sums.quick(sums.SWEEPS[name]) if quickly else sums.SWEEPS[name]


def _lengths(quickly: bool) -> Sequence[int]:
    return accumulation_speed.LENGTHS[::2] if quickly else accumulation_speed.LENGTHS
