"""Tile sizes: one row per kernel, kind of chip, bytes per entry and head size.

Some rows replace the plain row:
- "scores" is for calls with scores or dropout. Their loops need more registers, and the plain row spills.
- "dropout" is for it in fp32, where the plain row has 8 rows or columns: a counter of dropout serves 16.
- "ieee" is for products on FMA units. Ampere's rows equal Hopper's if these spill no more.
- "tf32x3" is for that precision. Its split operands take a third more shared memory than bf16x6's, too much for the
  plain row.
- "32 tokens" and "64 tokens" are for the backward of calls of at most as many. There a tile is the whole head.

Hopper's rows are the fastest measured on an H200. For 16-bit types, they are the fastest of those whose loop has no
spills up to head size 128, and without "ieee" at head size 256. Other rows are the largest that compile for every chip
of their kind, by the same rule, within its shared memory; so is every row of head size 512, Hopper's too.
`python -m studies tune` measures similar rows on a GPU.

sm_100 reads the rows of "blackwell" first, then Hopper's. In fp32 they are small, as Triton 3.6 splits a product into
many parts; with Hopper's tiles these need more tensor memory than there is, and the compiled kernel is empty.

In fp32, head sizes above 256 are multiplied on FMA units, as split operands would spill thousands of registers. Tiles
have 8 rows where 16 spill, or need more shared memory than the chips of LITTLE_MEMORY have.
"""

from itertools import product
from typing import Any, NamedTuple

import torch

from ..call.problem import Problem, once
from ..host.tables import in_use


class Tiles(NamedTuple):
    """The tile of one kernel: rows of queries, columns of keys, warps and pipeline stages."""

    B_r: int
    B_c: int
    warps: int
    stages: int
    registers: int | None = None
    """A cap on registers per thread. It is set where one more would prevent a second block on the multiprocessor."""

    @property
    def in_words(self) -> str:
        """Say how many warps and stages there are."""
        return f"{self.warps} warps, {self.stages} stage{'s' * (self.stages > 1)}"

    def options(self, **more: int) -> dict[str, int]:
        """Return the options of a kernel's compiler."""
        cap = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **more, **cap}


Table = dict[tuple[str | int, ...], Tiles]

FORWARD: Table = {
    ("hopper", 2, 64): Tiles(128, 64, 8, 4, registers=128),
    ("hopper", 2, 64, "scores"): Tiles(128, 64, 8, 4),
    ("hopper", 2, 128): Tiles(64, 64, 4, 3),
    ("hopper", 2, 256): Tiles(128, 32, 8, 3),
    ("hopper", 2, 512): Tiles(32, 32, 8, 2),
    ("hopper", 4, 64): Tiles(64, 32, 4, 1),
    ("hopper", 4, 128): Tiles(128, 32, 8, 1),
    ("hopper", 4, 256): Tiles(64, 32, 4, 2),
    ("hopper", 4, 64, "ieee"): Tiles(64, 64, 8, 1),
    ("hopper", 4, 128, "ieee"): Tiles(64, 64, 8, 1),
    ("hopper", 4, 256, "ieee"): Tiles(32, 32, 8, 1),
    ("hopper", 4, 256, "tf32x3"): Tiles(64, 16, 4, 1),
    ("hopper", 4, 512): Tiles(16, 64, 8, 1),
    ("blackwell", 2, 64): Tiles(128, 64, 8, 4),
    ("blackwell", 4, 64): Tiles(32, 32, 4, 2),
    ("blackwell", 4, 128): Tiles(32, 32, 4, 2),
    ("blackwell", 4, 256): Tiles(16, 16, 4, 1),
    ("ampere", 2, 64): Tiles(128, 64, 8, 3),
    ("ampere", 2, 128): Tiles(128, 32, 8, 3),
    ("ampere", 2, 256): Tiles(32, 32, 4, 2),
    ("ampere", 2, 512): Tiles(32, 16, 8, 2),
    ("ampere", 4, 64): Tiles(128, 32, 8, 2),
    ("ampere", 4, 128): Tiles(32, 32, 4, 2),
    ("ampere", 4, 256): Tiles(16, 16, 4, 1),
    ("ampere", 4, 64, "ieee"): Tiles(64, 64, 4, 1),
    ("ampere", 4, 128, "ieee"): Tiles(64, 64, 8, 1),
    ("ampere", 4, 256, "ieee"): Tiles(32, 32, 8, 1),
    ("ampere", 4, 512): Tiles(16, 32, 8, 1),
    ("other", 2, 128): Tiles(64, 32, 4, 1),
    ("other", 2, 256): Tiles(32, 32, 4, 1),
    ("other", 2, 512): Tiles(32, 16, 4, 1),
    ("other", 4, 64): Tiles(32, 32, 4, 1),
    ("other", 4, 128): Tiles(32, 16, 4, 1),
    ("other", 4, 256): Tiles(16, 16, 4, 1),
    ("other", 4, 128, "ieee"): Tiles(32, 32, 4, 1),
    ("other", 4, 512): Tiles(16, 16, 4, 1),
    ("interpreter", 2, 512): Tiles(32, 32, 4, 1),
    ("interpreter", 4, 512): Tiles(32, 32, 4, 1),
}

