"""python -m studies demo: the environment, two trainings, a benchmark, and one page about all of it."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilewise.cli.info import info

from ..bench.command import measure, print_suite
from ..bench.results import Row, environment
from ..bench.suites import SUITES, Suite
from ..bench.tables import headlines
from ..console import err, out, sentences
from ..options import pick_device
from ..pages.plots import draw
from ..training.comparison import Comparison
from ..training.pictures import training
from ..training.train import compare, plan, show
from ..training.trainer import Settings
from .page import write_page

BENCH_SECONDS = 60.0


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where the page, the pictures and summary.json go.")] = Path(
        "out"
    ),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each training.", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="Begin no case after this time, in seconds.")] = BENCH_SECONDS,
) -> None:
    """Show what tilewise does on this machine, and leave a page about it."""
    begin = time.monotonic()
    with sentences():
        where = pick_device(device)
    folder.mkdir(parents=True, exist_ok=True)
    out.rule("[bold]1. This machine[/]", align="left")
    out.print(info(json=False), markup=False, soft_wrap=True)
    settings = Settings.fitting(where)
    if steps:
        settings = replace(settings, steps=steps)
    chosen = plan(settings)
    out.print(f"The training below runs on [bold]{chosen.backend}[/]: {chosen.tiles}.\n", soft_wrap=True)

    out.rule("[bold]2. One GPT, trained twice from one seed[/]", align="left")
    comparison = compare(settings)
    show(comparison)
    training(comparison, folder / "training.png")

    out.rule("[bold]3. Benchmark[/]", align="left")
    suite = SUITES["classic" if where.type == "cuda" else "cpu"].quick()
    rows = measure(suite, where, seconds)
    env = environment(where)
    print_suite(suite, rows, [*suite.tables, "memory"], env["device"])
    _leave(folder, comparison, suite, rows, env)
    err.print(f"\n{time.monotonic() - begin:.0f} seconds. The page: {folder / 'index.html'}", markup=False)
    if not comparison.equal:
        raise typer.Exit(1)


def _leave(folder: Path, comparison: Comparison, suite: Suite, rows: list[Row], env: dict[str, Any]) -> None:
    """Write the files into the folder."""
    pictures = draw(suite.name, rows, folder / suite.name)
    sentences_found = headlines(suite.name, rows)
    summary = comparison.summary() | {
        "environment": env,
        "torch_threads": torch.get_num_threads(),
        "benchmark": {"suite": suite.name, "headlines": sentences_found, "rows": [asdict(row) for row in rows]},
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_page(folder / "index.html", comparison, (suite, sentences_found, pictures), folder / "training.png", env)
