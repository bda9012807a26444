"""Run a contest: train one GPT with each attention from the same weights, each in a separate process."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from ..bench.peers import PEERS
from ..console import err, out, progress, table
from .contests import COLUMNS, Contest, Trial
from .trainer import MOVED, Settings, TrainingError, train_apart

CONTENDERS = (
    "standard", f"standard{MOVED}", "sdpa efficient",
    "tilewise ieee", "tilewise bf16x6", "tilewise fp16x3", "tilewise tf32",
)  # fmt: skip


def log_loss(name: str, steps: int, losses: Sequence[float]) -> None:
    """Print a line every tenth of the way in a pipe, where no bar can move."""
    if not err.is_terminal and len(losses) % max(1, steps // 10) == 0:
        err.print(f"{name} step {len(losses)}/{steps} loss {losses[-1]:.4f}")


def known(names: Sequence[str]) -> list[str]:
    """Return the names. Raise ValueError unless all are contenders."""
    for name in names:
        if name not in CONTENDERS:
            raise ValueError(f"there is no attention {name!r}; choose from {', '.join(CONTENDERS)}")
    return list(dict.fromkeys(names))


def contest(
    settings: Settings, names: Sequence[str], seeds: Sequence[int], keep: Callable[[Contest], None] = lambda found: None
) -> Contest:
    """Train with every attention and seed in order, with live progress; call `keep` with the trials so far."""
    files = {name: Path(file).name for name in ("tokens", "validation") if (file := getattr(settings, name))}
    found = Contest(asdict(settings) | files, [])
    with progress("now") as bar:
        for seed in seeds:
            for name in names:
                task = bar.add_task(f"{name:<15} seed {seed}", total=settings.steps, now="starting")
                found.trials.append(_train(replace(settings, seed=seed), name, partial(bar.update, task)))
                keep(found)
    return found


def _train(settings: Settings, name: str, update: Callable[..., None]) -> Trial:
    trial = Trial(name, settings.seed)
    trial.why = PEERS[name.removesuffix(MOVED)].why_not(settings.case, torch.device(settings.device))
    try:
        for line in () if trial.why else train_apart(settings, name, alone=True):
            if "loss" not in line:
                trial.end = line
                continue
            trial.losses.append(line["loss"])
            trial.seconds.append(line["seconds"])
            update(advance=1, now=f"loss {line['loss']:.3f}")
            log_loss(name, settings.steps, trial.losses)
    except TrainingError as failure:
        trial.why, *_ = str(failure).split(". ")  # then follows how full the GPU was
    update(now=trial.why or f"loss {trial.losses[-1]:.3f}, {1e3 * trial.step_s:.0f} ms a step")
    return trial


def show(found: Contest) -> None:
    """Print a table, what the losses say, and who did not train."""
    table("Training: medians over steps, means over seeds", COLUMNS, found.lines())
    if by_seed := found.by_seed():
        head, *rest = by_seed
        table("Ends", head, rest)
    for line in found.sentences():
        out.print(line, markup=False, soft_wrap=True)
    for line in found.reasons():
        out.print(f"not trained: {line}", style="dim", markup=False, soft_wrap=True)
