"""What tiles of a mask show, by bounds of its program: all tiles at once, without a look at their entries.

Bounds that are too wide cost time, never correctness: `look` evaluates the tiles that they leave open.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arithmetic import Bounds
from .program import Builder, Program, decode, literal
from .run import run

FEW = 1 << 20
"""The most entries of a tensor whose minima and maxima are computed in two dimensions, for one read by row and key."""
AT_A_TIME = 1 << 20
"""Entries that `look` evaluates at a time."""


class Grid(NamedTuple):
    """The tiles of logits (B, H, M, N), of B_r rows and B_c keys. Row r has the index i = r + shift."""

    B: int
    H: int
    M: int
    N: int
    B_r: int
    B_c: int
    shift: int = 0


@lru_cache(1024)
def bounds(text: str) -> Program:
    """Return the program of (certain, possible) of a mask, for a tile.

    Its inputs are b, h, and the tile's first and last row and key: i_row, i_row_last, i_key, i_key_last. In place of
    each tensor it reads three: the tensor 3 t, and by first and last indices, t[first, last, first, last, ...], the
    least of its entries between them, 3 t + 1, and the greatest, 3 t + 2.
    """
    build = Builder()
    b, h, *ends = [
        build.wrap(build.add(("in", name))) for name in ("b", "h", "i_row", "i_row_last", "i_key", "i_key_last")
    ]
    inputs = {"b": (b, b), "h": (h, h), "i": ends[:2], "j": ends[2:]}
    program = decode(text)
    found = Bounds(program, build, inputs).found[program.outputs[0]]
    return build.done([found.lo.n, found.hi.n])


@lru_cache(1024)
def limits(text: str) -> tuple[float, float] | None:
    """Return what the output of a score lies between for all finite logits, None if it has no such bounds."""
    lo, hi = _static(text, later=False)
    return None if lo is None or hi is None or math.isinf(hi - lo) else (float(lo), float(hi))


@lru_cache(1024)
def hides_later_keys(text: str) -> bool:
    """Tell whether no row of a mask sees a key j > i, whatever tensors hold."""
    return _static(text, later=True)[1] is False


def _static(text: str, later: bool) -> list[Any]:
    """Return the numbers between which a program's output lies in every call, or None."""
    build, program = Builder(), decode(text)
    index = (0, None)  # rows have any index, negative ones where the last row is the last key's
    inputs = {"b": index, "h": index, "i": (None, None), "j": index}
    found = Bounds(program, build, inputs, static=True, later=later).found[program.outputs[0]]
    return [None if end is None else literal(build.nodes[end.n]) for end in found]


class Box(NamedTuple):
    """Ranges of indices in one dimension: the first and last ones inside of the tensor.

    inside: whether the whole range is; None if all are.
    levels: for every k with ranges of 2^k to 2^(k + 1) - 1 indices, which of them these are; None for all.
    """

    lo: Tensor
    hi: Tensor
    inside: Tensor | None
    levels: list[tuple[int, Tensor | None]]


class Ranges:
    """The entries of a tensor between two indices of each dimension: `least[lo, hi, lo, hi]` of them, and `greatest`.

    Those of 2^k neighbors are computed once, for every k that is asked for: two of them are any range, four in two
    dimensions. A range that leaves the tensor gets the bounds of all entries.
    """

    def __init__(self, t: Tensor) -> None:
        self.bools = t.dtype == torch.bool
        self.t = t.detach().view(torch.uint8) if self.bools else t.detach()
        self.least, self.greatest = Extreme(self, torch.minimum), Extreme(self, torch.maximum)
        self.ends: tuple[Tensor, ...] = ()
        self.boxes: list[Box] = []

    def boxes_of(self, ends: tuple[Tensor, ...]) -> list[Box]:
        """Return the ranges of all dimensions; the last ones are saved for the other of least and greatest."""
        if not self.ends or any([x is not y for x, y in zip(ends, self.ends, strict=True)]):
            self.ends = ends
            self.boxes = [box(*x) for x in zip(self.t.shape, ends[::2], ends[1::2], strict=True)]
        return self.boxes


def box(size: int, lo: Tensor, hi: Tensor) -> Box:
    """Return the range from lo to hi in a dimension of this size; negative indices count from its end."""
    inside = None
    first, last = lo, hi
    if lo.amin() < 0 or hi.amax() >= size:
        wrap = (hi < 0) * size
        first, last = lo + wrap, hi + wrap
        inside = (first >= 0) & (last < size)
        first, last = first.clamp(0, size - 1), last.clamp(0, size - 1)
    if lo is hi:
        return Box(first, first, inside, [(0, None)])
    count = last - first + 1
    found = {int(x).bit_length() - 1 for x in count.aminmax()}
    if len(found) > 1:
        found = {x.bit_length() - 1 for x in count.unique().tolist()}
        return Box(first, last, inside, [(k, (count >> k) == 1) for k in sorted(found)])
    return Box(first, last, inside, [(k, None) for k in found])


