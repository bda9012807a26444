"""Score functions: changes to the scaled logits (soft cap, ALiBi, bias), applied left to right, before the mask.

A score is its `rule`, a plain function of the logit s and its indices. `apply` maps input logits S to output logits,
and `pull` maps the gradient of the output back to the input, and adds to those of captured tensors. Kernels take the
same from the rule (host/emit.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..program import Entries, apply, pull
from .function import DECORATE, MADE, Function, Ruled, as_value, read
from .value import AS_WIDE, At, check_strided, constant


class Score(Ruled):
    """Every score derives from this class, and `Score.of` makes one of a function."""

    what = "score"
    align = "first"
    positional: ClassVar[bool] = False
    """Whether it depends on where rows and keys are."""

    @staticmethod
    def of(fn: Callable[..., Any] = DECORATE, *captured: Any, align: str = "first") -> Any:
        """Make a score of a function fn(s, b, h, i, j, *captured) that returns the new logit.

        The function is traced at once, by one call with symbolic numbers. It may use Python's operators, the functions
        of torch in tilewise.program.FUNCTIONS, and captured tensors, of which it indexes every dimension. Python's
        `if`, `and`, `or` and `not` are refused: write torch.where, &, | and ~. Also a decorator: `@tw.Score.of`, or
        `@tw.Score.of(align="last")`. A plain function as `score=` is traced in each call.

        Args:
            fn: a function of the logit s, after the scale and earlier scores, in fp32 (of fp64 inputs in fp64); the
                batch entry b (with a layout, the sequence), the query head h, the row i and the key j.
            captured: tensors, bool, whole or floating, of any shape on q's device, and numbers, for fn's parameters
                after j. Tensors that fn closes over are captured, too; numbers that it closes over are constants.
            align: "first": i counts rows from 0. "last": the last row's i is the last key's j, as in Causal.

        Returns:
            A Score. Floating captured tensors that require a gradient get one, summed in fp32 (fp64). Its
            `with_(*tensors)` is the same with other captured tensors; new contents of captured tensors count.

        Raises:
            TypeError, ValueError: fn is no such function; the message names it, its line, and the remedy.
        """
        return (lambda made: ScoreOf.of(made, captured, align)) if fn is DECORATE else ScoreOf.of(fn, captured, align)

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


@dataclass(frozen=True, eq=False, repr=False)
class ScoreOf(Function, Score):
    """A score that is a function, made by `Score.of`."""

    learns = True

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return not self._reads <= {"s"}

    @property
    def unbounded(self) -> bool:  # type: ignore[override]
        from ..program.bounds import far  # on first use, for a quick import of the package

        return far(self.text)

    def limit(self, numbers: tuple[Any, ...]) -> float | None:  # type: ignore[override]
        from ..program.bounds import limits  # on first use, as above

        found = limits(self.text)
        return found and max(map(abs, found))


MADE[ScoreOf.__name__] = ScoreOf


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
    to_learn = frozenset({"gradients of slopes"})
    align = "last"
    positional = True

    @staticmethod
    def rule(s, b, h, i, j, slopes):
        return s - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(i - j)

    def __post_init__(self) -> None:
        _check_floating("Alibi: slopes", self.slopes)
        if self.slopes.ndim not in (1, 2):
            raise ValueError(
                f"Alibi: slopes must have shape (H,) or (B, H), got {tuple(self.slopes.shape)}; give each head one"
            )

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
        if self.bias.ndim > 4:
            raise ValueError(
                f"Bias: bias must broadcast to (B, H, M, N), got {self.bias.ndim} dimensions; reshape it to 4 or fewer"
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
