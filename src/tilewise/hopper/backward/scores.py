"""Say how the backward computes scores: as the forward does, except for what leaves it too few registers."""

from ..parts.scores import saturated

__all__ = ["STEPS", "saturated"]

STEPS = True
"""As `Form.steps` in host/statements.py."""
