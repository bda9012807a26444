"""Tiles of the Hopper kernels: one row per head size in shared memory.

`python -m tilewise tune` measures the rows of FORWARD and BACKWARD beside their neighbours; its times are drawn in
docs/performance.md.
"""

from typing import Any, NamedTuple

import torch

from ..host.tables import in_use
from ..problem import Problem
from ..score import SoftCap


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
    64: Forward(3, 128, 2, 2, turns=True, draw_early=True, split=0, registers=160),
    (64, "masked"): Forward(3, 128, 2, 2, turns=True, draw_early=True, split=1, registers=160),
    (64, "two"): Forward(2, 128, 2, 2, turns=True, draw_early=True, split=1, registers=240),
    128: Forward(2, 128, 2, 2, turns=False, draw_early=True, split=0, registers=240),
    (128, "masked"): Forward(2, 128, 2, 2, turns=True, draw_early=True, split=2, registers=240),
    (128, "rich"): Forward(2, 128, 2, 2, turns=False, draw_early=True, split=1, registers=240),
    256: Forward(2, 64, 1, 2, turns=False, draw_early=True, split=0, registers=240),
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
    (64, "rich"): Backward(64, 128, 2, 2, sides=False),
    128: Backward(64, 128, 2, 2, sides=False),
    256: Backward(64, 64, 2, 1, sides=True),
}


class Kind(NamedTuple):
    """What a precision of fp32 multiplies in place of its numbers."""

    type: torch.dtype
    pieces: int
    """Of a number."""
    raised: int
    """P is computed 2^raised times as large, to fill the type's range."""


KINDS = {"bf16x6": Kind(torch.bfloat16, 3, 0), "fp16x3": Kind(torch.float16, 2, 15)}


class Fp32Forward(NamedTuple):
    """One row of the fp32 forward's table; the fields are `fp32_forward.Tile`'s."""

    B_c: int
    kv_stages: int
    q_apart: bool
    turns: bool
    split: int
    registers: int
    paired: bool = False

    @property
    def B_r(self) -> int:  # noqa: N802
        """Queries of a tile, of two warpgroups."""
        return 128


FP32_FORWARD: dict[Any, Fp32Forward] = {
    (64, "fp16x3"): Fp32Forward(128, 2, q_apart=True, turns=True, split=1, registers=240),
    (64, "bf16x6"): Fp32Forward(64, 2, q_apart=True, turns=False, split=1, registers=240),
    (128, "fp16x3"): Fp32Forward(64, 2, q_apart=False, turns=True, split=1, registers=240),
    (128, "bf16x6"): Fp32Forward(32, 2, q_apart=False, turns=False, split=0, registers=240, paired=True),
}


class Bias(NamedTuple):
    """Tiles of the kernel for a bias's gradient."""

    B_r: int
    B_c: int
    warps: int
    stages: int


BIAS = {64: Bias(64, 64, 4, 3), 128: Bias(128, 32, 8, 2), 256: Bias(128, 32, 8, 1)}


def padded(p: Problem) -> int:
    """Columns of a row in shared memory: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if max(p.D, p.D_v) <= size)


TABLES: dict[str, dict[Any, Any]] = {"forward": FORWARD, "backward": BACKWARD}


class Rows(NamedTuple):
    """A problem's row of each of TABLES."""

    forward: Forward
    backward: Backward


def current(p: Problem) -> Rows:
    """The rows in use for a problem."""
    tables = in_use("hopper", TABLES, p.q.device)
    return Rows(**{name: tables[name][key] for name, key in keys(p).items()})


def keys(p: Problem) -> dict[str, Any]:
    """Where a problem's rows are. At head size 64 large tiles leave no registers for scores and dropout, and waste much
    of what lists of tiles leave out and of short masked rows; masks want the product before out of their way. At 128,
    so do scores and dropout, but for SoftCap, and masks alone want the warpgroups to take turns. None for fp32."""
    if p.dtype == torch.float32:
        return {}
    size, recipe = padded(p), p.recipe
    forward: Any = size
    if size == 64:
        rich = bool(recipe.score or recipe.dropout or p.listed)
        masked = "two" if p.M <= 1024 else "masked"
        forward = (64, "two") if rich else (64, masked) if recipe.mask else 64
        return {"forward": forward, "backward": (64, "rich") if rich else 64}
    if size == 128:
        if recipe.dropout or (recipe.score and SoftCap not in p.kinds):
            forward = 128, "rich"
        elif recipe.mask and not recipe.score:
            forward = 128, "masked"
    return {"forward": forward, "backward": size}


def precision(p: Problem) -> str | None:
    """How products of fp32 are computed; None if the one asked for is not among KINDS."""
    return p.precision(tuple(KINDS))


def current_fp32(p: Problem) -> Fp32Forward:
    """The row for an fp32 problem. `tilewise tune` does not measure these."""
    return FP32_FORWARD[padded(p), precision(p)]


def title(key: Any) -> str:
    """A key for people."""
    size, *rest = key if isinstance(key, tuple) else (key,)
    return " ".join((f"D{size}", *rest))


CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "forward": (
        {"warpgroups": 2, "registers": 240}, {"warpgroups": 3, "registers": 160},
        {"B_c": 64}, {"B_c": 64, "kv_stages": 3}, {"B_c": 128},
        {"q_stages": 1}, {"q_stages": 1, "kv_stages": 3}, {"q_stages": 2}, {"kv_stages": 2}, {"kv_stages": 3},
        {"turns": True}, {"turns": False}, {"draw_early": True}, {"draw_early": False},
        {"split": 0}, {"split": 1}, {"split": 2},
    ),
    "backward": (
        {"q_stages": 1}, {"q_stages": 2}, {"q_stages": 3}, {"do_stages": 1}, {"do_stages": 2}, {"do_stages": 3},
    ),
}  # fmt: skip
"""What `tilewise tune` tries. The backward's B_r and B_c follow from the head size: pieces of dQ are 64 x 64, and a
group holds 64 keys."""


def neighbours(name: str, row: Any) -> list[Any]:
    """Every other row that one change makes of a row of this table. Further steps take another run."""
    made = dict.fromkeys(row._replace(**change) for change in CHANGES[name])
    return [other for other in made if other != row]
