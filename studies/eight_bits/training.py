"""Train one GPT from the same weights with attention in fp32, in bf16 and in 8 bits."""

from collections.abc import Iterator
from itertools import islice
from statistics import fmean

from torch import Tensor

import tilewise as tw

from ..training.gpt import Attend
from ..training.trainer import Settings, attend_with, train_with

LAST = 10
"""Steps whose mean is the last loss."""
NAMES = ("fp32", "fp32, moved", "bf16", "int8", "fp8")
"""Moved: every weight begins one rounding away, which shows what chance does."""


def attention_in(name: str, settings: Settings) -> Attend:
    """Return causal attention of fp32 tensors: standard in fp32, or tilewise of what they are in bf16."""
    if name.startswith("fp32"):
        return attend_with("standard", settings)
    precision = None if name == "bf16" else name

    def attend(qkv: Tensor) -> Tensor:
        return tw.attention_qkvpacked(qkv.bfloat16(), mask=tw.Causal(), precision=precision).float()

    return attend


def trainings(settings: Settings) -> Iterator[tuple[str, list[float]]]:
    """Yield each name with the losses of its training, step by step."""
    for name in NAMES:
        lines = train_with(settings, attention_in(name, settings), moved=name.endswith("moved"))
        yield name, [line["loss"] for line in islice(lines, settings.steps)]  # its time and memory follow


def compared(found: list[tuple[str, list[float]]]) -> list[list[str]]:
    """Return a line of each training: its last loss, and how far it is from fp32, at the end and at most."""
    of_fp32 = found[0][1]
    lines = []
    for name, losses in found:
        most = max(abs(a - b) for a, b in zip(losses, of_fp32, strict=True))
        last = fmean(losses[-LAST:])
        lines.append([name, f"{last:.4f}", f"{last - fmean(of_fp32[-LAST:]):+.4f}", f"{most:.4f}"])
    return lines
