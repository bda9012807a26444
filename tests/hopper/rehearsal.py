"""Hopper's forward and the backward's main kernels, rehearsed: what all their roles do for a call, without a GPU and
without numbers."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hopper import pretend
from hopper.pretend import INSTEAD, Box, Numbers, Pointer, Scalar, World, emitted, functions

from tilewise.call.operands import Grads, Operands
from tilewise.call.problem import Problem
from tilewise.hopper import by_gradient
from tilewise.hopper.backward.gqa_reduce import GqaSums
from tilewise.hopper.backward.items import Work
from tilewise.hopper.backward.kernel_by_gradient import Tile as GradientTile
from tilewise.hopper.counts import width_of_box
from tilewise.hopper.forward.eight_bits import Codes
from tilewise.hopper.fp32 import backward_launch as fp32_backward_launch
from tilewise.hopper.parts.call import Scratch
from tilewise.hopper.plan import FULL, mixed, plan
from tilewise.host.arguments import batch_of, odd, odd_counts, packed
from tilewise.host.plan import Launched
from tilewise.host.values import device_values
from tilewise.tile.cache import Batch
from tilewise.tile.dropout import Dropout
from tilewise.tile.masks import Part
from tilewise.tile.ranges import TileLists, Variant
from tilewise.tile.rows import Packed, Unused


def weights(S, logs, place, j0, partial, *_):
    """In place of the softmax: whether it is asked for the mask, and where."""
    pretend.world.record("weights", int(place.b), int(place.h), int(place.i0), int(j0), bool(partial))
    return Numbers()


def asked(place, variant, i, j0, j):
    """In place of the mask of the fp32 kernel."""
    pretend.world.record("weights", int(place.b), int(place.h), int(place.i0), int(j0), True)
    return Numbers()


def masked(S, place, row0, j0, variant):
    """In place of the forward's mask."""
    pretend.world.record("asked", int(place.b), int(place.h), int(row0), int(j0))
    return Numbers()


def pair(*_):
    """In place of what gives two tiles."""
    return Numbers(), Numbers()


def store_gradient(G, x, keys, row, *_):
    """In place of the fp32 kernel's storing."""
    pretend.world.record("stored", G.name, 0, int(keys.h_k), int(keys.k0 + row), 0)


def zero_outside(memory, first, end):
    """In place of zeroing rows of a tile."""
    pretend.world.record("zeroed", memory.cell.content, int(first), int(end))


def store_inside(G, x, b, h, row, count, d_v, column):
    """In place of storing rows one by one."""
    if count > 0:
        pretend.world.record("stored", G.name, 0, int(h), int(row), int(column))


def gradient(P, dP, logs, delta, S, place, j0, *_):
    """In place of dS: whose it is."""
    return Numbers((int(place.b), int(place.h), int(place.i0), int(j0)))


