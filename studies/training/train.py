"""python -m studies train: train one GPT from the same weights with several attentions.

The small one is trained twice, with standard attention and with tilewise, whose losses must be equal; GPT-2 124M with
every precision of fp32 and with PyTorch's kernel (see contest).
"""

import json as json_lib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilewise as tw

from ..bench.results import environment
from ..console import err, out, print_json, progress, sentences, table
from ..options import pick_device, results_file
from .comparison import NAMES, Comparison
from .contest import CONTENDERS, contest, known, log_loss
from .contest import show as show_contest
from .contests import picture, save
from .trainer import MATMUL, Settings, TrainingError, text_of, train_apart

MODELS = {"small": Settings.fitting, "gpt2-124m": Settings.gpt2}


def train(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.")] = "small",
    steps: Annotated[int | None, typer.Option(help="Steps of each training.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    width: Annotated[int | None, typer.Option(help="Model width: heads times head size.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="AdamW's.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches, in all trainings.")] = 0,
    precision: Annotated[str, typer.Option(help="Of weights and activations: fp32.")] = "fp32",
    tokens: Annotated[
        str | None, typer.Option(help="What to read, in llm.c's format; the standard library's bytes if left out.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Another such file, whose loss is measured at the end.")
    ] = None,
    matmul: Annotated[str | None, typer.Option(help=f"Torch's products of fp32: {', '.join(MATMUL)}.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Ask for repeatable kernels.")] = False,
    attention: Annotated[
        list[str] | None, typer.Option(help=f"gpt2-124m: only these of {', '.join(CONTENDERS)}.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="gpt2-124m: trainings with each attention.", min=1)] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what came out here; - prints it.")] = None,
    results_folder: Annotated[
        Path | None, typer.Option("--results", help="gpt2-124m: merge into <device name>/bench.json in this folder.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw losses, time and memory into this PNG.")] = None,
) -> None:
    """Train a GPT from one beginning with several attentions, and compare losses, time and memory."""
    given = {
        "steps": steps, "context": context, "batch": batch, "layers": layers, "heads": heads, "width": width,
        "learning_rate": learning_rate, "seed": seed, "tokens": tokens, "validation": validation, "matmul": matmul,
        "deterministic": deterministic,
    }  # fmt: skip
    with sentences():
        if model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
        if precision != "fp32":
            raise ValueError(f"precision must be fp32, got {precision!r}")
        settings = MODELS[model](pick_device(device))
        settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
        text_of(settings, settings.tokens)
        if settings.validation:
            text_of(settings, settings.validation, rows=1)
        if model == "small" and (attention or seeds > 1 or results_folder):
            raise ValueError("attention, seeds and results are for --model gpt2-124m; small compares two attentions")
        chosen = known(attention or CONTENDERS)
        file = results_file(results_folder, torch.device(settings.device))
        if json_file:
            json_file.parent.mkdir(parents=True, exist_ok=True)  # checked before, not after, the training
    if model == "small":
        _train_small(settings, json_file, plot)
    else:
        _train_gpt2(settings, chosen, seeds, json_file, file, plot)


def _train_small(settings: Settings, json_file: Path | None, plot: Path | None) -> None:
    comparison = compare(settings)
    if not write_json(comparison.summary(), json_file):
        show(comparison)
    if plot:
        from .pictures import training

        training(comparison, plot)
        err.print(f"picture: {plot}")
    if not comparison.equal:
        raise typer.Exit(1)


def _train_gpt2(
    settings: Settings,
    names: Sequence[str],
    seeds: int,
    json_file: Path | None,
    file: Path | None,
    plot: Path | None,
) -> None:
    env = environment(torch.device(settings.device))
    found = contest(
        settings, names, range(settings.seed, settings.seed + seeds),
        lambda found: save(file, "GPT-2 124M", found, env) if file else None,
    )  # fmt: skip
    if not write_json(asdict(found) | {"environment": env}, json_file):
        show_contest(found)
    if file:
        err.print(f"the trainings are in {file}")
    if not found.finished:
        raise typer.Exit(1)
    if plot:
        picture(found, plot)
        err.print(f"picture: {plot}")


def write_json(content: dict[str, Any], file: Path | None) -> bool:
    """Write the content; tell whether it went to standard output instead of tables."""
    if str(file) == "-":
        print_json(content)
        return True
    if file:
        file.write_text(json_lib.dumps(content, indent=1) + "\n")
    return False


def compare(settings: Settings) -> Comparison:
    """Run both trainings, one after the other, with live progress."""
    losses: dict[str, list[float]] = {name: [] for name in NAMES}
    ends: dict[str, dict[str, float]] = {}
    with progress("now") as bar:
        for name in NAMES:
            task = bar.add_task(f"{name:<8}", total=settings.steps, now="starting")
            try:
                for line in train_apart(settings, name):
                    if "loss" in line:
                        losses[name].append(line["loss"])
                        bar.update(task, advance=1, now=f"loss {line['loss']:.3f}")
                        log_loss(name, settings.steps, losses[name])
                    else:
                        ends[name] = line
            except TrainingError as failure:
                err.print(f"The training with {name} attention failed: {failure}", markup=False)
                raise typer.Exit(1) from None
            bar.update(task, now=f"loss {losses[name][-1]:.3f}, {ends[name]['time_s']:.1f} s")
    return Comparison(
        settings,
        plan(settings).backend or "none",
        losses,
        {name: ends[name]["time_s"] for name in NAMES},
        {name: int(ends[name]["peak_bytes"]) for name in NAMES},
    )


def plan(settings: Settings) -> tw.Explanation:
    """Explain what tilewise runs for this model."""
    shape = settings.batch, settings.context, settings.heads, settings.width // settings.heads
    q = torch.empty(shape, device=settings.device)
    return tw.explain(q, q, q, mask=tw.Causal())


def show(c: Comparison) -> None:
    """Print the comparison as a table and a sentence."""
    lines = [
        (name, f"{c.losses[name][0]:.4f}", f"{c.losses[name][-1]:.4f}", f"{c.time_s[name]:.1f}",
         f"{c.peak_bytes[name] / 1e6:.0f}") for name in NAMES
    ]  # fmt: skip
    table("Training", ("attention", "first loss", "last loss", "seconds", "peak MB"), lines)
    out.print(c.verdict(), style=None if c.equal else "red", soft_wrap=True)