DKDV: Table = {
    ("hopper", 2, 64): Tiles(64, 64, 4, 3),
    ("hopper", 2, 64, "32 tokens"): Tiles(32, 32, 2, 2),
    ("hopper", 2, 64, "64 tokens"): Tiles(64, 64, 4, 1),
    ("hopper", 2, 64, "scores"): Tiles(32, 64, 4, 3),
    ("hopper", 2, 128): Tiles(32, 128, 8, 3),
    ("hopper", 2, 128, "32 tokens"): Tiles(32, 32, 2, 2),
    ("hopper", 2, 128, "64 tokens"): Tiles(64, 64, 4, 2),
    ("hopper", 2, 128, "scores"): Tiles(16, 128, 8, 2),
    ("hopper", 2, 256): Tiles(64, 32, 4, 2),
    ("hopper", 4, 128): Tiles(32, 128, 8, 1),
    ("hopper", 4, 256): Tiles(16, 16, 4, 1),
    ("hopper", 4, 64, "ieee"): Tiles(32, 64, 8, 1),
    ("hopper", 4, 128, "ieee"): Tiles(32, 64, 8, 1),
    ("hopper", 4, 64, "tf32x3"): Tiles(32, 128, 8, 1),
    ("hopper", 4, 128, "tf32x3"): Tiles(16, 64, 4, 1),
    ("hopper", 4, 256, "ieee"): Tiles(32, 32, 8, 1),
    ("blackwell", 4, 128): Tiles(32, 32, 4, 2),
    ("blackwell", 4, 256): Tiles(16, 16, 4, 1),
    ("ampere", 2, 64): Tiles(32, 64, 4, 2),
    ("ampere", 2, 128): Tiles(64, 64, 8, 2),
    ("ampere", 2, 256): Tiles(32, 32, 4, 2),
    ("ampere", 4, 128): Tiles(32, 32, 4, 2),
    ("ampere", 4, 256): Tiles(16, 16, 4, 1),
    ("ampere", 4, 64, "ieee"): Tiles(32, 64, 4, 1),
    ("ampere", 4, 128, "ieee"): Tiles(32, 32, 4, 1),
    ("ampere", 4, 256, "ieee"): Tiles(16, 32, 8, 1),
    ("other", 2, 128): Tiles(32, 32, 4, 1),
    ("other", 2, 256): Tiles(16, 16, 4, 1),
    ("other", 4, 64): Tiles(32, 32, 4, 1),
    ("other", 4, 256): Tiles(16, 16, 4, 1),
    ("other", 4, 128, "ieee"): Tiles(16, 32, 4, 1),
    ("interpreter", 2, 512): Tiles(32, 32, 4, 1),
    ("interpreter", 4, 512): Tiles(32, 32, 4, 1),
}

