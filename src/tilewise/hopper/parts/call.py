"""Bundle what most functions of the kernels take."""

from typing import Any, NamedTuple


class Call(NamedTuple):
    """Hold what a launch computes. Kernels make it where they start their roles: Triton can neither assign nor unpack
    what holds device functions, and its release 3.6 loses constants in tuples inside an argument."""

    shape: object
    """Holds lengths and counts: the `Shape` of the kernel's file."""
    packed: object
    variant: object
    cache: object = ()
    """Is a `tile.cache.Batch` where the tile's PAGE says so: Triton compares no tuple that holds None."""
    order: object = None
    """Says which tile of a forward comes when: a device function such as `schedule.assign`."""


class Scratch(NamedTuple):
    """Hold what passes between the backward's kernels, in blocks of B_r rows (see tile/rows.py); for the preprocess
    kernel of a backward by gradient, most are None."""

    logs: Any
    """Holds the lse, in base 2 or in fp32 in natural log."""
    delta: Any
    dq: Any
    """Holds sums of dQ."""
    dq_semaphore: object
    """Names, per block, the key tile that may add to it and to the blocks with the same semaphore (see
    backward/deterministic.py)."""
    ready: object
    """Counts, per matrix of keys, the parts of its dQ that are zeroed. It is None where preprocess zeroes all of dQ:
    for packed sequences, and in fp32."""
    gqa_sums: object
    done: object
    """Counts, at the first head of each loop, the key tiles that have added all they add to its dQ."""
    shift: Any = None
    """Holds the lse in natural log, behind `logs`, where logits with a bias are shifted by it; else it is None."""
