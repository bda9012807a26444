"""tilewise train: one small GPT, trained twice from one seed, with standard attention and with tilewise."""

import json as json_lib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilewise as tw

from .console import err, out, pick_device, print_json, progress, sentences, table
from .trainer import Settings

NAMES = ("standard", "tilewise")
TOLERANCE = 0.01
"""Nats a byte. Two correct fp32 trainings differ by rounding, which grows with the steps; see `Comparison.equal`."""
EARLY_STEPS, EARLY_TOLERANCE = 10, 1e-4


@dataclass
class Comparison:
    """Both trainings, step by step (losses in nats a byte)."""

    settings: Settings
    backend: str
    losses: dict[str, list[float]]
    time_s: dict[str, float]
    peak_bytes: dict[str, int]
    """Above what was there before the first step."""

    @property
    def differences(self) -> list[float]:
        """Of the losses, step by step."""
        return [abs(a - b) for a, b in zip(*(self.losses[name] for name in NAMES), strict=True)]

    @property
    def equal(self) -> bool:
        """Equal but for rounding: nearly the same digits in the first steps, within 0.01 to the end."""
        return max(self.differences[:EARLY_STEPS]) <= EARLY_TOLERANCE and max(self.differences) <= TOLERANCE

    def summary(self) -> dict[str, Any]:
        """For another program."""
        return {
            "backend": self.backend,
            "losses_standard": self.losses["standard"],
            "losses_tilewise": self.losses["tilewise"],
            "time_s": self.time_s,
            "peak_bytes": self.peak_bytes,
            "losses_equal": self.equal,
            "largest_difference": max(self.differences),
            "settings": asdict(self.settings),
        }

    def verdict(self) -> str:
        """What the losses say, in a sentence."""
        early, whole = max(self.differences[:EARLY_STEPS]), max(self.differences)
        text = (
            f"largest difference {early:.1e} in the first {EARLY_STEPS} steps, {whole:.1e} in all "
            f"{len(self.differences)}, at a loss of {self.losses['tilewise'][-1]:.3f}"
        )
        return f"The losses are equal but for rounding: {text}." if self.equal else f"The losses DIFFER: {text}."


def train(
    steps: Annotated[int | None, typer.Option(help="Steps of each training.")] = None,
    context: Annotated[int | None, typer.Option(help="Bytes a sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    width: Annotated[int | None, typer.Option(help="Model width: heads times head size.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="AdamW's, after ten steps of warm-up.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches, in both trainings.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the comparison here; - prints it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw losses, time and memory into this PNG.")] = None,
) -> None:
    """Train a small GPT twice from one seed, and compare losses, time and memory."""
    given = {
        "steps": steps, "context": context, "batch": batch, "layers": layers, "heads": heads, "width": width,
        "learning_rate": learning_rate, "seed": seed,
    }  # fmt: skip
    with sentences():
        settings = Settings.fitting(pick_device(device))
        settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    comparison = compare(settings)
    if str(json_file) == "-":
        print_json(comparison.summary())
    else:
        show(comparison)
        if json_file:
            json_file.write_text(json_lib.dumps(comparison.summary(), indent=1) + "\n")
    if plot:
        from .pictures import training

        training(comparison, plot)
        err.print(f"picture: {plot}")
    if not comparison.equal:
        raise typer.Exit(1)


def compare(settings: Settings) -> Comparison:
    """Runs both trainings, one after the other, with live progress."""
    losses: dict[str, list[float]] = {name: [] for name in NAMES}
    ends: dict[str, dict[str, float]] = {}
    with progress("now") as bar:
        for name in NAMES:
            task = bar.add_task(f"{name:<8}", total=settings.steps, now="starting")
            for line in _lines(settings, name):
                if "loss" in line:
                    losses[name].append(line["loss"])
                    bar.update(task, advance=1, now=f"loss {line['loss']:.3f}")
                    _log(name, settings.steps, losses[name])
                else:
                    ends[name] = line
            bar.update(task, now=f"loss {losses[name][-1]:.3f}, {ends[name]['time_s']:.1f} s")
    return Comparison(
        settings,
        plan(settings).backend or "none",
        losses,
        {name: ends[name]["time_s"] for name in NAMES},
        {name: int(ends[name]["peak_bytes"]) for name in NAMES},
    )


def _log(name: str, steps: int, losses: list[float]) -> None:
    """Where no bar can move, in a pipe: a line every tenth of the way."""
    if not err.is_terminal and len(losses) % max(1, steps // 10) == 0:
        err.print(f"{name} step {len(losses)}/{steps} loss {losses[-1]:.4f}")


def plan(settings: Settings) -> tw.Explanation:
    """What tilewise runs for this model."""
    shape = settings.batch, settings.context, settings.heads, settings.width // settings.heads
    q = torch.empty(shape, device=settings.device)
    return tw.explain(q, q, q, mask=tw.Causal())


def show(c: Comparison) -> None:
    """The comparison as a table and a sentence."""
    lines = [
        (name, f"{c.losses[name][0]:.4f}", f"{c.losses[name][-1]:.4f}", f"{c.time_s[name]:.1f}",
         f"{c.peak_bytes[name] / 1e6:.0f}") for name in NAMES
    ]  # fmt: skip
    table("Training", ("attention", "first loss", "last loss", "seconds", "peak MB"), lines)
    out.print(c.verdict(), style=None if c.equal else "red", soft_wrap=True)


def _lines(settings: Settings, attention: str) -> Iterator[dict[str, float]]:
    """What a training process prints, as it prints it."""
    request = json_lib.dumps({"settings": asdict(settings), "attention": attention})
    command: Sequence[str] = [sys.executable, "-m", f"{__package__}.trainer", request]
    with tempfile.TemporaryFile("w+") as complaints:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json_lib.loads(line)
        if process.returncode:
            complaints.seek(0)
            last = complaints.read().strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
            err.print(f"The training with {attention} attention failed: {last[0]}", markup=False)
            raise typer.Exit(1)
