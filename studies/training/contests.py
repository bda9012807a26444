"""Contests: one GPT trained from the same weights with each attention; tables, sentences, a picture."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from ..bench.results import load, merge
from ..bench.tables import STANDARD, markdown
from ..pages.plots import COLOURS, STYLE
from .trainer import MOVED

PART = "training"
"""Of a results file."""
EARLY = 10
"""Steps in which two correct trainings cannot have drifted far apart yet."""
FP32_EPSILON = 2.0**-23
ABOUT_MOVED = (
    " *Moved*: every weight begins one rounding away, up or down by chance; how far that ends from the same training "
    "unmoved is what chance does to a last loss, whatever the attention."
)


@dataclass
class Trial:
    """One training: an attention and a seed. If it did not get to its end, `why` says what was in the way."""

    attention: str
    seed: int
    why: str | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    end: dict[str, float] = field(default_factory=dict)
    """attention_s, for a step; peak_bytes, above what was there before the first step; validation, a loss."""

    @property
    def step_s(self) -> float:
        """Return the median time of a step, in seconds."""
        return statistics.median(self.seconds)

    @property
    def share(self) -> float:
        """Return attention's fraction of a step."""
        return self.end["attention_s"] / self.step_s


@dataclass
class Contest:
    """All trainings."""

    settings: dict[str, Any]
    trials: list[Trial]

    def of(self, name: str) -> list[Trial]:
        """Return the finished trainings with an attention, one for each seed."""
        return [trial for trial in self.trials if trial.attention == name and not trial.why]

    @property
    def finished(self) -> list[str]:
        """Return every attention that trained."""
        return list(dict.fromkeys(trial.attention for trial in self.trials if not trial.why))

    def differences(self, name: str) -> list[list[float]]:
        """Return the losses minus those of standard attention with the same seed, step by step."""
        standard = {trial.seed: trial.losses for trial in self.of(STANDARD)}
        return [
            [abs(a - b) for a, b in zip(trial.losses, standard[trial.seed], strict=True)]
            for trial in self.of(name)
            if trial.seed in standard
        ]

    def origin(self) -> str:
        """Say what was trained, how, and what the columns mean."""
        s, seeds = self.settings, len({trial.seed for trial in self.trials})
        how = "; deterministic" if s["deterministic"] else ""
        text = s["tokens"] or "the bytes of the standard library"
        return (
            f"{s['layers']} layers, width {s['width']}, {s['steps']} steps of AdamW at {s['learning_rate']:g}, reading "
            f"{text}, {seeds} seed{'s' * (seeds > 1)}{how}; medians over steps, "
            "means over seeds. *Of it* is the time of attention alone at the model's shapes, forward and backward, for "
            "all layers, over the time of a step." + ABOUT_MOVED * any(name.endswith(MOVED) for name in self.finished)
        )

    def lines(self) -> list[list[str]]:
        """Return a line of COLUMNS for each attention that trained."""
        return [self._line(name) for name in self.finished]

    def by_seed(self) -> list[list[str]]:
        """Return a head, and for each attention its final difference from standard attention; none with one seed."""
        standard = {trial.seed: trial.losses[-1] for trial in self.of(STANDARD)}
        if len(standard) < 2:
            return []
        lines = [["last loss, less standard attention's", *(f"seed {seed}" for seed in standard)]]
        for name in self.finished:
            last = {trial.seed: trial.losses[-1] for trial in self.of(name)}
            cells = [f"{last[seed] - of:+.4f}" if seed in last else "-" for seed, of in standard.items()]
            lines += [] if name == STANDARD else [[name, *cells]]
        return lines

    def reasons(self) -> list[str]:
        """Return who did not train, and why."""
        return list(dict.fromkeys(f"{trial.attention}: {trial.why}" for trial in self.trials if trial.why))

    def _line(self, name: str) -> list[str]:
        trials = self.of(name)

        def mean(read: Callable[[Trial], float], trials: Sequence[Trial] = trials) -> float:
            return statistics.fmean(map(read, trials))

        standard = [trial.step_s for trial in self.of(STANDARD)]
        faster = f"{statistics.fmean(standard) / mean(lambda t: t.step_s):.2f}" if standard else "-"
        validated = "validation" in trials[0].end
        return [
            name,
            f"{mean(lambda t: t.losses[-1]):.4f}",
            f"{mean(lambda t: t.end['validation']):.4f}" if validated else "-",
            f"{1e3 * mean(lambda t: t.step_s):.1f}",
            f"{100 * mean(lambda t: t.share):.1f}",
            faster,
            f"{mean(lambda t: t.end['peak_bytes']) / 1e9:.2f}",
        ]

    def sentences(self) -> list[str]:
        """Say how far each attention's losses are from standard attention's, and how far seeds are from each other."""
        lines = []
        for name in self.finished:
            if name != STANDARD and (found := self.differences(name)):
                early, whole, end = max(max(s[:EARLY]) for s in found), max(map(max, found)), max(s[-1] for s in found)
                lines.append(
                    f"{name}: losses differ from standard attention's by at most {early:.1e} in the first {EARLY} "
                    f"steps, {whole:.1e} in all, {end:.1e} at the end."
                )
        last = [trial.losses[-1] for trial in self.of(STANDARD)]
        if len(last) > 1:
            lines.append(f"Seeds alone spread standard attention's last loss from {min(last):.4f} to {max(last):.4f}.")
        return lines


