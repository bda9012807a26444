"""Layouts where 0.1.0 had them, for values that it saved."""

from .values.layout import *  # noqa: F403
