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
OVERLAP = 2
"""How often an entry is read, at most, where the entries of all ranges are gathered."""
FAR = 1024.0
"""From here on a literal may move a row's lse so far that rounding it changes P."""
AT_A_TIME = 1 << 20
"""Entries that `look` evaluates at a time."""


class Grid(NamedTuple):
    """The tiles of logits (B, H, M, N), of B_r rows and B_c keys.

    Row r has the index i = r + shift, and the first of B batch entries the index b = first.
    """

    B: int
    H: int
    M: int
    N: int
    B_r: int
    B_c: int
    shift: int = 0
    first: int = 0


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
def far(text: str) -> bool:
    """Tell whether the output of a score may be far above its input, as with a bias, or a whole row far below, as with
    -1e9 in place of hidden keys."""
    least, _ = _static(text, later=False, s=(0.0, 0.0))
    numbers = [*[literal(node) for node in decode(text).nodes], float(least or 0.0)]
    large = any([isinstance(x, float) and FAR <= abs(x) < math.inf for x in numbers])
    return large or _static(text, later=False, s=(None, 0.0))[1] is None


@lru_cache(1024)
def hides_later_keys(text: str) -> bool:
    """Tell whether no row of a mask sees a key j > i, whatever tensors hold."""
    return _static(text, later=True)[1] is False


def _static(text: str, later: bool, **known: tuple[Any, Any]) -> list[Any]:
    """Return the numbers between which a program's output lies in every call, or None."""
    build, program = Builder(), decode(text)
    index = (0, None)  # rows have any index, negative ones where the last row is the last key's
    inputs = {"b": index, "h": index, "i": (None, None), "j": index, **known}
    found = Bounds(program, build, inputs, static=True, later=later).found[program.outputs[0]]
    return [None if end is None else literal(build.nodes[end.n]) for end in found]


class Box(NamedTuple):
    """Ranges of indices in one dimension: the first and last ones inside of the tensor.

    inside: whether the whole range is; None if all are.
    levels: for every k with ranges of 2^k to 2^(k + 1) - 1 indices, which of them these are; None for all.
    most: how many indices the longest range has.
    """

    lo: Tensor
    hi: Tensor
    inside: Tensor | None
    levels: list[tuple[int, Tensor | None]]
    most: int = 1


class Ranges:
    """The entries of a tensor between two indices of each dimension: `least[lo, hi, lo, hi]` of them, and `greatest`.

    Where ranges overlap little, their entries are gathered. Else those of 2^k neighbors are computed once, for every k
    that is asked for: two of them are any range, four in two dimensions. A range that leaves the tensor gets the bounds
    of all entries.
    """

    def __init__(self, t: Tensor) -> None:
        self.bools = t.dtype == torch.bool
        self.t = t.detach().view(torch.uint8) if self.bools else t.detach()
        self.least = Extreme(self, torch.minimum, torch.amin)
        self.greatest = Extreme(self, torch.maximum, torch.amax)
        self.ends: tuple[Tensor, ...] = ()
        self.boxes: list[Box] = []
        self.gathered: Tensor | None = None

    def boxes_of(self, ends: tuple[Tensor, ...]) -> list[Box]:
        """Return the ranges of all dimensions; the last ones are saved for the other of least and greatest."""
        if not self.ends or any([x is not y for x, y in zip(ends, self.ends, strict=True)]):
            self.ends = ends
            self.boxes = [box(*x) for x in zip(self.t.shape, ends[::2], ends[1::2], strict=True)]
            ranges = torch.broadcast_tensors(*[x.lo for x in self.boxes])[:1]  # of a tensor without dimensions, none
            count = sum([x.numel() for x in ranges]) * math.prod([x.most for x in self.boxes])
            self.gathered = self.gather() if count <= min(FEW, OVERLAP * self.t.numel()) else None
        return self.boxes

    def gather(self) -> Tensor:
        """Return the entries of each range, in dimensions behind those of the ranges; the last one may be repeated."""
        dims, index = len(self.boxes), []
        for d, x in enumerate(self.boxes):
            first, last = [end[(...,) + (None,) * dims] for end in (x.lo, x.hi)]
            if x.most > 1:
                steps = torch.arange(x.most, device=first.device).view(-1, *[1] * (dims - 1 - d))
                first = (first + steps).minimum(last)
            index.append(first)
        return self.t[tuple(index)]


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
    fewest, most = [int(x) for x in count.aminmax()]
    found = {fewest.bit_length() - 1, most.bit_length() - 1}
    if len(found) > 1:
        found = {x.bit_length() - 1 for x in count.unique().tolist()}
        return Box(first, last, inside, [(k, (count >> k) == 1) for k in sorted(found)], most)
    return Box(first, last, inside, [(k, None) for k in found], most)


