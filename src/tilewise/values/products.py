"""A tensor in 8 bits and what it is multiplied by, as one value; and what 8-bit products may be told beforehand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .value import Frozen


@dataclass(frozen=True, eq=False)
class Quantized(Frozen):
    """A tensor x in e4m3 (torch.float8_e4m3fn) and its scale: it stands for x * scale.

    In the place of k and v it goes with `layout=Cached(...)`. Keys and values are converted where they are read;
    products are those of q's type.

    In the place of q, k and v, all three, it goes with a padded batch or a Varlen. o is bf16, and there are no
    gradients. A pass in front converts the three to bf16; with `precision="fp8"`, x is multiplied as it is.

    scale: fp32, one number (), one a head (H_k,), or one a sequence and head (B, H_k), so also q's; all > 0. Raises
    TypeError or ValueError for anything else.
    """

    x: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        for name, dtype in (("x", torch.float8_e4m3fn), ("scale", torch.float32)):
            t = getattr(self, name)
            if not isinstance(t, Tensor) or t.dtype != dtype:
                got = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"Quantized: {name} must be a tensor of {dtype}, got {got}; convert it with .to(...)")
        if self.scale.ndim > 2:
            raise ValueError(
                f"Quantized: scale must have shape (), (H_k,) or (B, H_k), got {tuple(self.scale.shape)}; reshape it"
            )

    def to(self, device: torch.device | str | int) -> "Quantized":
        """Return the same value on a device."""
        return Quantized(self.x.to(device), self.scale.to(device))


@dataclass(frozen=True, eq=False)
class EightBits(Frozen):
    """What 8-bit products are told, for `precision=`: constants of a layer, and the angles of rotary.

    name: "int8" or "fp8".
    mean: fp32 (H_k, D) or (B, H_k, D), what K's rows lose. Any numbers are right, as softmax does not see them; good
        ones make K small. With a score or a sink, nothing is subtracted.
    balance: of mean's shapes, powers of two: channels of Q are multiplied by it, and those of K divided. Without mean
        and balance, 256 rows of each call decide them.
    cos, sin: (positions, R / 2), as for `rotary`. The pass that writes codes then rotates q and k, from position 0 of
        each sequence on. Results and gradients are those of `rotary_qk` before the call. They cover M and N positions,
        with a Varlen max_q and max_k.
    interleaved: how pairs lie, as for `rotary`.

    They have no gradients. Raises TypeError or ValueError for anything else, for cos and sin in the call.
    """

    name: str
    mean: Tensor | None = None
    balance: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.name not in ("int8", "fp8"):
            raise ValueError(f"EightBits: name must be int8 or fp8, got {self.name!r}; write one of them")
        for one, other in (("mean", "balance"), ("cos", "sin")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"EightBits: {one} must be given with {other}, got one alone; pass both, or neither")
        if self.mean is None or self.balance is None:
            return
        for name, t in (("mean", self.mean), ("balance", self.balance)):
            if not isinstance(t, Tensor) or t.dtype != torch.float32:
                got = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"EightBits: {name} must be a tensor of fp32, got {got}; convert it with .float()")
            if t.ndim not in (2, 3) or t.shape != self.mean.shape:
                raise ValueError(
                    f"EightBits: {name} must have shape (H_k, D) or (B, H_k, D), as the other, got {tuple(t.shape)}; "
                    "reshape it"
                )
            if t.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"EightBits: {name} must have no gradient, got requires_grad=True; detach it")

    @staticmethod
    def of(name: str, q: Tensor, k: Tensor) -> "EightBits":
        """Measure mean and balance on all rows of q (B, M, H, D) and k (B, N, H_k, D), after rotary; (H_k, D)."""
        q, k = q.detach().float(), k.detach().float()
        mean = k.mean((0, 1))
        of_q = q.unflatten(2, (k.shape[2], -1)).square().mean((0, 1, 3))
        exponent = torch.log2((k - mean).square().mean((0, 1)) / of_q) / 4
        return EightBits(name, mean, torch.exp2(exponent.nan_to_num(0.0, 0.0, 0.0).round().clamp(-24, 24)))

    def to(self, device: torch.device | str | int) -> "EightBits":
        """Return the same value on a device."""
        tensors = self.mean, self.balance, self.cos, self.sin
        return EightBits(
            self.name, *(None if t is None else t.to(device) for t in tensors), interleaved=self.interleaved
        )
