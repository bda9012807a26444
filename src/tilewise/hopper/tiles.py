"""Tabulate the tile sizes of the Hopper kernels: one row per head size in shared memory.

`python -m studies tune` measures the rows of FORWARD and BACKWARD against their neighbours;
docs/results/tables.md plots its times.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..call.problem import Problem
from ..host.tables import in_use
from ..values.score import SoftCap

SINGLE = 64
"""Tokens up to which a head is a single tile."""
SHORT = 512
"""Tokens up to which a head is a few tiles of queries."""


class Forward(NamedTuple):
    """Hold one row of the forward's table; its fields are those of forward/kernel.py's `Tile`."""

    warpgroups: int
    B_c: int
    q_stages: int
    kv_stages: int
    pingpong: bool
    fetch_early: bool
    wait_pv: int
    registers: int
    programs: int = 1
    """Counts the programs of a multiprocessor, which share its registers; not one of `Tile`'s fields."""

    @property
    def B_r(self) -> int:  # noqa: N802
        """Return the queries per tile."""
        return 64 * self.warpgroups


FORWARD: dict[Any, Forward] = {
    64: Forward(3, 128, 2, 3, pingpong=True, fetch_early=True, wait_pv=0, registers=160),
    (64, "masked"): Forward(3, 128, 2, 2, pingpong=True, fetch_early=True, wait_pv=1, registers=160),
    (64, "small"): Forward(2, 128, 2, 2, pingpong=True, fetch_early=True, wait_pv=1, registers=240),
    (64, "short"): Forward(2, 64, 4, 3, pingpong=False, fetch_early=True, wait_pv=0, registers=112, programs=2),
    (64, "narrow"): Forward(1, 64, 3, 3, pingpong=False, fetch_early=True, wait_pv=0, registers=136, programs=3),
    128: Forward(2, 128, 2, 2, pingpong=False, fetch_early=True, wait_pv=0, registers=240),
    (128, "masked"): Forward(2, 128, 2, 2, pingpong=True, fetch_early=True, wait_pv=2, registers=240),
    (128, "short"): Forward(2, 128, 3, 2, pingpong=False, fetch_early=True, wait_pv=0, registers=240),
    (128, "single"): Forward(1, 64, 2, 2, pingpong=False, fetch_early=True, wait_pv=0, registers=232, programs=2),
    (128, "scores"): Forward(2, 128, 2, 2, pingpong=False, fetch_early=True, wait_pv=1, registers=240),
    256: Forward(2, 64, 1, 2, pingpong=False, fetch_early=True, wait_pv=0, registers=240),
    96: Forward(2, 128, 2, 3, pingpong=True, fetch_early=True, wait_pv=0, registers=240),
    160: Forward(2, 128, 1, 2, pingpong=False, fetch_early=True, wait_pv=0, registers=240),
    192: Forward(2, 64, 1, 3, pingpong=False, fetch_early=True, wait_pv=0, registers=240),
    224: Forward(2, 64, 1, 2, pingpong=False, fetch_early=True, wait_pv=0, registers=240),
    (192, 128): Forward(2, 128, 1, 2, pingpong=False, fetch_early=True, wait_pv=0, registers=240),
    (512, 256): Forward(2, 64, 1, 1, pingpong=False, fetch_early=True, wait_pv=1, registers=240),
}
"""By the columns of a row in shared memory, with those of V where they differ, or with what a call is like."""


class EightBits(NamedTuple):
    """Hold one row of the table of 8-bit forwards: the tiles, and two more fields of forward/kernel.py's `Tile`."""

    row: Forward
    promote: str = "none"
    sum_by_product: bool = False