class Extreme:
    """The least, or the greatest, of ranges."""

    def __init__(self, ranges: Ranges, pick: Callable[..., Tensor], pick_of: Callable[..., Tensor]) -> None:
        self.ranges, self.pick, self.pick_of = ranges, pick, pick_of
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def __getitem__(self, ends: tuple[Tensor, ...]) -> Tensor:
        boxes, gathered = self.ranges.boxes_of(ends), self.ranges.gathered
        if gathered is None and sum([x.levels[-1][0] > 0 for x in boxes]) > 1 and self.ranges.t.numel() > FEW:
            return self.of_all()
        inside = [x.inside for x in boxes if x.inside is not None]
        found = self.of_all() if inside else None
        if gathered is not None:
            value = self.pick_of(gathered, dim=tuple(range(-len(boxes), 0)))
            return value if found is None else torch.where(reduce(torch.logical_and, inside), value, found)
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
    if not tensors:
        return _without_tensors(program, tuple(numbers), grid, real)
    ranges = [Ranges(t) for t in tensors]
    three: list[Any] = [x for t, of in zip(tensors, ranges, strict=True) for x in (t, of.least, of.greatest)]
    return _tiles(program, three, numbers, grid, real, tensors[0].device)


def _tiles(
    program: Program, three: Sequence[Any], numbers: Sequence[Any], grid: Grid, real: torch.dtype, device: Any
) -> tuple[Tensor, Tensor]:
    """Return the same, given for each tensor the three that `bounds` reads."""
    B, H, M, N, B_r, B_c, shift, first = grid
    reads = program.reads[program.outputs[0]]
    rows, keys = torch.arange(shift, M + shift, B_r, device=device)[:, None], torch.arange(0, N, B_c, device=device)
    inputs = {
        "b": torch.arange(first, first + (B if "b" in reads else 1), device=device)[:, None, None, None],
        "h": torch.arange(H if "h" in reads else 1, device=device)[:, None, None],
        "i_row": rows,
        "i_row_last": (rows + (B_r - 1)).clamp(max=M + shift - 1),
        "i_key": keys,
        "i_key_last": (keys + (B_c - 1)).clamp(max=N - 1),
        "shift": torch.tensor(shift, device=device),
    }
    certain, possible = run(bounds(program.text), inputs, three, numbers, real)
    shape = len(inputs["b"]), len(inputs["h"]), len(rows), len(keys)
    return possible.expand(shape), certain.expand(shape)


@lru_cache(64)
def _without_tensors(
    program: Program, numbers: tuple[Any, ...], grid: Grid, real: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the same of a mask without tensors, which is the same in every call."""
    return _tiles(program, (), numbers, grid, real, "cpu")


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
        inputs = {"b": b + grid.first, "h": h, "i": i, "j": j, "shift": i.new_tensor(grid.shift)}
        (seen,) = run(program, inputs, tensors, numbers, real)
        at = tuple(open_tiles.T)
        some[at] = (seen & inside).flatten(1).any(1)
        every[at] = (seen | ~inside).flatten(1).all(1)
    return some, every