DQ: Table = {
    ("hopper", 2, 64): Tiles(64, 64, 4, 3),
    ("hopper", 2, 64, "32 tokens"): Tiles(32, 32, 2, 2),
    ("hopper", 2, 64, "64 tokens"): Tiles(64, 64, 4, 1),
    ("hopper", 2, 128): Tiles(128, 64, 8, 3),
    ("hopper", 2, 128, "32 tokens"): Tiles(32, 32, 2, 2),
    ("hopper", 2, 128, "64 tokens"): Tiles(64, 64, 4, 2),
    ("hopper", 2, 128, "scores"): Tiles(128, 32, 8, 2),
    ("hopper", 2, 256): Tiles(128, 32, 8, 2),
    ("hopper", 2, 512): Tiles(32, 32, 8, 2),
    ("hopper", 4, 128): Tiles(128, 32, 8, 1),
    ("hopper", 4, 256): Tiles(64, 16, 4, 1),
    ("hopper", 4, 64, "ieee"): Tiles(64, 32, 4, 1),
    ("hopper", 4, 128, "ieee"): Tiles(64, 64, 8, 1),
    ("hopper", 4, 64, "tf32x3"): Tiles(128, 32, 8, 1),
    ("hopper", 4, 128, "tf32x3"): Tiles(64, 16, 4, 1),
    ("hopper", 4, 256, "ieee"): Tiles(32, 32, 8, 1),
    ("hopper", 4, 256, "tf32x3"): Tiles(16, 16, 4, 1),
    ("hopper", 4, 512): Tiles(16, 32, 8, 1),
    ("blackwell", 4, 128): Tiles(32, 32, 4, 2),
    ("blackwell", 4, 256): Tiles(16, 16, 4, 1),
    ("ampere", 2, 64): Tiles(64, 64, 4, 3),
    ("ampere", 2, 64, "scores"): Tiles(64, 32, 4, 3),
    ("ampere", 2, 128): Tiles(64, 32, 4, 3),
    ("ampere", 2, 256): Tiles(32, 32, 4, 2),
    ("ampere", 2, 512): Tiles(16, 16, 8, 2),
    ("ampere", 4, 128): Tiles(32, 32, 4, 2),
    ("ampere", 4, 256): Tiles(16, 16, 4, 1),
    ("ampere", 4, 64, "ieee"): Tiles(64, 32, 4, 1),
    ("ampere", 4, 128, "ieee"): Tiles(32, 32, 4, 1),
    ("ampere", 4, 512): Tiles(8, 16, 4, 1),
    ("ampere", 4, 512, "dropout"): Tiles(16, 16, 8, 1),
    ("other", 2, 128): Tiles(32, 32, 4, 1),
    ("other", 2, 256): Tiles(16, 16, 4, 1),
    ("other", 2, 512): Tiles(32, 16, 4, 1),
    ("other", 4, 64): Tiles(32, 32, 4, 1),
    ("other", 4, 256): Tiles(16, 16, 4, 1),
    ("other", 4, 128, "ieee"): Tiles(32, 16, 4, 1),
    ("other", 4, 512): Tiles(16, 16, 4, 1),
    ("interpreter", 2, 512): Tiles(32, 32, 4, 1),
    ("interpreter", 4, 512): Tiles(32, 32, 4, 1),
}

BIAS: Table = {
    ("hopper", 2, 512): Tiles(16, 32, 8, 1),
    ("ampere", 2, 512): Tiles(16, 32, 8, 1),
}
"""Rows of a bias's gradient, under dq's keys. They stand where its kernel spills with dq's rows."""