COLUMNS = ("attention", "last loss", "validated", "ms a step", "of it, %", "speedup", "peak GB")
"""`of it` is attention; the speedup is that of a step."""


def name_of(settings: dict[str, Any], model: str) -> str:
    """Return the name of a contest in a results file."""
    products = "" if settings["matmul"] == "highest" else f", products {settings['matmul']}"
    return f"{model}, {settings['batch']} x {settings['context']} tokens{products}"


def save(file: Path, model: str, found: Contest, env: dict[str, Any]) -> None:
    """Put a contest into a results file.

    Earlier trainings with other attentions or seeds, but the same settings and kernels, stay, so that a contest can be
    run in parts.
    """
    name, new = name_of(found.settings, model), {(trial.attention, trial.seed) for trial in found.trials}
    old = load(file).get(PART, {}).get(name)
    rows = old["rows"] if old and _comparable(old, found, env) else []
    trials = [Trial(**row) for row in rows if (row["attention"], row["seed"]) not in new]
    merge(file, name, [*trials, *found.trials], env, False, PART, {"settings": found.settings})


def _comparable(old: dict[str, Any], found: Contest, env: dict[str, Any]) -> bool:
    same = old["settings"] | {"seed": None} == found.settings | {"seed": None}
    return same and old["environment"]["kernels"] == env["kernels"]


def contests_of(content: dict[str, Any]) -> list[Contest]:
    """Return the contests of a loaded results file."""
    return [Contest(run["settings"], [Trial(**row) for row in run["rows"]]) for run in content.get(PART, {}).values()]


def section(content: dict[str, Any], stem: Path, origin: Callable[[dict[str, Any], bool], str]) -> list[str]:
    """Return one device's part of docs/results/fp32.md; draw its pictures as <stem>-<number>.png."""
    lines = []
    for number, ((name, run), found) in enumerate(zip(content[PART].items(), contests_of(content), strict=True)):
        path = stem.with_name(f"{stem.name}-{number}.png")
        lines += [f"### Training {name}\n", origin(run["environment"], run["partial"]) + "\n", found.origin() + "\n"]
        lines += [markdown(COLUMNS, found.lines())]
        if by_seed := found.by_seed():
            lines += ["", markdown(by_seed[0], by_seed[1:])]
        if found.finished:
            picture(found, path)
            lines += ["", f"![Losses, differences, time and memory](../images/{path.name})\n"]
        lines += [f"- {line}" for line in found.sentences()]
        lines += [*(f"- Not trained: {line}" for line in found.reasons()), ""]
    return lines


def picture(c: Contest, path: Path) -> None:
    """Draw losses overlaid, their differences from standard attention's, a step's time, attention's part, memory."""
    names = c.finished
    curves = [_all_losses, _all_differences] if STANDARD in names else [_all_losses]
    widths = (*(3.0 for _ in curves), 2.2, 2.2)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(widths), figsize=(1.45 * sum(widths), 3.6), width_ratios=widths, constrained_layout=True
        )
        *left, time, memory = axes
        for curve, panel in zip(curves, left, strict=True):
            curve(panel, c)
        rest = [1e3 * statistics.fmean(t.step_s - t.end["attention_s"] for t in c.of(name)) for name in names]
        inside = [1e3 * statistics.fmean(t.end["attention_s"] for t in c.of(name)) for name in names]
        _lying(time, names, rest, inside, "ms a step, attention coloured")
        peaks = [statistics.fmean(t.end["peak_bytes"] for t in c.of(name)) / 1e9 for name in names]
        _lying(memory, names, [0.0] * len(names), peaks, "peak memory, GB")
        memory.set_yticks([])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _all_losses(axes: Any, c: Contest) -> None:
    """Draw wide lines below narrow ones, so that overlapping curves are all visible."""
    for index, name in enumerate(c.finished):
        for trial in c.of(name):
            axes.plot(
                range(1, len(trial.losses) + 1), trial.losses, color=COLOURS.get(name, "#555555"),
                lw=1.2 + 1.1 * (len(c.finished) - index), label=name if trial is c.of(name)[0] else None,
            )  # fmt: skip
    axes.set_title("loss, nats a token")
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=8)


def _all_differences(axes: Any, c: Contest) -> None:
    for name in c.finished:
        for steps in c.differences(name) if name != STANDARD else ():
            shown = [max(step, FP32_EPSILON) for step in steps]
            axes.plot(range(1, len(steps) + 1), shown, color=COLOURS.get(name, "#555555"), lw=1.3)
    axes.axhline(FP32_EPSILON, color="#bbbbbb", lw=1, ls=":")
    axes.set_yscale("log")
    axes.set_ylim(bottom=FP32_EPSILON / 2)  # also where no step differs
    axes.set_title("distance from standard attention's loss")
    axes.set_xlabel("step")


def _lying(axes: Any, names: list[str], rest: list[float], coloured: list[float], title: str) -> None:
    """Draw horizontal bars, a grey part and a coloured one, the first name on top."""
    places = range(len(names))
    axes.barh(places, rest, color="#dfe3e8", height=0.62)
    bars = axes.barh(places, coloured, left=rest, color=[COLOURS.get(name, "#555555") for name in names], height=0.62)
    totals = [a + b for a, b in zip(rest, coloured, strict=True)]
    axes.bar_label(bars, [f"{t:.0f}" if max(totals) >= 100 else f"{t:.1f}" for t in totals], padding=3, color="#444444")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.margins(x=0.18)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
