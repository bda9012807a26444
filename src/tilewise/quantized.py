"""A tensor in 8 bits and what it is multiplied by, as one value."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .mask import Frozen


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
