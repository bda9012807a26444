"""Split keys on Hopper, for few rows of queries: two roles walk a program's piece of the line (tile/line.py).

    load    one warp    loads tiles of K and V by TMA, one after the other, also over the ends of sequences
    attend  4 warps     compute S^T = K Q^T, the online softmax in registers, O^T += V^T P^T

Transposed, a product has 64 keys by 16 rows of queries: the left operand has 64 rows at least. Stages hold what arrives
while `attend` ends one sequence and begins the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...tile.cache import entry_of
from ...tile.combine import address, places_of, store_partial, write
from ...tile.line import line_of, piece_of, work_at
from ...tile.masks import visible
from ...tile.scores import Entries, apply_scores
from ...tile.softmax import rescaling, row_max
from ..parts import triton_compat
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    launch_dependents,
    stage,
    wait,
    wait_before,
    wait_dependencies,
)
from ..parts.ragged import zero_outside

IN_FLIGHT = gl.constexpr(4)
"""Tiles that may be under way at a time: with more, memory is slower."""
EARLY_TILES = gl.constexpr(2)
"""Key tiles that a program asks for before earlier kernels are complete."""


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
def load_tile(X, keys, y, entries, h, row, P: gl.constexpr):
    """Load the tile of keys from `row` on into use y."""
    SIZE: gl.constexpr = X.block_type.shape[2]
    STAGES: gl.constexpr = keys.memory.shape[0]
    B_C: gl.constexpr = keys.memory.shape[3]
    PANELS: gl.constexpr = keys.memory.shape[4] // 64
    panels = triton_compat.reinterpret(keys.memory, X.dtype, [STAGES * PANELS, 1, 1, B_C, 64], X.layout)
    wait_before(keys.empty, y)
    if y >= IN_FLIGHT:
        wait(keys.full, y - IN_FLIGHT)
    bar = expect(keys.full, y, X.block_type.nbytes * (B_C // SIZE * PANELS))
    for s in gl.static_range(B_C // SIZE):
        at = row + s * SIZE
        if P > 0:
            at = at % P
        for c in gl.static_range(PANELS):
            box = panels.index(y % STAGES * PANELS + c).slice(s * SIZE, SIZE, 2)
            triton_compat.load(X, [entries[s], h, at, 64 * c], bar, box)


@gluon.jit
def load_tiles(K, V, keys, y, pages, n, entry, h, row, P: gl.constexpr):
    """Load the tiles of K and of V into uses y and y + 1. Lane n of `pages` has the first page."""
    entries = entries_of(pages, entry, n, keys.memory.shape[3] // K.block_type.shape[2], P)
    load_tile(K, keys, y, entries, h, row, P)
    load_tile(V, keys, y + 1, entries, h, row, P)


@gluon.jit
def load(K, V, keys, early, batch, variant, H_k, W, split: gl.constexpr):
    """Run the producer warp.

    Before earlier kernels are complete, it loads the first tiles by `early` and drops them, so that L2 has them. They
    may not be written yet, nor what says where they are: lengths are cut to the cache, and TMA reads nothing outside,
    but an index could lead outside the table.
    """
    P: gl.constexpr = split.P
    SIZE: gl.constexpr = K.block_type.shape[2]
    BOXES: gl.constexpr = split.B_C // SIZE
    if batch.index is None:
        _, h, _, _, work, pages = first_of(batch, variant, H_k, W, SIZE, split)
        for s in gl.static_range(EARLY_TILES):
            row = work.start + (work.lo + s) * split.B_C
            load_tiles(K, V, early, 2 * s, pages, s * BOXES, work.b, h, row, P)
    wait_dependencies()
    line, h, at, stop, work, more = first_of(batch, variant, H_k, W, SIZE, split)
    if batch.index is None:
        for s in gl.static_range(2 * EARLY_TILES):
            wait(early.full, s)
    pages = more + 0  # Triton carries no two names of one value through a loop
    y = 0  # tiles of keys and of values so far
    while at < stop:
        entry = entry_of(batch, work.b).to(gl.int32)
        for t in range(work.lo, work.hi):
            n = (t - work.lo) * BOXES % 32
            if n == 0:
                pages = more
                more = pages_from(batch, work, t * split.B_C + 32 * SIZE, SIZE, P)
            load_tiles(K, V, keys, y, pages, n, entry, h, work.start + t * split.B_C, P)
            y += 2
        at += work.count
        work = work_at(line, gl.minimum(at, line.total - 1), stop, batch, variant.mask, split)
        more = pages_from(batch, work, work.lo * split.B_C, SIZE, P)


@gluon.jit
def logits(q, keys, y, split: gl.constexpr):
    """Start S^T = K Q^T of use y."""
    B_R: gl.constexpr = split.B_R
    B_C: gl.constexpr = split.B_C
    D: gl.constexpr = q.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    wait(keys.full, y)
    k = stage(keys.memory, y).reshape([B_C, D])
    zero = gl.zeros([B_C, B_R], gl.float32, layout)
    return warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def weigh(S, o, m, l, t, y, work, heads, i, p, keys, variant, c, split: gl.constexpr):
    """Start O^T += V^T P^T of key tile t, whose values are use y. Of l's rows, every key of a tile has one."""
    B_C: gl.constexpr = split.B_C
    D: gl.constexpr = o.shape[0]
    j = (t * B_C + gl.arange(0, B_C, gl.SliceLayout(1, S.type.layout)))[:, None]
    at = Entries(work.b, heads[None, :], 0, (work.N - work.M + i)[None, :], 0, j)
    S = apply_scores(variant.scores, S, at, len(variant.scores))
    v = stage(keys.memory, y).reshape([B_C, D])
    if (t < work.full_lo) | (t >= work.full_hi):
        seen = visible(variant.mask, work.b, at.h, at.i, j) & (j >= work.first) & (j < work.last)
        S = gl.where(seen, S, float("-inf"))
        wait(keys.full, y)
        zero_outside(v, work.first - t * B_C, work.last - t * B_C)  # a cache may hold NaN there
    m_new, shift = row_max(gl.max(S, 0), m, c)
    alpha = rescaling(m, shift, c)
    P = gl.exp2(S * c - shift[None, :])
    p.store(P.to(p.dtype))
    fence_async_shared()
    triton_compat.barrier()
    l = l * alpha[None, :] + P
    o = o * gl.convert_layout(alpha, gl.SliceLayout(0, o.type.layout))[None, :]
    wait(keys.full, y)
    return warpgroup_mma(v.permute((1, 0)), p, o, is_async=True), m_new, l


