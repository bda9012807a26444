"""Layouts where 0.1.0 had them, for values that it saved."""

from .values.cached import *  # noqa: F403
from .values.layout import *  # noqa: F403
