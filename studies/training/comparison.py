"""Compare two trainings that differ only in their attention."""

from dataclasses import asdict, dataclass
from typing import Any

from .trainer import Settings

NAMES = ("standard", "tilewise")
TOLERANCE = 0.01
"""Nats a byte. Two correct fp32 trainings differ by rounding, which grows with the steps; see `Comparison.equal`."""
EARLY_STEPS, EARLY_TOLERANCE = 10, 1e-4


@dataclass
class Comparison:
    """Both trainings, step by step (losses in nats a byte)."""

    settings: Settings
    backend: str
    losses: dict[str, list[float]]
    time_s: dict[str, float]
    peak_bytes: dict[str, int]
    """Above what was there before the first step."""

    @property
    def differences(self) -> list[float]:
        """Return the differences of the losses, step by step."""
        return [abs(a - b) for a, b in zip(*(self.losses[name] for name in NAMES), strict=True)]

    @property
    def equal(self) -> bool:
        """Tell whether they are equal but for rounding: nearly the same digits in the first steps, within 0.01 to the
        end."""
        return max(self.differences[:EARLY_STEPS]) <= EARLY_TOLERANCE and max(self.differences) <= TOLERANCE

    def summary(self) -> dict[str, Any]:
        """Return the results for another program."""
        return {
            "backend": self.backend,
            "losses_standard": self.losses["standard"],
            "losses_tilewise": self.losses["tilewise"],
            "time_s": self.time_s,
            "peak_bytes": self.peak_bytes,
            "losses_equal": self.equal,
            "largest_difference": max(self.differences),
            "settings": asdict(self.settings),
        }

    def verdict(self) -> str:
        """Say in a sentence what the losses show."""
        early, whole = max(self.differences[:EARLY_STEPS]), max(self.differences)
        text = (
            f"largest difference {early:.1e} in the first {EARLY_STEPS} steps, {whole:.1e} in all "
            f"{len(self.differences)}, at a loss of {self.losses['tilewise'][-1]:.3f}"
        )
        return f"The losses are equal but for rounding: {text}." if self.equal else f"The losses DIFFER: {text}."
