"""The backward's main kernel, rehearsed: what all its roles do for a problem, without a GPU and without numbers."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hopper import pretend
from hopper.pretend import INSTEAD, Box, Numbers, Pointer, Scalar, World, functions

from tilewise.hopper.backward import Shape, Tile
from tilewise.hopper.launch import plan
from tilewise.hopper.shares import Shares
from tilewise.problem import Operands, Problem
from tilewise.tile.launch import device_values
from tilewise.tile.masks import Part
from tilewise.tile.rows import Packed
from tilewise.tile.visits import Variant, Visits


def weights(S, logs, place, j0, edge, *_):
    """In place of the softmax: whether it is asked for the mask, and where."""
    pretend.world.record("weights", int(place.b), int(place.h), int(place.i0), int(j0), bool(edge))
    return Numbers()


def store_inside(G, x, b, h, row, count, *_):
    """In place of storing rows one by one."""
    if count > 0:
        pretend.world.record("stored", G.name, 0, int(h), int(row))


INSTEAD["tilewise.hopper.forward"] = {"zero_from": lambda *_: None, "store_inside": store_inside}
INSTEAD["tilewise.hopper.dice"] = {"rolled": lambda *_: Numbers()}
INSTEAD["tilewise.hopper.gradients"] = {
    "weights": weights, "gradient": lambda *_: Numbers(), "rounded": lambda P, _: (P, P),
}  # fmt: skip


class Rehearsal(NamedTuple):
    """What the kernel was compiled for, query tiles of a head in the sums of dQ, and all that happened."""

    tile: Tile
    blocks: int
    events: list[tuple[Any, ...]]


def rehearse(p: Problem, x: Operands, seen: torch.Tensor, programs: int, section: int) -> Rehearsal:
    """A call's backward by so many programs, with so many matrices side by side. Where tiles are listed, `seen` is
    the mask written out, (H, M, N)."""
    pretend.world = world = World(programs)
    tile, made = plan(p).backward_tile, plan(p).backward_shape
    shape = Shape(*map(Scalar, made._replace(section=section)))
    packed = Packed(*(Pointer(ends.tolist()) for ends in x.extra[-2:])) if p.recipe.varlen else None
    dropout = SimpleNamespace(seed=Numbers(), threshold=Numbers(), rescale=Numbers()) if p.recipe.dropout else None
    lists = listed(seen, tile.B_R, tile.B_C) if p.listed else None
    variant = Variant(() if p.listed else intervals(p, x), (), dropout, lists)
    heads, keys = p.B * p.H, p.B * p.H_k * made.key_tiles
    turns = turns_given(p, packed, variant, tile, shape) if tile.TURN else None
    ready = None if tile.SIDES or packed else Pointer([0] * made.heads)
    shares = Shares(Numbers(), Pointer([0] * (2 * keys))) if tile.SHARES > 1 else None
    counter = Pointer([0, 0])
    q, do = (Box(name, 2 * tile.D * tile.B_R) for name in ("q", "do"))
    k, v = (Box(name, 2 * tile.D * tile.B_C) for name in ("k", "v"))
    L, D = (Box(name, 4 * tile.B_R) for name in "LD")
    dQ, dK, dV = map(Box, ("dq", "dk", "dv"))
    arguments = (
        q, k, v, do, L, D, dQ, Numbers(), ready, Pointer([0] * heads), dK, dV, dK, dV, shares, counter, turns, packed,
        variant, 1.0, 1.0, shape, tile,
    )  # fmt: skip
    kernel = functions("tilewise.hopper.backward")["backward"]
    world.run([((n,), lambda: kernel(*arguments)) for n in range(programs)])
    if world.failure:
        raise world.failure
    assert counter.memory == [0, 0], "the next launch needs zeros"
    return Rehearsal(tile, made.blocks, world.events)


def intervals(p: Problem, x: Operands) -> tuple[Part, ...]:
    """The mask's parts."""

    def captured(given: Any) -> Any:
        return Pointer(given.flatten().tolist()) if isinstance(given, torch.Tensor) else Scalar(given)

    masks = functions("tilewise.tile.masks")
    parts, _, _ = device_values(p, x.extra)
    return tuple(Part(*(masks[f.fn.__name__] for f in part[:3]), tuple(map(captured, part.captured))) for part in parts)


def listed(seen: torch.Tensor, B_R: int, B_C: int) -> Visits:
    """The lists that `list_tiles` writes, by key tile."""
    H, M, N = seen.shape
    size = -(-M // B_R) + 2
    numbers = []
    for matrix in seen:
        for j in range(0, N, B_C):
            tiles = [matrix[i : i + B_R, j : j + B_C] for i in range(0, M, B_R)]
            full = [m for m, x in enumerate(tiles) if x.all() and x.shape == (B_R, B_C)]
            partial = [m for m, x in enumerate(tiles) if x.any() and m not in full]
            entries = [len(partial), len(full), *partial, *full]
            numbers += entries + [0] * (size - len(entries))
    return Visits(Pointer(numbers), Scalar(0), Scalar(len(numbers) // H), Scalar(size))


def turns_given(p: Problem, packed: Packed | None, variant: Variant, tile: Tile, shape: Shape) -> Pointer:
    """Who adds first, as the kernel before says."""
    turns = Pointer([-1] * (int(shape.blocks) * p.H * (1 if packed else p.B)))
    give = functions("tilewise.hopper.turns")["give_turns"]
    sizes = shape.M, shape.N, shape.H, shape.tiles, shape.blocks
    for n in range(p.B * p.H * int(shape.tiles)):
        pretend.world.here.role = (n,)
        give(turns, packed, variant, *sizes, tile.B_R, tile.B_C, tile.TURN)
    return turns
