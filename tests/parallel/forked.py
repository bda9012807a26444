"""Ranks as processes that fork after all imports, which take longer than most tests."""

import os
import traceback
from collections.abc import Callable

import torch

torch.set_num_threads(1)  # a process that forks must have no threads


def run(ranks: int, main: Callable[[int], None]) -> bool:
    """Call main(rank) in a process for each rank, and say whether one of them failed."""
    children = []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        status = 1
        try:
            main(rank)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)  # now and then gloo's threads abort the interpreter's own end
    return any([os.waitpid(child, 0)[1] for child in children])
