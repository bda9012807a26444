"""Score functions: changes to the scaled logits (soft cap, ALiBi, bias), applied left to right, before the mask.

A score is its `rule`, a plain function of the logit s and its indices. `apply` maps input logits S to output logits,
and `pull` maps the gradient of the output back to the input, and adds to those of captured tensors. Kernels take the
same from the rule (host/emit.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..program import Entries, apply, pull
from .function import Ruled, as_value, read
from .value import AS_WIDE, At, check_ranks, check_strided, constant


class Score(Ruled):
    """Every score derives from this class, and `Score.of` makes one of a function."""

    what = "score"
    align = "first"
    positional: ClassVar[bool] = False
    """Whether it depends on where rows and keys are."""

    def apply(self, S: Tensor, at: Entries) -> Tensor:
        """Return the output logits for S (B, H, rows, columns)."""
        program, tensors, numbers, _ = self.traced
        return apply(program, S, self.rows(at), tensors, numbers)

    def pull(self, dS: Tensor, S: Tensor, at: Entries, sums: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient of the input logits S, from that of the output logits.

        sums: of each captured tensor its whole gradient, to which that of these entries is added, or None.
        """
        program, tensors, numbers, _ = self.traced
        wanted = {n: total for n, total in enumerate(sums) if total is not None}
        return pull(program, dS, S, self.rows(at), wanted, tensors, numbers)


@dataclass(frozen=True, eq=False)
class SoftCap(Score):
    """Cap logits softly to the range -cap to cap: cap * tanh(S / cap) (Gemma 2).

    cap is a number > 0, at most 2^126. Raises TypeError or ValueError for anything else.
    """

    cap: float

    @staticmethod
    def rule(s, b, h, i, j, cap):
        return cap * torch.tanh(s / cap)

    def pull(self, dS: Tensor, S: Tensor, at: Entries, sums: Sequence[Tensor | None]) -> Tensor:
        return dS * (1.0 - torch.tanh(S / self.cap) ** 2)  # a program's dS * cap would overflow before it is divided

    def __post_init__(self) -> None:
        if isinstance(self.cap, bool) or not isinstance(self.cap, (int, float)):
            raise TypeError(f"SoftCap: cap must be a number > 0, got {self.cap!r}; convert it with float(...)")
        cap = constant(float(self.cap))
        if not 0 < cap <= 2.0**126:
            raise ValueError(
                f"SoftCap: cap must be finite, > 0 and at most 2^126, got {cap}; leave the score out for no cap"
            )
        object.__setattr__(self, "cap", cap)

    @classmethod
    def limit(cls, numbers: tuple[Any, ...]) -> float | None:
        return numbers[0]


@dataclass(frozen=True, eq=False)
class Alibi(Score):
    """Subtract a linear penalty on distance: S - slope * abs(i + N - M - j) (Press et al. 2021).

    slopes: (H,) or (B, H), any floating type; differentiable on the CPU. Raises TypeError or ValueError for anything
    else.
    """

    slopes: Tensor
    captures = ("slopes",)
    shapes = ("BH",)
    unbatched = True
    learns = True
    align = "last"
    positional = True

    @staticmethod
    def rule(s, b, h, i, j, slopes):
        return s - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(i - j)

    def __post_init__(self) -> None:
        _check_floating("Alibi: slopes", self.slopes)
        check_ranks("Alibi: slopes", self.slopes, (1, 2), "have shape (H,) or (B, H)", "give each head one")

    def placed(self, place: Any, M: int, N: int) -> Score:
        offset = constant(place.row - place.column - (N - M))
        return AlibiAt.rebuild((offset,), self.tensors) if offset else self


@dataclass(frozen=True, eq=False)
class AlibiAt(At, Alibi):
    """Subtract what Alibi does, at a place."""

    offset: int


@dataclass(frozen=True, eq=False)
class Bias(Score):
    """Add a bias to the logits: S + bias; differentiable.

    bias: any floating type, broadcast to (B, H, M, N). Raises TypeError or ValueError for other types or more
    dimensions.
    """

    bias: Tensor
    captures = ("bias",)
    shapes = ("BHMN",)
    broadcasts = True
    positional = True
    varlen = False
    not_cached = AS_WIDE
    learns = True
    unbounded = True

    @staticmethod
    def rule(s, b, h, i, j, bias):
        return s + read(bias, b, h, i, j)

    def __post_init__(self) -> None:
        _check_floating("Bias: bias", self.bias)
        check_ranks(
            "Bias: bias", self.bias, range(5), "broadcast to (B, H, M, N)", "reshape it to 4 dimensions or fewer"
        )


def _check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a floating tensor, got {type(tensor).__name__}; convert it with torch.as_tensor(...)"
        )
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating tensor, got {tensor.dtype}; convert it with .to(...)")
    check_strided(name, tensor)


def score_of(given: Any) -> Score | None:
    """Return a score, or that of a plain function; None for anything else."""
    return as_value(given, Score, Score.of)
