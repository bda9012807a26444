"""The experiment's one option: the type of the sums, and what keeps them in range."""

import math
from dataclasses import dataclass

import torch

from tilewise.values.value import number_in

LARGEST = torch.finfo(torch.float16).max
"""65504, the largest number of fp16."""
EXP2_ERROR = {"fp32": 0.0, "halves": 2.0**-9.9}
"""By how much of itself exp2 may exceed a power of two, after rounding to fp16."""
CHOICES = {
    "scores": ("fp32", "fp16"),
    "values": ("fp32", "fp16"),
    "division": ("delayed", "in-loop"),
    "exp2": ("fp32", "halves"),
}


@dataclass(frozen=True)
class Accumulate:
    """What sums are kept in, and what keeps them in range."""

    scores: str = "fp32"
    """Q K^T: "fp32" or "fp16"."""
    values: str = "fp32"
    """P V: "fp32" or "fp16"."""
    division: str = "delayed"
    """"delayed": once, at the end. "in-loop": O is divided by the row sum so far at every tile."""
    stability: bool | float = False
    """Lowers every exponent by about log(2 N), so that sums of P V stay finite: True for every finite V; a number for
    every V whose entries are at most so large, which lowers less. Only for delayed division."""
    exp2: str = "fp32"
    """"halves": exponentials of two fp16 numbers at a time."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Accumulate: {name} must be {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}"
                )
        if not isinstance(self.stability, bool):
            number_in("Accumulate: stability", self.stability, "True, False, or the largest |v|, >= 0", 0.0, math.inf)
        if self.stability is not False and self.division == "in-loop":
            raise ValueError(
                "Accumulate: stability is for division='delayed', because dividing in the loop cancels it; "
                "leave one of them out"
            )

    def lower(self, N: int) -> int:
        """Return by how many powers of two the exponents of N keys are lowered: the least s with 2 N 2^-s max|V| <=
        65504."""
        if self.stability is False:
            return 0
        largest = LARGEST if self.stability is True else min(float(self.stability), LARGEST)
        need = 2.0 * N * (1.0 + EXP2_ERROR[self.exp2]) * largest / LARGEST
        return max(0, math.ceil(math.log2(need))) if need > 0.0 else 0

    def __str__(self) -> str:
        words = [f"QK {self.scores}", f"PV {self.values}", self.division]
        if self.stability is not False:
            words.append("log factor" if self.stability is True else f"log factor, V up to {self.stability:g}")
        return ", ".join([*words, *(["exp2 in halves"] if self.exp2 == "halves" else [])])