class Extreme:
    """The least, or the greatest, of ranges."""

    def __init__(self, ranges: Ranges, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.ranges, self.pick = ranges, pick
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def __getitem__(self, ends: tuple[Tensor, ...]) -> Tensor:
        boxes = self.ranges.boxes_of(ends)
        if sum([x.levels[-1][0] > 0 for x in boxes]) > 1 and self.ranges.t.numel() > FEW:
            return self.of_all()
        inside = [x.inside for x in boxes if x.inside is not None]
        found = self.of_all() if inside else None
        for levels in itertools.product(*[x.levels for x in boxes]):
            value = self.look_up([k for k, _ in levels], boxes)
            here = inside + [some for _, some in levels if some is not None]
            found = value if found is None else torch.where(reduce(torch.logical_and, here), value, found)
        return found  # type: ignore[return-value]

    def of_all(self) -> Tensor:
        """Return a bound of all entries, and of the 0 that kernels read outside. Of floating numbers, it is NaN."""
        t = self.ranges.t
        if t.is_floating_point():
            return t.new_full((), torch.nan)
        least, greatest = t.new_tensor([0, 1]) if self.ranges.bools else t.aminmax()
        return self.pick(self.pick(least, greatest), t.new_zeros(()))

    def look_up(self, levels: list[int], boxes: list[Box]) -> Tensor:
        """Return what is between the ends of ranges of 2^k to 2^(k + 1) - 1 entries."""
        table = self.table(tuple(levels))
        corners = []
        for k, x, size in zip(levels, boxes, table.shape, strict=True):
            some = [x.lo] if k == 0 else [x.lo, x.hi + 1 - (1 << k)]
            corners.append([end.clamp(0, size - 1) for end in some] if len(x.levels) > 1 else some)
        return reduce(self.pick, [table[corner] for corner in itertools.product(*corners)])

    def table(self, levels: tuple[int, ...]) -> Tensor:
        """Return the least or greatest of 2^k neighbors, from each entry on."""
        if not any(levels):
            return self.ranges.t
        if levels not in self.tables:
            d = next(d for d, k in enumerate(levels) if k)
            half = 1 << (levels[d] - 1)
            t = self.table((*levels[:d], levels[d] - 1, *levels[d + 1 :]))
            size = t.shape[d] - half
            self.tables[levels] = self.pick(t.narrow(d, 0, size), t.narrow(d, half, size))
        return self.tables[levels]


def tiles(
    program: Program,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    grid: Grid,
    real: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return whether an entry of a tile may be visible (possible), and whether all are (certain).

    Two bool tensors (B or 1, H or 1, rows of tiles, columns of tiles): B and H where the mask reads b and h. Of a tile
    that sticks out, only the entries inside count. A tile that is possible and not certain is open: `look` decides.
    """
    device = tensors[0].device if tensors else "cpu"
    B, H, M, N, B_r, B_c, shift = grid
    reads = program.reads[program.outputs[0]]
    rows, keys = torch.arange(0, M, B_r, device=device)[:, None], torch.arange(0, N, B_c, device=device)
    inputs = {
        "b": torch.arange(B if "b" in reads else 1, device=device)[:, None, None, None],
        "h": torch.arange(H if "h" in reads else 1, device=device)[:, None, None],
        "i_row": rows + shift,
        "i_row_last": (rows + B_r).clamp(max=M) - 1 + shift,
        "i_key": keys,
        "i_key_last": (keys + B_c).clamp(max=N) - 1,
        "shift": shift,
    }
    ranges = [Ranges(t) for t in tensors]
    three: list[Any] = [x for t, of in zip(tensors, ranges, strict=True) for x in (t, of.least, of.greatest)]
    certain, possible = run(bounds(program.text), inputs, three, numbers, real)
    shape = len(inputs["b"]), len(inputs["h"]), len(rows), len(keys)
    return possible.expand(shape), certain.expand(shape)


def look(
    program: Program,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    grid: Grid,
    possible: Tensor,
    certain: Tensor,
    real: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return the same exactly: evaluate every entry of the tiles that are possible and not certain."""
    B_r, B_c = grid.B_r, grid.B_c
    r, c = torch.arange(B_r, device=possible.device)[:, None], torch.arange(B_c, device=possible.device)
    some, every = possible.clone(), certain.clone()
    for open_tiles in (possible & ~certain).nonzero().split(max(1, AT_A_TIME // (B_r * B_c))):
        b, h, row, column = [x[:, None, None] for x in open_tiles.T]
        i, j = row * B_r + r, column * B_c + c
        inside = (i < grid.M) & (j < grid.N)
        i, j = i.clamp(max=grid.M - 1) + grid.shift, j.clamp(max=grid.N - 1)
        inputs = {"b": b, "h": h, "i": i, "j": j, "shift": grid.shift}
        (seen,) = run(program, inputs, tensors, numbers, real)
        at = tuple(open_tiles.T)
        some[at] = (seen & inside).flatten(1).any(1)
        every[at] = (seen | ~inside).flatten(1).all(1)
    return some, every
