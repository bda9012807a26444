"""Split keys on Hopper, for few rows of queries: two roles walk a program's piece of the line (tile/line.py).

    load    one warp    loads tiles of K and V by TMA, one after the other, also over the ends of sequences
    attend  4 warps     compute S^T = K Q^T, the online softmax in registers, O^T += V^T P^T

Transposed, a product has 64 keys by 16 rows of queries: the left operand has 64 rows at least. Stages hold what arrives
while `attend` ends one sequence and begins the next. Each has all columns of a tile up to 128, else a panel of 192 in
pieces of 128 and 64. Where values are the first columns of keys (MLA, DeepSeek-V2 2024), K's panels serve as V's.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...tile.cache import entry_of
from ...tile.combine import address, places_of, store_partial, write
from ...tile.line import line_of, piece_of, work_at
from ...tile.masks import visible
from ...tile.scores import Entries, apply_scores
from ..parts import triton_compat
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    launch_dependents,
    wait,
    wait_before,
    wait_dependencies,
)
from ..parts.pieces import allocate, pieces_of, tile_at, tile_in_loop, tile_of, wait_for, wait_for_both, zeros_of_piece
from ..parts.ragged import zero_outside
from .softmax import LOWEST, flags_of_warps, online, sums_of_threads, totals

IN_FLIGHT = gl.constexpr(65536)
"""Bytes that may be under way at a time, rounded up to stages: memory is slower with more."""
EARLY_TILES = gl.constexpr(2)
"""Key tiles that a program asks for before earlier kernels are complete, if it has stages for them."""


class Panels(NamedTuple):
    """Say how a tile of keys lies in stages: a stage's columns, how many K takes, and V; whether V's are K's first."""

    columns: int
    of_k: int
    of_v: int
    shared: bool


@gluon.constexpr_function
def pieces_after(panel, each, count):
    """Count the pieces of V, of so many, that lie after a panel."""
    return max(0, count - each * (panel + 1))


@gluon.constexpr_function
def stages_of_tile(panels):
    """Count the stages of a tile of keys, with those of its values."""
    return panels.of_k if panels.shared else panels.of_k + panels.of_v


@gluon.jit
def own_piece(batch, variant, H_k, W, split: gl.constexpr):
    """Return the line, the same in every warp, the program's key head and number, and its first and last place."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, split.B_B // 32)], [32], [gl.num_warps()], [0])
    line = line_of(batch, variant.mask, W, gl.arange(0, split.B_B, layout), split)
    h, w = gl.program_id(0) % H_k, gl.program_id(0) // H_k
    first, stop = piece_of(line, w)
    return line, h, w, first, stop


@gluon.jit
def pages_from(batch, work, row, SIZE: gl.constexpr, P: gl.constexpr):
    """Look up the pages of the next 32 boxes of SIZE rows, one a lane. Those after the last key are not read."""
    rows = row + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])) * SIZE
    if P == 0:
        return rows
    else:
        table = batch.table + entry_of(batch, work.b) * (batch.width // 2)
        return gl.load(table + rows // P, mask=rows < work.last, other=-1)


@gluon.jit
def first_of(batch, variant, H_k, W, SIZE: gl.constexpr, split: gl.constexpr):
    """Return the line, a program's key head, its first and last place, what it sums first, and the first pages."""
    line, h, _, at, stop = own_piece(batch, variant, H_k, W, split)
    work = work_at(line, gl.minimum(at, line.total - 1), stop, batch, variant.mask, split)
    return line, h, at, stop, work, pages_from(batch, work, work.lo * split.B_C, SIZE, split.P)


@gluon.jit
def entries_of(pages, entry, n, BOXES: gl.constexpr, P: gl.constexpr):
    """Return where a tile's boxes lie: in an entry of a contiguous cache, or in the pages of lanes n and after."""
    if P == 0:
        return (entry,)
    else:
        found = ()
        for s in gl.static_range(BOXES):
            found += (gl.sum(gl.where(gl.arange(0, 32, pages.type.layout) == n + s, pages, 0), 0),)
        return found


@gluon.jit
def load_panel(X, keys, y, entries, h, row, column, P: gl.constexpr, panels: gl.constexpr):
    """Load a panel, from `column` on, of the tile of keys from `row` on into use y."""
    STAGES: gl.constexpr = keys.full.shape[0]
    BYTES: gl.constexpr = keys.memory[0].shape[3] * panels.columns * 2
    AT_ONCE: gl.constexpr = (IN_FLIGHT + BYTES - 1) // BYTES
    wait_before(keys.empty, y)
    if STAGES > AT_ONCE:
        if y >= AT_ONCE:
            wait(keys.full, y - AT_ONCE)
    bar = expect(keys.full, y, BYTES)
    for n in gl.static_range(len(keys.memory)):
        load_piece(X, keys.memory[n], y, entries, h, row, column, bar, P)
        column += keys.memory[n].shape[4]


