"""Score functions: changes to the scaled logits (soft cap, ALiBi, bias), applied left to right, before the mask.

A score is a pair of functions: `apply` maps input logits S to output logits, and `pull` maps the gradient of the output
back to the input. `device` names the kernels' pair in tile/scores.py, and `arguments` returns its arguments.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .tables import tile_of
from .value import AS_WIDE, At, Value, check_strided, constant


class Score(Value):
    """Every score derives from this class."""

    learns: ClassVar[bool] = False
    """Whether the captured tensor gets a gradient; if not, one that requires a gradient is refused."""

    def apply(self, S: Tensor, i: Tensor, j: Tensor, shift: int) -> Tensor:
        """Return the output logits for S (B, H, rows, columns), row indices i shifted by `shift` = N - M, columns j."""
        raise NotImplementedError

    def pull(self, dS: Tensor, S: Tensor, i: Tensor, j: Tensor, shift: int) -> Tensor:
        """Return the gradient of the input logits S, from that of the output logits."""
        return dS

    def reduce(self, dS: Tensor) -> Tensor | None:
        """Return the captured tensor's gradient, from that of the output logits (B, H, M, N); None if it has none."""
        return None


@dataclass(frozen=True, eq=False)
class SoftCap(Score):
    """Cap logits softly to the range -cap to cap: cap * tanh(S / cap) (Gemma 2).

    cap is a number > 0, at most 2^126. Raises TypeError or ValueError for anything else.
    """

    cap: float
    device = "softcap"

    def __post_init__(self) -> None:
        if isinstance(self.cap, bool) or not isinstance(self.cap, (int, float)):
            raise TypeError(f"SoftCap: cap must be a number > 0, got {self.cap!r}; convert it with float(...)")
        cap = constant(float(self.cap))
        if not 0 < cap <= 2.0**126:
            raise ValueError(
                f"SoftCap: cap must be finite, > 0 and at most 2^126, got {cap}; leave the score out for no cap"
            )
        object.__setattr__(self, "cap", cap)

    def apply(self, S: Tensor, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return self.cap * torch.tanh(S / self.cap)

    def pull(self, dS: Tensor, S: Tensor, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return dS * (1.0 - torch.tanh(S / self.cap) ** 2)


@dataclass(frozen=True, eq=False)
class Alibi(Score):
    """Subtract a linear penalty on distance: S - slope * abs(i + N - M - j) (Press et al. 2021).

    slopes: (H,) or (B, H), any floating type, without gradient. Raises TypeError or ValueError for anything else.
    """

    slopes: Tensor
    device = "alibi"
    captures = ("slopes",)
    shapes = ("BH",)
    unbatched = True

    def __post_init__(self) -> None:
        _check_floating("Alibi: slopes", self.slopes)
        if self.slopes.ndim not in (1, 2):
            raise ValueError(
                f"Alibi: slopes must have shape (H,) or (B, H), got {tuple(self.slopes.shape)}; give each head one"
            )

    def apply(self, S: Tensor, i: Tensor, j: Tensor, shift: int) -> Tensor:
        slopes = self.slopes.to(S.dtype)[..., None, None]  # (H, 1, 1) or (B, H, 1, 1)
        return S - slopes * (i - j).abs()

    def placed(self, place: Any, M: int, N: int) -> Score:
        offset = constant(place.row - place.column - (N - M))
        return AlibiAt.rebuild((offset,), self.tensors) if offset else self

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        batch = self.slopes.stride(0) if self.slopes.ndim == 2 else 0
        return self.slopes, batch, self.slopes.stride(-1)


@dataclass(frozen=True, eq=False)
class AlibiAt(At, Alibi):
    """Subtract what Alibi does, at a place."""

    offset: int
    device = "alibi_at"

    def apply(self, S: Tensor, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return super().apply(S, i + self.offset, j, shift)


@dataclass(frozen=True, eq=False)
class Bias(Score):
    """Add a bias to the logits: S + bias; differentiable.

    bias: any floating type, broadcast to (B, H, M, N). Raises TypeError or ValueError for other types or more
    dimensions.
    """

    bias: Tensor
    device = "bias"
    captures = ("bias",)
    shapes = ("BHMN",)
    broadcasts = True
    varlen = False
    not_cached = AS_WIDE
    learns = True

    def __post_init__(self) -> None:
        _check_floating("Bias: bias", self.bias)
        if self.bias.ndim > 4:
            raise ValueError(
                f"Bias: bias must broadcast to (B, H, M, N), got {self.bias.ndim} dimensions; reshape it to 4 or fewer"
            )

    def apply(self, S: Tensor, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return S + tile_of(self.bias, i[:, 0] - shift, j[0]).to(S.dtype)

    def reduce(self, dS: Tensor) -> Tensor:
        return dS.sum_to_size(self.bias.shape)

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (self.bias, *self.bias.expand(problem.B, problem.H, problem.M, problem.N).stride(), problem.M, problem.N)


def _check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a floating tensor, got {type(tensor).__name__}; convert it with torch.as_tensor(...)"
        )
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating tensor, got {tensor.dtype}; convert it with .to(...)")
    check_strided(name, tensor)