EIGHT_BITS: dict[Any, EightBits] = {
    (64, "int8"): EightBits(FORWARD[64]),
    (128, "int8"): EightBits(FORWARD[128]._replace(kv_stages=3, pingpong=True, wait_pv=1)),
    (256, "int8"): EightBits(FORWARD[256]._replace(kv_stages=3)),
    (64, "fp8"): EightBits(FORWARD[64, "small"]._replace(kv_stages=3, wait_pv=2), "whole", sum_by_product=True),
    (128, "fp8"): EightBits(FORWARD[128]._replace(kv_stages=3, wait_pv=2), "whole", sum_by_product=True),
    (256, "fp8"): EightBits(
        FORWARD[256]._replace(B_c=128, pingpong=True, fetch_early=False, wait_pv=1), "halves", sum_by_product=True
    ),
}
"""By head size and precision, among the fastest of benchmarks/results/nvidia-h100-80gb-hbm3/eight-bits.json whose sums
do not drift. That file is older than the ping-pong of (256, "fp8"). `studies tune` does not measure these."""


class Backward(NamedTuple):
    """Hold one row of the backward's table; its fields are those of backward/kernel.py's `Tile`."""

    B_r: int
    B_c: int
    q_stages: int
    do_stages: int
    split_dkdv: bool


BACKWARD = {
    64: Backward(128, 128, 2, 2, split_dkdv=False),
    (64, "scores"): Backward(64, 128, 2, 2, split_dkdv=False),
    128: Backward(64, 128, 2, 2, split_dkdv=False),
    256: Backward(64, 64, 2, 2, split_dkdv=True),
    96: Backward(64, 128, 2, 2, split_dkdv=False),
    160: Backward(64, 64, 4, 3, split_dkdv=True),
    192: Backward(64, 64, 3, 3, split_dkdv=True),
    (192, "small"): Backward(64, 64, 3, 2, split_dkdv=True),
    (256, "small"): Backward(64, 64, 2, 1, split_dkdv=True),
    (192, 128): Backward(64, 64, 4, 3, split_dkdv=True),
}
"""By the columns of a row in shared memory, as FORWARD."""


class Kind(NamedTuple):
    """Describe the 16-bit pieces that a precision of fp32 multiplies in place of its numbers."""

    type: torch.dtype
    pieces: int
    """Counts the pieces per number."""
    p_scale_log2: int
    """Scales P by 2^p_scale_log2, to fill the type's range."""


KINDS = {"bf16x6": Kind(torch.bfloat16, 3, 0), "fp16x3": Kind(torch.float16, 2, 15)}


class Fp32Forward(NamedTuple):
    """Hold one row of the fp32 forward's table; its fields are those of fp32/forward.py's `Tile`."""

    B_c: int
    kv_stages: int
    q_separate: bool
    pingpong: bool
    wait_pv: int
    registers: int
    paired: bool = False

    @property
    def B_r(self) -> int:  # noqa: N802
        """Return the queries per tile, of two warpgroups."""
        return 128


FP32_FORWARD: dict[Any, Fp32Forward] = {
    (64, "fp16x3"): Fp32Forward(128, 2, q_separate=True, pingpong=True, wait_pv=1, registers=240),
    (64, "bf16x6"): Fp32Forward(64, 2, q_separate=True, pingpong=False, wait_pv=1, registers=240),
    (128, "fp16x3"): Fp32Forward(64, 2, q_separate=False, pingpong=True, wait_pv=1, registers=240),
    (128, "bf16x6"): Fp32Forward(32, 2, q_separate=False, pingpong=False, wait_pv=0, registers=240, paired=True),
}


class Bias(NamedTuple):
    """Hold the tile sizes of the bias-gradient kernel."""

    B_r: int
    B_c: int
    warps: int
    stages: int


BIAS = {64: Bias(64, 64, 4, 3), 128: Bias(128, 32, 8, 2), 256: Bias(128, 32, 8, 1)}


def padded(p: Problem) -> int:
    """Return the columns of a row in shared memory, as a power of two from 64 on."""
    return next(size for size in (64, 128, 256, 512) if max(p.D, p.D_v) <= size)


class Columns(NamedTuple):
    """Count the columns of rows in shared memory, which lie in pieces (parts/pieces.py)."""

    of_qk: int
    of_v: int

    @property
    def key(self) -> Any:
        """Return the key into FORWARD or BACKWARD."""
        return self.of_qk if self.of_qk == self.of_v else self