@gluon.jit
def load_piece(X, memory, y, entries, h, row, column, bar, P: gl.constexpr):
    """Load a piece of a panel."""
    SIZE: gl.constexpr = X.block_type.shape[2]
    STAGES: gl.constexpr = memory.shape[0]
    B_C: gl.constexpr = memory.shape[3]
    BOXES: gl.constexpr = memory.shape[4] // 64
    boxes = triton_compat.reinterpret(memory, X.dtype, [STAGES * BOXES, 1, 1, B_C, 64], X.layout)
    for s in gl.static_range(B_C // SIZE):
        at = row + s * SIZE
        if P > 0:
            at = at % P
        for c in gl.static_range(BOXES):
            box = boxes.index(y % STAGES * BOXES + c).slice(s * SIZE, SIZE, 2)
            triton_compat.load(X, [entries[s], h, at, column + 64 * c], bar, box)


@gluon.jit
def load_tile(K, V, keys, y, pages, n, entry, h, row, P: gl.constexpr, panels: gl.constexpr):
    """Load a tile of K, and one of V, into uses from y on. Lane n of `pages` has the first page."""
    OF_K: gl.constexpr = panels.of_k
    OF_V: gl.constexpr = 0 if panels.shared else panels.of_v
    entries = entries_of(pages, entry, n, keys.memory[0].shape[3] // K.block_type.shape[2], P)
    for x in gl.static_range(OF_K):
        load_panel(K, keys, y + x, entries, h, row, x * panels.columns, P, panels)
    for x in gl.static_range(OF_V):
        load_panel(V, keys, y + OF_K + x, entries, h, row, x * panels.columns, P, panels)


@gluon.jit
def load(K, V, keys, early, batch, variant, H_k, W, split: gl.constexpr, panels: gl.constexpr):
    """Run the producer warp.

    Before earlier kernels are complete, it loads the first tiles by `early` and drops them, so that L2 has them. They
    may not be written yet, nor what says where they are: lengths are cut to the cache, and TMA reads nothing outside,
    but an index could lead outside the table.
    """
    P: gl.constexpr = split.P
    SIZE: gl.constexpr = K.block_type.shape[2]
    BOXES: gl.constexpr = split.B_C // SIZE
    COUNT: gl.constexpr = stages_of_tile(panels)
    EARLY: gl.constexpr = min(EARLY_TILES, split.STAGES // COUNT)
    if batch.index is None:
        _, h, _, _, work, pages = first_of(batch, variant, H_k, W, SIZE, split)
        for s in gl.static_range(EARLY):
            row = work.start + (work.lo + s) * split.B_C
            load_tile(K, V, early, s * COUNT, pages, s * BOXES, work.b, h, row, P, panels)
    wait_dependencies()
    line, h, at, stop, work, more = first_of(batch, variant, H_k, W, SIZE, split)
    if batch.index is None:
        for s in gl.static_range(COUNT * EARLY):
            wait(early.full, s)
    pages = more + 0  # Triton carries no two names of one value through a loop
    y = 0  # panels so far
    while at < stop:
        entry = entry_of(batch, work.b).to(gl.int32)
        for t in range(work.lo, work.hi):
            n = (t - work.lo) * BOXES % 32
            if n == 0:
                pages = more
                more = pages_from(batch, work, t * split.B_C + 32 * SIZE, SIZE, P)
            load_tile(K, V, keys, y, pages, n, entry, h, work.start + t * split.B_C, P, panels)
            y += COUNT
        at += work.count
        work = work_at(line, gl.minimum(at, line.total - 1), stop, batch, variant.mask, split)
        more = pages_from(batch, work, work.lo * split.B_C, SIZE, P)


@gluon.jit
def release(keys, y, COUNT: gl.constexpr):
    """Release the stages of COUNT uses."""
    for x in gl.static_range(COUNT):
        arrive(keys.empty, y + x)


@gluon.jit
def release_values(o, keys, y, COUNT: gl.constexpr):
    """Wait for the products of a tile of V, and release its COUNT stages one by one: the sooner the next are loaded."""
    PIECES: gl.constexpr = len(keys.memory)
    for x in gl.static_range(COUNT):
        o = wait_for(pieces_after(x, PIECES, len(o)), o)
        arrive(keys.empty, y + x)
    return o


@gluon.jit
def logits(q, keys, y):
    """Start S^T = K Q^T of the tile whose first panel is use y."""
    PANELS: gl.constexpr = q[0].shape[0]
    S = zeros_of_piece(keys.memory[0].shape[3], q[0].shape[3])
    for x in gl.static_range(PANELS):
        wait(keys.full, y + x)
        of_q, of_k = tile_in_loop(q, x, y), tile_at(keys.memory, y + x)
        for n in gl.static_range(len(q)):
            S = warpgroup_mma(of_k[n], of_q[n].permute((1, 0)), S, use_acc=x + n > 0, is_async=True)
    return S


@gluon.jit
def weigh(
    S, o, m, l, t, y, work, heads, i, p, flags, keys, variant, c, split: gl.constexpr, panels: gl.constexpr,
):  # fmt: skip
    """Start O^T += V^T P^T of key tile t, whose values are uses from y on."""
    B_C: gl.constexpr = split.B_C
    PANELS: gl.constexpr = panels.of_v
    PIECES: gl.constexpr = len(keys.memory)
    j = (t * B_C + gl.arange(0, B_C, gl.SliceLayout(1, S.type.layout)))[:, None]
    at = Entries(work.b, heads[None, :], 0, (work.N - work.M + i)[None, :], 0, j)
    S = apply_scores(variant.scores, S, at, len(variant.scores))
    if (t < work.full_lo) | (t >= work.full_hi):
        seen = visible(variant.mask, work.b, at.h, at.i, j) & (j >= work.first) & (j < work.last)
        S = gl.where(seen, S, float("-inf"))
        for x in gl.static_range(PANELS):  # a cache may hold NaN there
            wait(keys.full, y + x)
            v = tile_at(keys.memory, y + x)
            for n in gl.static_range(PIECES):
                zero_outside(v[n], work.first - t * B_C, work.last - t * B_C)
    P, o, m, l = online(S, o, m, l, c, flags)
    p.store(P.to(p.dtype))
    fence_async_shared()
    triton_compat.barrier()
    sums = ()
    for x in gl.static_range(PANELS):
        v = tile_at(keys.memory, y + x)
        for n in gl.static_range(PIECES):
            if PIECES * x + n < len(o):
                if not panels.shared:  # else `logits` waited
                    wait(keys.full, y + x)
                sums += (warpgroup_mma(v[n].permute((1, 0)), p, o[PIECES * x + n], is_async=True),)
    return sums, m, l


@gluon.jit
def attend(Q, O, L, partial, q, p, flags, keys, batch, variant, c, H_k, W, split: gl.constexpr, panels: gl.constexpr):
    """Run the warps that compute."""
    B_R: gl.constexpr = split.B_R
    B_C: gl.constexpr = split.B_C
    WIDTHS: gl.constexpr = pieces_of_v(split, panels)
    COUNT: gl.constexpr = stages_of_tile(panels)
    OF_K: gl.constexpr = panels.of_k
    OF_V: gl.constexpr = panels.of_v
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    wait_dependencies()
    launch_dependents()
    line, h, w, at, stop = own_piece(batch, variant, H_k, W, split)
    y = 0  # panels so far
    while at < stop:
        work = work_at(line, at, stop, batch, variant.mask, split)
        load_queries(Q, q, work, h, split)
        i, heads, _ = places_of(work.r * B_R + gl.arange(0, B_R, by_row), h, work.M, split)
        o = ()
        for n in gl.static_range(len(WIDTHS)):
            o += (zeros_of_piece(WIDTHS[n], B_R),)
        m = gl.full([B_R], LOWEST, gl.float32, by_row)
        l = sums_of_threads(gl.zeros([B_C, B_R], gl.float32, layout))
        if panels.shared:
            for t in range(work.lo, work.hi):
                S = warpgroup_mma_wait(0, [logits(q, keys, y)])
                release(keys, y + OF_V, COUNT - OF_V)
                o, m, l = weigh(S, o, m, l, t, y, work, heads, i, p, flags, keys, variant, c, split, panels)
                o = release_values(o, keys, y, OF_V)
                y += COUNT
        elif work.lo < work.hi:
            S = warpgroup_mma_wait(0, [logits(q, keys, y)])
            release(keys, y, OF_K)
            for t in range(work.lo, work.hi - 1):  # S of the next key tile begins before the softmax of this one
                S_next = logits(q, keys, y + COUNT)
                o, m, l = weigh(S, o, m, l, t, y + OF_K, work, heads, i, p, flags, keys, variant, c, split, panels)
                o, S = wait_for_both(0, o, S_next)
                release(keys, y + OF_K, COUNT)  # V, and the next K
                y += COUNT
            o, m, l = weigh(
                S, o, m, l, work.hi - 1, y + OF_K, work, heads, i, p, flags, keys, variant, c, split, panels
            )
            o = wait_for(0, o)
            release(keys, y + OF_K, COUNT - OF_K)
            y += COUNT
        m, l = totals(m, l)
        column = 0
        for n in gl.static_range(len(o)):
            part = gl.permute(o[n], (1, 0))
            store_piece(O, L, partial, part, m, l, batch, variant, work, h, w, H_k, column, split)
            column += part.shape[1]
        at += work.count


@gluon.jit
def store_piece(O, L, partial, o, m, l, batch, variant, work, h, w, H_k, column, split: gl.constexpr):
    """Store the columns of a piece from `column` on: of o, if all keys are summed, else of a partial sum."""
    of_rows: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    m, l = gl.convert_layout(m, of_rows), gl.convert_layout(l, of_rows)
    row = work.r * split.B_R + gl.arange(0, split.B_R, of_rows)
    i, heads, seen = places_of(row, h, work.M, split)
    entries = column + gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
    if work.count == work.each:
        write(O, L, o, m, l, variant.sink, work.b, i, heads, seen, entries, split.d_v)
    else:
        store_partial(partial, o, m, l, batch, work.q0, row, work.x, w, H_k, h, seen, entries, split)


@gluon.jit
def load_queries(Q, q, work, h, split: gl.constexpr):
    """Load rows of Q into shared memory, in panels as K's."""
    PANELS: gl.constexpr = q[0].shape[0]
    column = 0
    for x in gl.static_range(PANELS):
        for n in gl.static_range(len(q)):
            piece = tile_of(q, x)[n]
            load_rows(Q, piece, work, h, column, split)
            column += piece.shape[1]
    fence_async_shared()
    triton_compat.barrier()


@gluon.jit
def load_rows(Q, piece, work, h, column, split: gl.constexpr):
    """Load the columns of a piece from `column` on."""
    WIDTH: gl.constexpr = piece.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = work.r * split.B_R + gl.arange(0, split.B_R, gl.SliceLayout(1, layout))
    i, heads, seen = places_of(row, h, work.M, split)
    entries = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    inside = seen[:, None] & (entries < split.d)
    piece.store(gl.load(address(Q, work.b, i, heads)[:, None] + entries, mask=inside, other=0.0))


@gluon.constexpr_function
def pieces_of_v(split, panels):
    """Return the columns of the pieces that have V's."""
    widths = pieces_of(panels.columns) * panels.of_v
    return tuple([width for n, width in enumerate(widths) if sum(widths[:n]) < split.d_v])


@gluon.jit(do_not_specialize=["batch", "variant", "H_k", "W"])
def attention_decode(
    Q, K, V, O, L, partial, batch, variant, c, H_k, W, split: gl.constexpr, panels: gl.constexpr
):  # fmt: skip
    """Sum one piece of the line of one key head. Neighbouring programs read the heads of one key at a time.

    Q, O and L are `Rows`; K and V are boxes of 64 columns, V None where values are K's first columns.
    """
    B_C: gl.constexpr = split.B_C
    B_R: gl.constexpr = split.B_R
    of_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B_C, B_R], K.dtype)
    p = gl.allocate_shared_memory(K.dtype, [B_C, B_R], of_p)
    flags = flags_of_warps()
    q = allocate(K, K.dtype, panels.of_k, B_R, panels.columns)
    memory = allocate(K, K.dtype, split.STAGES, B_C, panels.columns)
    keys = Channel(memory, barriers(split.STAGES, 1), barriers(split.STAGES, 1))
    early = keys  # a role takes no None, and Triton gives the memory of barriers that no role uses to others
    if batch.index is None:
        early = Channel(memory, barriers(split.STAGES, 1), keys.empty)
    fence_async_shared()
    if V is None:
        V = K
    gl.warp_specialize(
        [
            (attend, (Q, O, L, partial, q, p, flags, keys, batch, variant, c, H_k, W, split, panels)),
            (load, (K, V, keys, early, batch, variant, H_k, W, split, panels)),
        ],
        [1], [48 if panels.shared else 72],
    )  # fmt: skip
