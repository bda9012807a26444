"""Masks and scores as programs: a Python function is traced once to a text, from which all else follows.

trace.py makes a program of a function, derive.py its derivative, run.py computes it in PyTorch. ops.py is the table of
operations, functions.py lists what a function may use. arithmetic.py, bounds.py and shape.py find the tiles that a mask
shows, by which the CPU skips the others; host/emit.py makes device functions for GPUs.
"""

from .derive import derivative
from .functions import FUNCTIONS
from .join import Aligned, join
from .program import Program, decode
from .run import Entries, apply, keep, pull, run, zero_sums
from .trace import Traced, trace

__all__ = [
    "FUNCTIONS",
    "Aligned",
    "Entries",
    "Program",
    "Traced",
    "apply",
    "decode",
    "derivative",
    "join",
    "keep",
    "pull",
    "run",
    "trace",
    "zero_sums",
]