def columns(p: Problem, rows: Mapping[Any, Any]) -> Columns:
    """Return a problem's columns: its head sizes rounded up to 32, if there is such a row; else to a power of two, as
    those of codes and caches. Above 256, V's columns are divided: each part is computed by itself."""
    if padded(p) > 256:
        return Columns(512, 256)
    found = Columns(*[max(64, -(-size // 32) * 32) for size in (p.D, p.D_v)])
    plain = p.dtype != torch.float32 and p.needs <= {"packed"}
    if plain and found.key in rows:
        return found
    return Columns(padded(p), padded(p))


TABLES: dict[str, dict[Any, Any]] = {"forward": FORWARD, "backward": BACKWARD}


class Rows(NamedTuple):
    """Hold a problem's row of each of TABLES."""

    forward: Forward
    backward: Backward | None = None  # none above head size 256


def current(p: Problem) -> Rows:
    """Return the rows in use for a problem."""
    tables = in_use("hopper", TABLES, p.q.device)
    rows = Rows(**{name: tables[name][key] for name, key in keys(p).items()})
    coded = EIGHT_BITS.get((padded(p), p.products.name))
    return rows._replace(forward=coded.row) if coded else rows


def eight_bits_row(p: Problem) -> EightBits:
    """Return the row for the forward of a problem with 8-bit products."""
    return EIGHT_BITS[padded(p), p.products.name]


def keys(p: Problem) -> dict[str, Any]:
    """Return a problem's key into each table; fp32 has none. At head size 64, large tiles leave no registers for scores
    and dropout. They also waste much of what listed tiles leave out, and of masked calls to 1024 queries. Of calls
    without a mask, they waste much to 256 queries and from 385 to 512. Short calls have a tile or two of a head: they
    are faster with small key tiles and several programs on a multiprocessor, at 128 only up to 64 tokens. From there to
    512 they are faster with a third stage of Q. Masks are faster if the previous product is complete before them
    (`wait_pv`). At 128, so are dropout and scores, except SoftCap. Longer masks alone are faster there with ping-pong
    scheduling (`pingpong`)."""
    if p.dtype == torch.float32:
        return {}
    size, recipe = padded(p), p.recipe
    forward: Any = columns(p, FORWARD).key
    if forward != size:
        found = {name: columns(p, TABLES[name]).key for name in TABLES if size <= 256 or name == "forward"}
        return found | {name: _with_room(p, key) for name, key in found.items() if name == "backward"}
    longest = max(p.M, p.N)
    if size == 64:
        registers_short = bool(recipe.score or recipe.dropout or p.listed)
        if registers_short:
            forward = 64, "small"
        elif longest <= (1024 if recipe.mask else 256):
            forward = 64, "short" if recipe.mask or longest <= 128 else "narrow"
        elif p.M <= (1024 if recipe.mask else 256) or 384 < p.M <= SHORT:
            forward = 64, "small"
        elif recipe.mask:
            forward = 64, "masked"
        return {"forward": forward, "backward": (64, "scores") if registers_short else 64}
    if size == 128:
        if recipe.dropout or (recipe.score and SoftCap not in p.kinds):
            forward = 128, "scores"
        elif longest <= SINGLE and not (recipe.score or p.listed):
            forward = 128, "single"
        elif longest <= SHORT and not recipe.score:
            forward = 128, "short"
        elif recipe.mask and not recipe.score:
            forward = 128, "masked"
    return {"forward": forward, "backward": _with_room(p, size)}


def _with_room(p: Problem, key: Any) -> Any:
    """Return the key of the backward that leaves memory for dropout bits, or at 192 for what a bias shifts by."""
    crowded = p.recipe.dropout if key == 256 else key == 192 and (p.recipe.dropout or p.biased)
    return (key, "small") if crowded else key


def precision(p: Problem) -> str | None:
    """Return how products of fp32 are computed, or None if the precision asked for is not among KINDS."""
    return p.precision(tuple(KINDS))


def current_fp32(p: Problem) -> Fp32Forward:
    """Return the row for an fp32 problem. `studies tune` does not measure these."""
    return FP32_FORWARD[padded(p), precision(p)]
