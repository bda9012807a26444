"""Masks where 0.1.0 had them, for values that it saved."""

from .values.intervals import *  # noqa: F403
from .values.masks import *  # noqa: F403
from .values.tables import *  # noqa: F403
