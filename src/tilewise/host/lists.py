"""Lists of the tiles that a mask leaves: made by a kernel, or carried by the mask."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.operands import Operands
from ..call.problem import Problem
from ..tile.ranges import TileLists, attention_list_tiles
from ..values.listed import TileList
from .arguments import cdiv, lengths, odd, packed
from .launch import Launch, current_stream
from .values import device_values

TILE_LIST = TileList.__name__
"""What a recipe calls it."""


def tile_lists(
    p: Problem, pl: Any, tiles: Any, parts: Any, x: Operands, by_key: bool
) -> tuple[TileLists | None, list[Launch]]:
    """Return lists of the tiles with unmasked entries, and the launch that writes them.

    Interval masks need no lists: there the result is (None, []). A mask that carries its lists needs no launch. This
    function reads `compiled` of the plan `pl`, and `B_r` and `B_c` of its tiles.
    """
    if not p.listed:
        return None, []
    if TILE_LIST in [name for name, *_ in p.recipe.mask]:
        made = [part for part in p.values(x.extra)[0] if isinstance(part, TileList)]
        return addresses(made_for(made, tiles, by_key)), []
    lists, launch = new_lists(p, pl, tiles, parts, x, by_key)
    return addresses(lists), [launch]


def made_for(made: Sequence[TileList], tiles: Any, by_key: bool) -> Tensor:
    """Return the one of a mask's lists that holds these tiles. Raise ValueError if none does."""
    for one in made:
        if (one.by_key, one.B_r, one.B_c) == (by_key, tiles.B_r, tiles.B_c):
            return one.tiles
    shown = ", ".join(f"{one.B_r}x{one.B_c} by {'key' if one.by_key else 'query'}" for one in made)
    raise ValueError(
        f"mask must be listed for tiles of {tiles.B_r}x{tiles.B_c} by {'key' if by_key else 'query'}, got {shown}; "
        "call tilewise.listed with the type, head sizes and options of this call, and with gradients enabled if it has "
        "a backward"
    )


def make_lists(p: Problem, pl: Any, x: Operands, kernels: Sequence[tuple[Any, bool]]) -> tuple[TileList, ...]:
    """List the mask's tiles for every (tiles, by_key) of `kernels`, each kind once, on q's device. q, k and v of x
    are not read."""
    if not p.listed:
        return ()
    parts, _, _ = device_values(p, x.extra)
    device, made = x.q.device, {}
    for tiles, by_key in kernels:
        kind = by_key, tiles.B_r, tiles.B_c
        if kind not in made:
            lists, launch = new_lists(p, pl, tiles, parts, x, by_key)
            launch.run(current_stream(device))
            made[kind] = TileList(lists, *kind, p.M, p.N)
    return tuple(made.values())


def new_lists(p: Problem, pl: Any, tiles: Any, parts: Any, x: Operands, by_key: bool) -> tuple[Tensor, Launch]:
    """Return lists, unwritten, 4 bytes a tile: one per tile of queries, or `by_key` of keys; and what writes them."""
    of_rows, of_columns = cdiv(p.M, tiles.B_r), cdiv(p.N, tiles.B_c)
    count, across = (of_columns, of_rows) if by_key else (of_rows, of_columns)
    (batch, heads), device = _mask_shape(p), x.q.device
    lists = torch.empty((batch, heads, count, across + 2), dtype=torch.int32, device=device)
    kinds = torch.empty((batch, heads, count, across), dtype=torch.int8, device=device)
    constants = {"B_R": tiles.B_r, "B_C": tiles.B_c, "BY_KEY": by_key, "num_warps": 8}
    arguments = (addresses(lists), kinds, parts, packed(p, x), *lengths(p), heads, count, across)
    programs = batch * heads * count
    return lists, Launch(attention_list_tiles, programs, arguments, constants, pl.compiled, (tiles, by_key))


def addresses(lists: Tensor) -> TileLists:
    """Return lists as a kernel argument."""
    strides = [0 if size == 1 else stride for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True)]
    return TileLists(lists, *(odd(stride + 1) for stride in (*strides, lists.stride(2))))


def _mask_shape(p: Problem) -> tuple[int, int]:
    """Return for how many batch entries and heads the mask differs."""
    found, specs = set() if p.layout.uniform else {"B"}, iter(p.extra)
    for kind in p.kinds[: len(p.recipe.mask)]:
        found |= kind.varies_with([next(specs).shape for _ in kind.captures])
    return p.B if "B" in found else 1, p.H if "H" in found else 1
