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
    (64, "rich"): Forward(2, 128, 2, 2, turns=True, draw_early=True, split=1, registers=240),
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


def padded(p: Problem) -> int:
    """Columns of a row in shared memory: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if max(p.D, p.D_v) <= size)


def forward_row(p: Problem) -> Forward:
    """The row of a problem; "rich" ones serve scores, dropout and lists of tiles."""
    interval = all(getattr(kind, "interval", True) for kind in p.kinds)
    size = padded(p)
    rich = p.recipe.score or p.recipe.dropout or not interval
    return FORWARD.get((size, "rich"), FORWARD[size]) if rich else FORWARD[size]
