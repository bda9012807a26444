"""Ranks as processes that fork after all imports, which take longer than most tests."""

import gc
import os
import socket
import traceback
from collections.abc import Callable

import torch

torch.set_num_threads(1)  # a process that forks must have no threads


def run(ranks: int, main: Callable[[int], None]) -> bool:
    """Call main(rank) in a process for each rank, and say whether one of them failed."""
    gc.freeze()  # or each would copy all that was imported, as it collects garbage
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


def torchrun(ranks: int, main: Callable[[], None]) -> bool:
    """Call main() in ranks that find one another as those of torchrun do, and say whether one of them failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def as_rank(rank: int) -> None:
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in given.items()})
        main()

    return run(ranks, as_rank)
