"""Measures suites, shows tables, keeps results."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import Progress

from ..console import err, out, print_json, progress, sentences, table
from ..options import pick_device
from . import models, results
from .engine import run
from .peers import PEERS
from .results import Row
from .steps import MODELS
from .suites import SUITES, Suite
from .tables import COST, METRICS, grids, headlines, in_its_unit, is_ours, prices, reasons, slowdown, worth

SHOWN = {"cuda": ("memory", "host"), "cpu": ("memory",)}
"""Tables after those of the suite."""
OF_MODELS = "models"
"""Names what is no list of calls: training steps, measured by a module of their own."""


def bench(
    suite: Annotated[
        list[str] | None, typer.Option(help=f"One or more of: {', '.join(SUITES)}; or {OF_MODELS}.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and rounds.")] = False,
    match: Annotated[list[str] | None, typer.Option(help="Only cases with this in their name: causal, D128.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(PEERS)}.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Begin no case of a suite after this time, in seconds.")] = None,
    show: Annotated[list[str] | None, typer.Option(help=f"Tables to print: {', '.join(METRICS)}.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Merge the rows into this file; - prints them instead of tables.")
    ] = None,
    results_folder: Annotated[
        Path | None, typer.Option("--results", help="Merge the rows into <device name>/bench.json in this folder.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep that file's cases of these kernels.")] = False,
) -> None:
    """Measure tilewise and its peers."""
    if OF_MODELS in (suite or ()):
        with sentences():
            refused = {"--peer": peer, "--seconds": seconds, "--show": show, "--json": json_file}
            command = of_models(suite or [], match or [], [name for name, given in refused.items() if given])
            command += ["--device", pick_device(device).type] + ["--quick"] * quick
        raise typer.Exit(models.main([*command, *(["--results", str(results_folder)] if results_folder else [])]))
    with sentences():
        where = pick_device(device)
        suites = suites_for(suite or ["classic" if where.type == "cuda" else "cpu"], where)
        suites = [part(whole.quick() if quick else whole, match or [], peer or []) for whole in suites]
        partial = bool(quick or match or peer)
        asked = _metrics(show or [])
        env = results.environment(where)
        files = [json_file] if json_file and str(json_file) != "-" else []
        files += [results.file_of(results_folder, env["device"])] if results_folder else []
        if resume and len(files) != 1:
            raise ValueError(
                f"--resume must have one file, got {len(files)}; name it with --json FILE or --results FOLDER"
            )
        for file in files:
            results.load(file)  # refuse a file that cannot be merged before the measurement, not after it
    printed: dict[str, Any] = {"device": env["device"], "suites": {}}
    for chosen in suites:
        env = results.environment(where)
        before = results.comparable(files[0], chosen, env) if resume else []
        rows = measure(chosen, where, seconds, partial_keeper(files, chosen.name, env), before)
        printed["suites"][chosen.name] = {"environment": env, "partial": partial, "rows": [asdict(row) for row in rows]}
        if str(json_file) != "-":
            print_suite(chosen, rows, asked or [*chosen.tables, *SHOWN[where.type]], env["device"])
        with sentences():
            for file in files:
                results.merge(file, chosen.name, rows, env, partial)
                err.print(f"rows of {chosen.name} are in {file}")
    if str(json_file) == "-":
        print_json(printed)


def of_models(suite: list[str], words: list[str], refused: list[str]) -> list[str]:
    """Return arguments that name the models with these words; such a file is always resumed."""
    if len(suite) > 1 or refused:
        got = ", ".join(suite[1:] + refused)
        raise ValueError(
            f"--suite {OF_MODELS} must be alone, with --match, --results and --quick, got {got}; leave it out"
        )
    names = [name for name in MODELS if set(words) <= set(name.replace(",", "").split())]
    if not names:
        raise ValueError(f"--match must be words of a model, got {' '.join(words)}; choose from {'; '.join(MODELS)}")
    return [part for name in names for part in ("--model", name)]


def partial_keeper(files: list[Path], suite: str, env: dict[str, Any]) -> Callable[[list[Row]], None]:
    """Saves the rows so far, so that a run that is cut short leaves what it measured."""

    def keep(rows: list[Row]) -> None:
        for file in files:
            results.merge(file, suite, rows, env, partial=True)

    return keep


def measure(
    suite: Suite,
    device: torch.device,
    seconds: float | None,
    keep: Callable[[list[Row]], None] = lambda rows: None,
    before: Sequence[Row] = (),
) -> list[Row]:
    """All rows of a suite, with a progress bar; `keep` sees them grow. Cases with rows `before` are not measured."""
    rows = list(before)
    left = replace(suite, cases=tuple(case for case in suite.cases if case not in {row.of for row in before}))
    with progress("now") as bar:
        task = bar.add_task(suite.name, total=len(left.cases), now="")
        for case_rows in run(left, device, seconds, lambda text: _tell(bar, task, text)):
            rows += case_rows
            keep(rows)
            bar.advance(task)
            if not err.is_terminal:
                err.print(f"{suite.name} {int(bar.tasks[task].completed)}/{len(left.cases)} {rows[-1].of}")
        bar.update(task, now="")
    return rows


def _tell(bar: Progress, task: Any, text: str) -> None:
    bar.update(task, now=text)


def print_suite(suite: Suite, rows: list[Row], metrics: list[str], device: str) -> None:
    """The tables asked for, then what they say, then what is missing and why."""
    out.rule(f"[bold]{suite.name}[/]: {escape(suite.title)}, on {escape(device)}", align="left")
    chosen = [in_its_unit(METRICS[name], rows) for name in metrics]
    shown = [(slowdown(rows), worth(rows)), (COST, prices(rows))]
    shown += [(metric, grids(rows, metric)) for metric in chosen]
    for metric, found in shown:
        for grid in found:
            lines = [[f"[bold]{peer}[/]" if is_ours(peer) else peer, *cells] for peer, cells in grid.lines.items()]
            table(f"{metric.title}: {grid.title}", ["", *grid.columns], lines)
    for line in headlines(suite.name, rows):
        out.print(escape(line), soft_wrap=True)
    for line in reasons(rows):
        out.print(f"[dim]not measured: {escape(line)}[/]", soft_wrap=True)


def suites_for(names: list[str], device: torch.device) -> list[Suite]:
    for name in names:
        if name not in SUITES:
            raise ValueError(f"--suite must name a suite, got {name!r}; choose from {', '.join(SUITES)}")
        if device.type not in SUITES[name].devices:
            remedy = "run it where there is a GPU" if device.type == "cpu" else "pass --device cpu"
            allowed = " or ".join(SUITES[name].devices)
            raise ValueError(f"the device of suite {name} must be {allowed}, got {device.type}; {remedy}")
    return [SUITES[name] for name in dict.fromkeys(names)]


def part(suite: Suite, words: list[str], peers: list[str]) -> Suite:
    """The cases that have every word in their name, among these peers."""
    for name in peers:
        if name not in PEERS:
            raise ValueError(f"--peer must name a peer, got {name!r}; choose from {', '.join(PEERS)}")
    cases = tuple(case for case in suite.cases if set(words) <= set(str(case).split()))
    if not cases:
        raise ValueError(
            f"--match must be words of a case of {suite.name}, got {' '.join(words)}; choose from a name such as "
            f"{suite.cases[0]}"
        )
    return replace(suite, cases=cases, peers=tuple(peers) or suite.peers, beside=() if peers else suite.beside)


def _metrics(names: list[str]) -> list[str]:
    for name in names:
        if name not in METRICS:
            raise ValueError(f"--show must name a table, got {name!r}; choose from {', '.join(METRICS)}")
    return names
