"""Dropout: which entries of P are kept, bit for bit, in plain PyTorch. It specifies what every back end computes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .value import number_in

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
HALF = 0xFFFF


class Dropout(NamedTuple):
    """The probability that an entry of P is dropped, in [0, 1), as the user gave it."""

    probability: float

    @staticmethod
    def of(probability: Any) -> "Dropout":
        """Check a probability. Raise TypeError or ValueError if it is none."""
        if type(probability) is float and probability == 0.0:  # torch.compile needs the constant itself
            return Dropout(0.0)
        return Dropout(number_in("dropout", probability, "a probability in [0, 1)", 0.0, 1.0))

    @property
    def threshold(self) -> int:
        """Return the number below which an entry's 16 random bits drop it."""
        return dropout_threshold(self.probability)

    @property
    def rescale(self) -> float:
        """Return the factor on entries that are kept."""
        return dropout_rescale(self.probability)

    def seed(self, seed: int | Tensor | None, q: Tensor) -> Tensor | None:
        """Return the seed as a scalar int64 tensor on q's device, drawn if None; its value is never read back. None
        without dropout."""
        if isinstance(seed, Tensor):
            if seed.dtype != torch.int64 or seed.numel() != 1:
                raise TypeError(
                    f"seed must be an int or a scalar int64 tensor, got {seed.dtype} of shape {tuple(seed.shape)}; "
                    "pass an int, or leave it out to have one drawn"
                )
            if seed.device != q.device:
                raise ValueError(f"seed must be on q's device {q.device}, got {seed.device}; move it with .to(...)")
        elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(
                f"seed must be an int or a scalar int64 tensor, got {seed!r}; leave it out to have one drawn"
            )
        elif isinstance(seed, int) and not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {seed}; pass one in [-2^63, 2^63)")
        if self.probability == 0.0:
            return None
        if seed is None:
            return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
        return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=q.device)


def dropout_keep(seed: int, row: Tensor, i: Tensor, j: Tensor, dropout: float) -> Tensor:
    """Tell whether dropout keeps entry (i, j) of score matrix `row` = b * H + h; int64 tensors that broadcast."""
    return dropout_number(seed, row, i, j) >= dropout_threshold(dropout)


def dropout_number(seed: int, row: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Return the 16 random bits of an entry, which decide its dropout; they depend on (seed, row, i, j) alone.

    The generator is Philox-4x32-10 (Salmon et al. 2011). Its key is the seed's low and high 32 bits, its counter is
    (j', i', row, 0): i' is i without bit 3, and j' is j without bits 3, 4 and 5. Bits 5 and 4 of j choose one of four
    words; bit 3 of i and of j choose a byte of it, the upper eight bits. The lower eight are that byte of the exclusive
    or of all four words, independent of each word. So one counter serves sixteen entries: rows i and i + 8 of columns
    j, j + 8, ..., j + 56. One thread of a tensor-core accumulator holds all sixteen.
    """
    words = torch.stack(philox(((j >> 6) << 3 | j & 7, (i >> 4) << 3 | i & 7, row, torch.zeros_like(row)), seed))
    byte = 8 * (2 * (i >> 3 & 1) + (j >> 3 & 1))
    own = words.gather(0, (j >> 4 & 3).expand(words.shape[1:])[None])[0]
    every = words[0] ^ words[1] ^ words[2] ^ words[3]
    return (own >> byte & 0xFF) << 8 | every >> byte & 0xFF


def dropout_threshold(dropout: float) -> int:
    """Return p 2^16, rounded, at most 65535: an entry is dropped if its 16-bit number is below."""
    return min(round(dropout * 2.0**16), HALF)


def dropout_rescale(dropout: float) -> float:
    """Return the factor on kept entries, 1 / (1 - p), with p rounded to 16 bits so that the mean is exact."""
    return 2.0**16 / (2**16 - dropout_threshold(dropout))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox-4x32-10: four 32-bit words, in int64 tensors, from a 4-word counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(PHILOX_ROUNDS):
        high_0, low_0 = _multiply(c0, PHILOX_MULTIPLIERS[0])
        high_1, low_1 = _multiply(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + PHILOX_WEYL[0]) & WORD, (k1 + PHILOX_WEYL[1]) & WORD
    return c0, c1, c2, c3


def _multiply(x, multiplier):
    """Return the high and low 32 bits of a 32-bit product, by halves, because int64 arithmetic would overflow."""
    low = (x & 0xFFFF) * multiplier
    high = (x >> 16) * multiplier + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | (low & 0xFFFF)
