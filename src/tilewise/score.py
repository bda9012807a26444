"""Scores where 0.1.0 had them, for values that it saved."""

from .values.score import *  # noqa: F403
