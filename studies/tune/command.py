"""Measure rows of tile sizes and their neighbours, and write the best for TILEWISE_TILES."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from tilewise.host.tables import VARIABLE, card

from ..bench import results
from ..console import err, out, print_json, progress, sentences, table
from . import tune as engine
from . import tuned
from .tuned import Tuned


def tune(
    match: Annotated[
        list[str] | None,
        typer.Option(help="Only rows with this in their name: hopper, triton, backward, D128, 32-bit."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and rounds.")] = False,
    seconds: Annotated[float, typer.Option(help="Begin no row of a table after this time, in seconds.")] = 240.0,
    write: Annotated[
        Path | None, typer.Option(help=f"Put the best rows into this file; {VARIABLE}=file uses them.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--results", help="Merge the measurements into <device name>/tune.json in this folder.")
    ] = Path("benchmarks/results"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the rows of the tables of tiles, and their neighbours, on this GPU."""
    with sentences():
        device = pick_gpu()
        found = engine.slots(device, engine.cases(device, quick))
        if not found:
            raise ValueError(
                "tune must find a GPU back end that runs here, got none; run `python -m tilewise info` to see why"
            )
        chosen = [slot for slot in found if set(match or ()) <= slot.words]
        if not chosen:
            names = ", ".join(slot.title for slot in found)
            raise ValueError(f"--match must be words of a row's name, got {' '.join(match or ())}; choose from {names}")
        env = results.environment(device)
        file = results.file_of(folder, env["device"], "tune.json")
        tuned.load(file)  # refuse a file that cannot be merged before the measurement, not after it
        if write:
            tuned.load_rows(write)
    done: list[Tuned] = []
    for one in measure(chosen, device, seconds, engine.QUICK_ROUNDS if quick else engine.ROUNDS):
        one.environment = env
        done.append(one)
        tuned.merge(file, env["device"], [one])  # a run that is cut short leaves what it measured
    if json:
        print_json({"device": env["device"], "slots": [asdict(one) for one in done]})
    else:
        for one in done:
            print_slot(one)
    err.print(f"measurements are in {file}")
    if write:
        count = tuned.write_rows(write, card(device), done, env)
        err.print(f"{count} rows are in {write}; {VARIABLE}={write} uses them")


def pick_gpu() -> torch.device:
    """This machine's GPU, with an index, as tensors have it."""
    if not torch.cuda.is_available():
        raise ValueError("tune must run on a GPU, got a machine where PyTorch sees none; run it on the GPU to be tuned")
    return torch.device("cuda", torch.cuda.current_device())


def measure(chosen: list[engine.Slot], device: torch.device, seconds: float, rounds: int) -> Iterator[Tuned]:
    """Slot after slot, with a progress bar."""
    with progress("now") as bar:
        task = bar.add_task("tune", total=len(chosen), now="")
        for one in engine.tune(chosen, device, seconds, rounds, lambda text: bar.update(task, now=text)):
            bar.advance(task)
            if not err.is_terminal:
                err.print(
                    f"{int(bar.tasks[task].completed)}/{len(chosen)} {one.title}: {one.verdict()}", soft_wrap=True
                )
            yield one
        bar.update(task, now="")


def print_slot(one: Tuned) -> None:
    """Times of every candidate, fastest first, the verdict, and why the others have none."""
    head, lines = tuned.grid(one)
    title = f"{one.title}: {tuned.row_text(one.present.row)}"
    if lines:
        table(escape(title), head, [[escape(cell) for cell in line] for line in lines])
    else:
        out.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    for reason in tuned.reasons(one):
        out.print(f"[dim]not timed: {escape(reason)}[/]", soft_wrap=True)
    out.print(f"[bold]{escape(one.title)}[/]: {escape(one.verdict())}\n", soft_wrap=True)