def sequence_of(cu, total, x, count, size):
    """In place of a search by a warp."""
    return max(b for b in range(int(count)) if not b or int((cu + b).get()) // size + b <= int(x))


def range_of_ds(queries, work, call, tile):
    """In place of one by a warp."""
    items, dq = (functions(f"tilewise.hopper.backward.{name}") for name in ("items", "dq"))
    tiles = int(call.shape.tiles)
    pretend.wait_equal(items["keys_done"](work, queries.chunk, call.shape, tile), tiles)
    numbers = range(max(int(queries.first), 0), min(int(queries.end), tiles))
    found = [n for n in numbers for half in range(2) if dq["is_there"](queries, half, Scalar(n), work, call, tile)[1]]
    return Scalar(min(found, default=tiles)), Scalar(max(found, default=-1) + 1)


INSTEAD["tilewise.hopper.forward.attend"] = {"finalize": pair}
INSTEAD["tilewise.hopper.forward.softmax"] = {
    "masked": masked, "row_max": pair, "top_of": pair, "any_below": lambda *_: Scalar(False),
}  # fmt: skip
INSTEAD["tilewise.hopper.parts.ragged"] = {
    "zero_from": lambda *_: None, "zero_outside": zero_outside, "store_inside": store_inside,
}  # fmt: skip
INSTEAD["tilewise.hopper.parts.dropout_bits"] = {"dropout_words": lambda *_: Numbers()}
INSTEAD["tilewise.hopper.backward.gradients"] = {
    "tile_probabilities": weights, "gradient": gradient, "rounded": lambda P, _: (P, P),
}  # fmt: skip
INSTEAD["tilewise.hopper.backward.items"] = {"sequence_of": sequence_of}
INSTEAD["tilewise.hopper.backward.dq"] = {"range_of_ds": range_of_ds}
INSTEAD["tilewise.tile.gradients"] = {"seen": asked}
INSTEAD["tilewise.hopper.fp32.backward"] = {"store_gradient": store_gradient}
INSTEAD["tilewise.hopper.fp32.backward_products"] = {"split_registers": lambda x, PIECES: (x,) * PIECES}


class Rehearsal(NamedTuple):
    """What the kernel was compiled for, its counts, and all that happened."""

    tile: Any
    shape: Any
    events: list[tuple[Any, ...]]


def rehearse_forward(
    p: Problem, x: Operands, seen: torch.Tensor, programs: int, section: int, **changed: Any
) -> Rehearsal:
    """Run a call's forward by `programs` programs, with `section` matrices side by side. Where tiles are listed,
    `seen` is the mask written out, (H, M, N). `changed` are constants of its tile that are others than the plan's."""
    pretend.world = World(programs)
    pl = plan(p)
    tile, made = pl.constants["tile"]._replace(**changed), pl.shape
    rows = 64 * tile.WARPGROUPS
    blocks = p.query_blocks(64), p.key_blocks(128)
    codes = Codes(*[Numbers()] * 4, *(Scalar(odd(n)) for n in blocks)) if tile.QK_BITS == 8 else None
    lists = listed(seen.mT, tile.B_C, rows) if p.listed else None
    variant = variant_of(p, x, lists)
    shape = given(made._replace(section=section))
    of_pages = pl.boxes[1].block_shape if tile.PAGE else None
    wide, of_v = (width_of_box(pieces) for pieces in (tile.D, tile.D_V))
    sizes = [1, 1, 64, wide], of_pages or [1, 1, tile.B_C, wide], of_pages or [1, 1, tile.B_C, of_v], [1, 1, 64, of_v]
    q, k, v, o = (Box(name, 2 * size[2] * size[3], size) for name, size in zip("qkvo", sizes, strict=True))
    counter = Pointer([0, 0])
    kernel = functions("tilewise.hopper.forward.kernel")["attention_forward"]
    order = functions("tilewise.tile.schedule")["assign"]
    end = Unused((), (), None, 1, 1, 1), variant, 1.0, shape, order, tile
    where = packed_of(p, x), cache_of(p, x)
    perform(kernel, (q, k, v, codes, o, rows_of(p, o), Numbers(), counter, *where, *end), counter)
    return Rehearsal(tile, made, pretend.world.events)


def rehearse_backward(p: Problem, x: Operands, seen: torch.Tensor, programs: int, section: int) -> Rehearsal:
    """A call's backward, likewise."""
    pretend.world = World(programs)
    fp32 = p.dtype == torch.float32
    tile, made = made_in_fp32(p, x) if fp32 else (plan(p).backward_tile, plan(p).backward_shape)
    split = isinstance(tile, GradientTile)
    if split:  # as few chunks as may have memory
        section = section if made.chunks == 1 else 1
        made = made._replace(section=section, resident=min(2 * section, made.heads * made.chunks))
    shape = given(made._replace(section=section), odd_counts if not fp32 else tuple)
    packed, variant = packed_of(p, x), variant_of(p, x, listed(seen, tile.B_R, tile.B_C) if p.listed else None)
    heads, keys = p.B * p.H, p.B * p.H_k * made.key_tiles
    ordered = not split and tile.SEMAPHORE_TILES
    dq_semaphore = semaphore_given(p, packed, variant, tile, made) if ordered else None
    gqa_sums = GqaSums(Numbers(), Pointer([0] * (2 * keys))) if tile.GQA_PROGRAMS > 1 else None
    counter = Pointer([0, 0])
    of_keys = 64 if fp32 else tile.B_C
    wide, of_v = (tile.D, tile.D) if fp32 else (width_of_box(columns) for columns in (tile.D, tile.D_V))
    rows = ("q", tile.B_R, wide), ("do", tile.B_R, of_v), ("k", of_keys, wide), ("v", of_keys, of_v)
    q, do, k, v = (Box(name, 2 * count * width, [1, 1, count, width]) for name, count, width in rows)
    L, D = (Box(name, 4 * tile.B_R) for name in "LD")
    dQ, dK, dV = (Box(name, 0, [8 if tile.D % 64 else 16, 256]) for name in ("dq", "dk", "dv"))
    if not fp32:
        dK.block_shape, dV.block_shape = (box.block_shape for box in plan(p).boxes[7:9])
    done = Pointer([0] * heads)
    if split:
        dQ.block_shape, dS = plan(p).boxes[9].block_shape, Box("ds", 2 * tile.B_R * tile.B_C)
        counts = made.semaphores + by_gradient.tiles_of_ds(tile, made) + 2 * made.heads * made.chunks
        work = Work(Pointer([0] * counts), Numbers() if made.chunks > 1 else None, gqa_sums, None, counter)
        work = work._replace(shift=Numbers() if p.biased else None)
        kernel = functions("tilewise.hopper.backward.kernel_by_gradient")["attention_backward_by_gradient"]
        strides = tuple([rows_of(p, box) for box in (dQ, dK, dV)])
        perform(kernel, (q, k, v, do, L, D, dS, dQ, dK, dV, strides, work, packed, variant, shape, tile), counter)
        return Rehearsal(tile, made, pretend.world.events)
    ready = None if fp32 or packed else Pointer([0] * made.heads)
    scratch = Scratch(
        Numbers(), Numbers(), Numbers(), dq_semaphore, ready, gqa_sums, done, Numbers() if p.biased else None
    )
    end = scratch, counter, packed, variant, shape, tile
    if fp32:
        kernel = functions("tilewise.hopper.fp32.backward")["attention_backward_fp32"]
        arguments = q, k, v, do, L, D, Numbers(), dQ, dK, dV, *end
    else:
        kernel = functions("tilewise.hopper.backward.kernel")["attention_backward"]
        arguments = q, k, v, do, L, D, dQ, dK, dV, (rows_of(p, dK), rows_of(p, dV)), *end
    perform(kernel, arguments, counter)
    return Rehearsal(tile, made, pretend.world.events)


def given(counts: Any, coded: Any = odd_counts) -> Any:
    """A launch's shape as its kernel gets it."""
    return type(counts)(*map(Scalar, coded(counts)))


def rows_of(p: Problem, box: Box) -> Any:
    """Where an output is stored row by row; None if it never is. The box gets the type of q."""
    box.dtype = p.dtype
    if p.layout.cu_q is None and p.out_dtype == p.dtype:
        return None
    return SimpleNamespace(name=box.name, ptr=SimpleNamespace(dtype=SimpleNamespace(element_ty=p.out_dtype)))


def perform(kernel: Any, arguments: tuple[Any, ...], counter: Pointer) -> None:
    """All programs of a launch, side by side."""
    world = pretend.world
    world.run([((n,), lambda: kernel(*arguments)) for n in range(world.programs)])
    if world.failure:
        raise world.failure
    assert counter.memory == [0, 0], "the next launch needs zeros"


def packed_of(p: Problem, x: Operands) -> Packed | None:
    """Where packed sequences end."""
    given = packed(p, x)
    return None if given is None else Packed(*map(memory_of, given))


def cache_of(p: Problem, x: Operands) -> Batch | None:
    """Where keys lie in a cache."""
    least = FULL if mixed(p) else None
    return None if p.layout.page(p) is None else Batch(*map(memory_of, batch_of(p, x, least=least)))


def memory_of(given: Any) -> Any:
    """A tensor of integers as memory, or an integer."""
    if given is None:
        return None
    return Pointer(given.flatten().tolist()) if isinstance(given, torch.Tensor) else Scalar(given)


def variant_of(p: Problem, x: Operands, lists: TileLists | None) -> Variant:
    """What the call asks for."""
    dropout = Dropout(Numbers(), Numbers(), Numbers()) if p.recipe.dropout else None
    return Variant(() if p.listed else intervals(p, x), (), dropout, lists)


def made_in_fp32(p: Problem, x: Operands) -> tuple[Any, Any]:
    """The tile and the counts of the launch itself."""
    device = torch.device("cpu")
    scratch, counter = fp32_backward_launch.empty_scratch(p, device), torch.zeros(2, dtype=torch.int32)
    *_, main = fp32_backward_launch.main_launches(p, Launched(), x, scratch, Grads(*x[:3], ()), counter)
    return main.constants["tile"], main.arguments[-1]


def intervals(p: Problem, x: Operands) -> tuple[Part, ...]:
    """The mask's parts."""
    masks = functions("tilewise.tile.masks")
    parts, _, _ = device_values(p, x.extra)
    own = [[masks.get(f.fn.__name__) or emitted(f) for f in part[:3]] for part in parts]
    return tuple([Part(*found, tuple(map(memory_of, part.captured))) for found, part in zip(own, parts, strict=True)])


def listed(seen: torch.Tensor, B_R: int, B_C: int) -> TileLists:
    """The lists that `list_tiles` writes, by key tile; of (H, N, M), by query tile."""
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
    return TileLists(Pointer(numbers), *(Scalar(odd(n + 1)) for n in (0, len(numbers) // H, size)))


def semaphore_given(p: Problem, packed: Packed | None, variant: Variant, tile: Any, made: Any) -> Pointer:
    """Who adds first, as the kernel before says."""
    dq_semaphore = Pointer([-1] * (made.blocks * p.H * (1 if packed else p.B)))
    give = functions("tilewise.hopper.backward.deterministic")["attention_backward_init_semaphore"]
    sizes = [Scalar(n) for n in (made.M, made.N, made.H, made.tiles, made.blocks)]
    for n in range(p.B * p.H * made.tiles):
        pretend.world.here.role = (n,)
        give(dq_semaphore, packed, variant, *sizes, tile.B_R, tile.B_C, tile.SEMAPHORE_TILES)
    return dq_semaphore