SINGLE: dict[tuple[str | int, ...], tuple[Tiles, Tiles]] = {
    ("hopper", 2, 64, 32): (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 2)),
    ("hopper", 2, 32, 64): (Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 2)),
    ("hopper", 2, 64, 64): (Tiles(64, 64, 4, 1), Tiles(64, 64, 8, 2)),
    ("hopper", 2, 128, 32): (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    ("hopper", 2, 128, 64): (Tiles(64, 64, 4, 1), Tiles(64, 64, 8, 2)),
    ("ampere", 2, 64, 32): (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 2)),
    ("ampere", 2, 32, 64): (Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
    ("ampere", 2, 64, 64): (Tiles(64, 64, 4, 1), Tiles(64, 64, 8, 1)),
    ("ampere", 2, 128, 32): (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    ("ampere", 2, 128, 64): (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    ("interpreter", 2, 128, 32): (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    ("interpreter", 4, 128, 32): (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
}
"""Rows of forward and backward of heads whose score matrix is one tile, by head size and tokens."""

DECODE: Table = {
    ("hopper", 2, 128, 16): Tiles(16, 64, 4, 7),
    ("hopper", 2, 256, 16): Tiles(16, 32, 4, 7, 255),
    ("hopper", 2, 128, 64): Tiles(64, 32, 4, 7),
    ("hopper", 2, 256, 64): Tiles(64, 32, 8, 3),
    ("hopper", 2, 576, 64): Tiles(64, 16, 8, 8),
    ("hopper", 2, 576, "V in K"): Tiles(64, 32, 8, 8),
    ("hopper", 4, 128, 16): Tiles(16, 32, 4, 3),
    ("hopper", 4, 256, 16): Tiles(16, 32, 8, 3),
    ("hopper", 4, 576, 16): Tiles(16, 32, 8, 1),
    ("hopper", 1, 128, 16): Tiles(16, 128, 4, 5, 255),
    ("hopper", 1, 128, 64): Tiles(64, 32, 8, 5),
    ("hopper", 1, 256, 64): Tiles(32, 32, 8, 3),
    ("blackwell", 2, 576, 64): Tiles(16, 16, 8, 7),
    ("blackwell", 4, 576, 16): Tiles(16, 16, 8, 1),
    ("ampere", 2, 128, 16): Tiles(16, 64, 4, 5, 255),
    ("ampere", 2, 256, 16): Tiles(16, 32, 4, 5),
    ("ampere", 2, 128, 64): Tiles(64, 64, 8, 5),
    ("ampere", 2, 256, 64): Tiles(64, 32, 8, 3),
    ("ampere", 2, 576, 16): Tiles(16, 16, 8, 5),
    ("ampere", 4, 128, 16): Tiles(16, 32, 4, 3),
    ("ampere", 4, 256, 16): Tiles(16, 32, 8, 3),
    ("ampere", 4, 576, 16): Tiles(16, 16, 8, 1),
    ("other", 2, 128, 16): Tiles(16, 32, 4, 5),
    ("other", 2, 256, 16): Tiles(16, 32, 4, 3),
    ("other", 2, 128, 64): Tiles(64, 32, 4, 3),
    ("other", 2, 256, 64): Tiles(64, 32, 8, 1),
    ("other", 2, 576, 16): Tiles(16, 16, 4, 1),
    ("other", 4, 128, 16): Tiles(16, 32, 4, 1),
    ("other", 4, 256, 16): Tiles(16, 16, 4, 1),
    ("other", 4, 576, 16): Tiles(16, 16, 4, 1),
    ("interpreter", 4, 576, 16): Tiles(16, 32, 4, 1),
    ("interpreter", 4, 576, 64): Tiles(64, 64, 4, 1),
}
"""Rows of the kernel that splits keys, by the bytes of an entry of K, and the rows of its tiles; where 8-bit keys have
none, those of 16 bits serve; "V in K" is where tiles of K serve as V. Of the stages, K and V have half each, and behind
a look-up of a page a quarter, as Triton divides them among the loads of a chain."""

SHORT = (32, 64)
"""Tokens up to which calls have separate rows."""
SPECIAL = ("ieee", "tf32x3")
"""Precisions that have separate rows."""
TABLES = {"forward": FORWARD, "dkdv": DKDV, "dq": DQ}
BY_DEFAULT = {4: 256}
"""The largest head size that calls bring here by default, for bytes per entry. In fp32 some results above it are less
accurate on a GPU than the rule allows (tests/card/test_wide_heads.py), so they run only by name."""

HOPPER = ("sm_90", "sm_100", "sm_103")
BLACKWELL = ("sm_100", "sm_103")
AMPERE = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121")
LITTLE_MEMORY = ("sm_86", "sm_89", "sm_120", "sm_121")
"""Chips with 99 KiB of shared memory, too little for the rows of "dropout"."""
SHARED_KIB = {**dict.fromkeys(HOPPER, 227), "sm_80": 163, "sm_87": 163, **dict.fromkeys(LITTLE_MEMORY, 99)}
"""Shared memory of a block on chips whose rows have more than one stage."""
NO_MATRIX_UNITS = ("sm_70", "sm_72", "sm_75")
"""Chips whose matrix units Triton no longer uses."""
OTHER = (*NO_MATRIX_UNITS, "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1200", "gfx1201")
TARGETS = (*HOPPER, *AMPERE, *OTHER)
"""Every chip that Triton reaches."""
WITH_FP8 = (*HOPPER, "sm_89", "sm_120", "sm_121")
"""Chips on which Triton converts e4m3."""


def chips(target: str) -> tuple[str, ...]:
    """Return the kinds of rows that a target reads, by preference."""
    if target == "cpu":
        return ("interpreter",)
    if target in BLACKWELL:
        return ("blackwell", "hopper")
    return ("hopper",) if target in HOPPER else ("ampere",) if target in AMPERE else ("other",)


def precision(p: Problem) -> str | None:
    """Return the precision of fp32 products; None if none is accurate enough, or if the type is not fp32.

    The interpreter ("cpu") computes in plain fp32, which is accurate enough for every name. It runs the kernels' path
    for FMA units if "ieee" is requested. Otherwise it runs the path for matrix units, which is faster there.
    """
    if p.dtype != torch.float32:
        return None
    if p.target == "cpu":
        return "ieee" if p.recipe.precision == "ieee" else "tf32x3"
    return p.precision(precisions(p))


def precisions(p: Problem) -> tuple[str, ...]:
    """Return the precisions that tl.dot offers on a problem's chip, at its head sizes."""
    if p.target in NO_MATRIX_UNITS or max(p.D, p.D_v) > 256:  # where split operands would fill the registers
        return ("ieee",)
    if p.target.startswith("gfx"):
        return ("ieee", "bf16x6", "bf16x3")
    return ("ieee", "bf16x6", "tf32x3", "bf16x3", "tf32")


class Rows(NamedTuple):
    """The row of each of TABLES for one problem."""

    forward: Tiles
    dq: Tiles
    dkdv: Tiles | None = None
    """None where the backward runs in chunks."""


def current(p: Problem) -> Rows:
    """Return the rows in use for a problem."""
    tables = in_use("triton", TABLES, p.q.device)
    return Rows(**{name: with_room(p, tables[name][key], name) for name, key in keys(p).items()})


def with_room(p: Problem, tiles: Tiles, kernel: str) -> Tiles:
    """Return a row with as many stages as shared memory holds beside what masks and scores read for each entry of S.

    Triton keeps the tiles of a loop's operands for each stage, and what else a loop reads for one stage less.
    """
    if tiles.stages == 1 or not (of_entry := entry_bytes(p)):
        return tiles
    of_q, of_v = (max(64, 1 << (d - 1).bit_length()) * p.dtype.itemsize for d in (p.D, p.D_v))
    stay, each = {
        "forward": (tiles.B_r * of_q, tiles.B_c * (of_q + of_v)),
        "dkdv": (tiles.B_c * (of_q + of_v), tiles.B_r * (of_q + of_v)),
        "dq": (tiles.B_r * (of_q + of_v), tiles.B_c * (of_q + of_v)),
    }[kernel]
    entries, most = of_entry * tiles.B_r * tiles.B_c, SHARED_KIB.get(p.target, 0) << 10
    for stages in range(tiles.stages, 1, -1):
        if stay + stages * each + (stages - 1) * entries <= most:
            return tiles._replace(stages=stages)
    return tiles._replace(stages=1)


@once
def entry_bytes(p: Problem) -> int:
    """Count the bytes that masks and scores read for each entry of S, from tensors that rows and columns index."""
    masks, scores, _ = p.values(p.extra)  # type: ignore[arg-type]
    traced = [value.traced for value in (*masks, *scores)]
    return sum([
        tensors[node[1]].dtype.itemsize
        for program, tensors, *_ in traced
        for n, node in enumerate(program.nodes)
        if node[0] == "load" and {"i", "j"} <= program.reads[n]
    ])  # fmt: skip


def keys(p: Problem) -> dict[str, Any]:
    """Return the keys of a problem's rows, by table."""
    return {name: choose(table, p) for name, table in TABLES.items() if name != "dkdv" or not in_chunks(p)}


def choose(table: Table, p: Problem) -> tuple[str | int, ...]:
    """Return a table's key for a problem, with the smallest head size that is large enough."""
    kinds, special = chips(p.target), "scores" if p.recipe.score or p.recipe.dropout > 0.0 else ""
    if (name := precision(p)) in SPECIAL:
        special = name
    specials = ("dropout", special) if p.recipe.dropout and p.target not in LITTLE_MEMORY else (special,)
    if not special:
        specials = tuple([f"{tokens} tokens" for tokens in SHORT if max(p.M, p.N) <= tokens])
    if name == "ieee":
        kinds = kinds[-1:]  # Blackwell has separate rows only for its matrix units
    entry_bytes = 4 if p.dtype == torch.float32 else 2
    for size in (64, 128, 256, 512):
        for kind in kinds:
            row = (kind, entry_bytes, size)
            if max(p.D, p.D_v) <= size and (
                found := [key for key in (*((*row, word) for word in specials), row) if key in table]
            ):
                return found[0]
    raise AssertionError(f"no tiles for {p.target}, {p.dtype}, head size {max(p.D, p.D_v)}")


def bias_tiles(p: Problem, dq: Tiles) -> Tiles:
    """Return the tile of a bias's gradient for a problem: that of BIAS, or dq's with stages that fit.

    A stage holds tiles of four operands, dq's only of two, so large heads leave room for fewer stages.
    """
    stages = max(1, min(dq.stages, 256 // max(p.D, p.D_v)))
    return BIAS.get(choose(DQ, p)) or dq._replace(stages=stages)


def in_chunks(p: Problem) -> bool:
    """Tell whether a backward runs in chunks, as registers hold no tile of a gradient. Then DQ's rows are of a bias's
    gradient alone."""
    return max(p.D, p.D_v) > 256


def single_tile(p: Problem) -> tuple[Tiles, Tiles] | None:
    """Return the tiles of forward and backward that hold a whole head, or None where there are none."""
    inexact = any(p.products.code_types) or precision(p) == "ieee"
    if not p.layout.uniform or inexact or 0 in (p.B, p.M, p.N):
        return None
    for size, tokens, kind in product((32, 64, 128), SHORT, chips(p.target)):
        row = kind, p.dtype.itemsize, size, tokens
        if max(p.D, p.D_v) <= size and max(p.M, p.N) <= tokens and row in SINGLE:
            return SINGLE[row]
    return None


def decode_tiles(p: Problem, v_in_k: bool = False) -> Tiles:
    """Return the tile of the kernel that splits keys. Where results are invariant, its rows are one number for all."""
    sizes = (4,) if p.dtype == torch.float32 or p.target == "cpu" else (1, 2) if p.k.dtype.itemsize == 1 else (2,)
    rows = (16, 64) if p.M * (p.H // p.H_k) <= 16 and not p.layout.invariant else (64, 16)
    for size, count, n, kind in product((128, 256, 576), ("V in K",) * v_in_k + rows, sizes, chips(p.target)):
        if max(p.D, p.D_v) <= size and (kind, n, size, count) in DECODE:
            return DECODE[kind, n, size, count]
    raise AssertionError(f"no tiles for {p.target}, {p.dtype}, head size {max(p.D, p.D_v)}")