@gluon.jit
def attend(Q, O, L, partial, q, p, keys, batch, variant, c, H_k, W, split: gl.constexpr):
    """Run the warps that compute."""
    B_R: gl.constexpr = split.B_R
    B_C: gl.constexpr = split.B_C
    D: gl.constexpr = q.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    wait_dependencies()
    launch_dependents()
    line, h, w, at, stop = own_piece(batch, variant, H_k, W, split)
    y = 0  # tiles of keys and of values so far
    while at < stop:
        work = work_at(line, at, stop, batch, variant.mask, split)
        row = work.r * B_R + gl.arange(0, B_R, gl.SliceLayout(1, q_layout))
        i, heads, seen = places_of(row, h, work.M, split)
        entries = gl.arange(0, D, gl.SliceLayout(0, q_layout))[None, :]
        inside = seen[:, None] & (entries < split.d)
        q.store(gl.load(address(Q, work.b, i, heads)[:, None] + entries, mask=inside, other=0.0))
        fence_async_shared()
        triton_compat.barrier()
        i, heads, _ = places_of(work.r * B_R + gl.arange(0, B_R, by_row), h, work.M, split)
        o = gl.zeros([D, B_R], gl.float32, layout)
        m = gl.full([B_R], float("-inf"), gl.float32, by_row)
        l = gl.zeros([B_C, B_R], gl.float32, layout)
        if work.lo < work.hi:
            S = warpgroup_mma_wait(0, [logits(q, keys, y, split)])
            arrive(keys.empty, y)
            for t in range(work.lo, work.hi - 1):  # S of the next key tile begins before the softmax of this one
                S_next = logits(q, keys, y + 2, split)
                o, m, l = weigh(S, o, m, l, t, y + 1, work, heads, i, p, keys, variant, c, split)
                S, o = warpgroup_mma_wait(0, [S_next, o])
                arrive(keys.empty, y + 1)
                arrive(keys.empty, y + 2)
                y += 2
            o, m, l = weigh(S, o, m, l, work.hi - 1, y + 1, work, heads, i, p, keys, variant, c, split)
            o = warpgroup_mma_wait(0, [o])
            arrive(keys.empty, y + 1)
            y += 2
        o = gl.permute(o, (1, 0))
        of_rows: gl.constexpr = gl.SliceLayout(1, o.type.layout)
        m, l = gl.convert_layout(m, of_rows), gl.convert_layout(gl.sum(l, 0), of_rows)
        row = work.r * B_R + gl.arange(0, B_R, of_rows)
        i, heads, seen = places_of(row, h, work.M, split)
        entries = gl.arange(0, D, gl.SliceLayout(0, o.type.layout))
        if work.count == work.each:
            write(O, L, o, m, l, variant.sink, work.b, i, heads, seen, entries, split.d_v)
        else:
            store_partial(partial, o, m, l, batch, work.q0, row, work.x, w, H_k, h, seen, entries, split)
        at += work.count


@gluon.jit(do_not_specialize=["batch", "variant", "H_k", "W"])
def attention_decode(Q, K, V, O, L, partial, batch, variant, c, H_k, W, split: gl.constexpr, D: gl.constexpr):
    """Sum one piece of the line of one key head. Neighbouring programs read the heads of one key at a time.

    Q, O and L are `Rows`; K and V are boxes of 64 columns. D is the head size in shared memory.
    """
    of_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([split.B_R, D], K.dtype)
    of_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([split.B_C, split.B_R], K.dtype)
    of_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, split.B_C, D], K.dtype)
    q = gl.allocate_shared_memory(K.dtype, [split.B_R, D], of_q)
    p = gl.allocate_shared_memory(K.dtype, [split.B_C, split.B_R], of_p)
    memory = gl.allocate_shared_memory(K.dtype, [split.STAGES, 1, 1, split.B_C, D], of_keys)
    keys = Channel(memory, barriers(split.STAGES, 1), barriers(split.STAGES, 1))
    early = keys  # a role takes no None, and Triton gives the memory of barriers that no role uses to others
    if batch.index is None:
        early = Channel(memory, barriers(split.STAGES, 1), keys.empty)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (Q, O, L, partial, q, p, keys, batch, variant, c, H_k, W, split)),
            (load, (K, V, keys, early, batch, variant, H_k, W, split)),
        ],
        [1], [72],
    )  # fmt: skip
