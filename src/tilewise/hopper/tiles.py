"""Tiles of the Hopper kernels: one row per head size in shared memory."""

from typing import NamedTuple

from ..problem import Problem


class Forward(NamedTuple):
    """One row of the forward's table; the fields are `forward.Tile`'s."""

    warpgroups: int
    B_c: int
    q_stages: int
    kv_stages: int
    turns: bool
    draw_early: bool
    split: int
    registers: int

    @property
    def B_r(self) -> int:  # noqa: N802
        """Queries of a tile."""
        return 64 * self.warpgroups


FORWARD = {
    64: Forward(3, 128, 2, 2, turns=True, draw_early=True, split=1, registers=160),
    (64, "two"): Forward(2, 128, 2, 2, turns=True, draw_early=True, split=1, registers=240),
    128: Forward(2, 128, 2, 2, turns=False, draw_early=True, split=0, registers=240),
    256: Forward(2, 64, 1, 2, turns=False, draw_early=False, split=2, registers=240),
}


class Backward(NamedTuple):
    """One row of the backward's table; the fields are `backward.Tile`'s."""

    B_r: int
    B_c: int
    q_stages: int
    do_stages: int
    sides: bool


BACKWARD = {
    64: Backward(128, 128, 2, 2, sides=False),
    128: Backward(64, 128, 2, 2, sides=False),
    256: Backward(64, 64, 2, 1, sides=True),
}


class Bias(NamedTuple):
    """Tiles of the kernel for a bias's gradient."""

    B_r: int
    B_c: int
    warps: int
    stages: int


BIAS = {64: Bias(64, 64, 4, 3), 128: Bias(128, 32, 8, 2), 256: Bias(128, 32, 8, 2)}


def padded(p: Problem) -> int:
    """Columns of a row in shared memory: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if max(p.D, p.D_v) <= size)


def forward_row(p: Problem) -> Forward:
    """The row of a problem. At head size 64 three warpgroups leave no registers for scores and dropout, 192 rows are
    no list's, and waste the most at the edges of masks: there two do better up to 4k tokens."""
    interval = all(getattr(kind, "interval", True) for kind in p.kinds)
    two = p.recipe.score or p.recipe.dropout or not interval or (p.recipe.mask and p.M <= 4096)
    size = padded(p)
    return FORWARD.get((size, "two"), FORWARD[size]) if two else FORWARD[size]
