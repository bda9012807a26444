"""Write the tables of docs/results/fp32.md that no results file holds."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..bench.tables import markdown
from ..training.contests import PART

SUITE = "llmc"
"""Its tables are on this page."""
RATES = {"FMA": 67.0, "TF32": 494.7, "fp16, bf16": 989.4}
"""TFLOP/s of an H200's units without sparsity, from NVIDIA's data sheet."""


class Way(NamedTuple):
    """How a precision multiplies two fp32 numbers."""

    name: str
    unit: str
    type: str
    bits: int
    """Significant ones of a piece."""
    pieces: int

    @property
    def products(self) -> int:
        """Return the products of pieces i and j, counted from 1, with i + j <= pieces + 1."""
        return self.pieces * (self.pieces + 1) // 2

    @property
    def cells(self) -> list[str]:
        """Return a line of the page's table."""
        n, bits = self.pieces, self.bits * self.pieces
        left_out = f"2^-{bits}" if n > 1 else "nothing"
        kept = f"{n} {self.type}" if n > 1 else self.type
        return [
            f"`{self.name}`", self.unit, kept, str(min(bits, 24)), str(self.products), left_out,
            f"{RATES[self.unit] / self.products:.0f}",
        ]  # fmt: skip


WAYS = (
    Way("ieee", "FMA", "fp32", 24, 1),
    Way("bf16x6", "fp16, bf16", "bf16", 8, 3),
    Way("tf32x3", "TF32", "tf32", 11, 2),
    Way("fp16x3", "fp16, bf16", "fp16", 11, 2),
    Way("bf16x3", "fp16, bf16", "bf16", 8, 2),
    Way("tf32", "TF32", "tf32", 11, 1),
)
COLUMNS = ["name", "unit", "a number is", "its bits", "products", "left out", "at most, TFLOP/s"]

WAYS_TABLE = markdown(COLUMNS, [way.cells for way in WAYS])


def absent(contents: Iterable[dict[str, Any]]) -> list[str]:
    """Say what no results file holds, in a sentence each."""
    contents, lines = list(contents), []
    if not any(SUITE in content["suites"] for content in contents):
        lines.append("No results file holds times of attention alone yet.\n")
    if not any(PART in content for content in contents):
        lines.append("No results file holds a training yet.\n")
    return lines
