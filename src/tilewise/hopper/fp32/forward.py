"""Compute the forward for fp32 on Hopper: products of 16-bit pieces (split.py), summed as exactly as fp32 sums.

    load      one warp          loads as in forward/kernel.py, but K and V come in pieces, and Q as it is
    attend    two warpgroups    compute 64 rows of queries each: Q in pieces, S, the softmax, P in pieces, O += P V

The order is forward/kernel.py's: P V of one key tile runs under the softmax of the next. Where Q has separate memory, a
query tile's last P V runs under the splitting of the next tile's Q. A product adds its smallest parts first. Tensor
cores cut bits off as they add. So P V of a tile begins at zero and joins O by a multiply-add, which rescales O and
descales V. Powers of two descale Q's rows and K's tiles as part of the softmax's factor. P is
computed as 2^P_SCALE_LOG2 times itself, where fp16 has most room; O's last factor takes that back.

Programs begin while the kernel before them still splits K and V. What kernels before that one wrote is complete: Q,
bounds of packed sequences, what masks hold, lists of tiles, the counter. So only what reads pieces and their scales
waits. But every program does wait, so that none ends before the splitting has.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from ...tile.rows import first_block, origin, row_values
from ...tile.softmax import finalize, join_sink, row_max
from ..forward.queries import is_partial, key_tile, loop_of, part_of, query_tile, skip_tiles
from ..forward.softmax import exponentials, masked
from ..parts import triton_compat
from ..parts.call import Call
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    named_barrier,
    stage,
    wait,
    wait_before,
    wait_dependencies,
)
from ..parts.queue import fetch_next_tile, receive_tile, reset_counter, send_tile, tile_channel
from .forward_products import (
    accumulate_o,
    begin_logits,
    descale_of,
    end_logits,
    next_unit,
    pieces_of,
    product,
    q_pieces,
    split_columns,
    to_base_2,
    unit_of,
)


class Tile(NamedTuple):
    """Hold what a kernel is compiled for; all are constants. forward/kernel.py's functions read fields of the same
    names."""

    WARPGROUPS: int
    B_C: int
    KEYS: int
    """Counts the keys of a block in memory: a tile or two."""
    D: int
    """Counts the columns of a row in shared memory: the head size, rounded up to 64 or 128."""
    PIECES: int
    """Counts the pieces of every number: 2 in fp16, or 3 in bf16."""
    KV_STAGES: int
    Q_SEPARATE: bool
    """Says whether Q has separate memory, so that the next tile's can come early, or that of its pieces."""
    PAIRED: bool
    """Says, of three pieces, whether the first two of a key tile are adjacent in one product. An instruction reads its
    rows of Q again from shared memory, which for 32 columns takes longer than it multiplies."""
    PINGPONG: bool
    MASK_IN_LOOP: bool
    WAIT_PV: int
    """Says where the softmax lets the previous P V finish: as in forward/kernel.py, but 3 is after all exponentials."""
    REGISTERS: int
    P_SCALE_LOG2: int
    """Scales P: it is computed as 2^P_SCALE_LOG2 P."""


class Shape(NamedTuple):
    """Hold the fields of forward/kernel.py's `Shape`, and where pieces are."""

    M: object
    N: object
    d_v: object
    H: object
    group: object
    heads: object
    section: object
    tiles: object
    blocks: object
    """Counts the blocks of keys of a head in memory."""
    rows: object
    """Counts the rows from one piece of a key to its next."""


class Keys(NamedTuple):
    """Hold K or V: a descriptor of all its pieces, and each block's descale factor."""

    pieces: object
    descale: object
    pair: object = None
    """Describes, for K if it is PAIRED, the first two pieces in one box."""


class Shared(NamedTuple):
    """Hold everything in shared memory."""

    q: object
    """Holds Q in fp32, as it comes; `empty` is complete when its memory may be written again."""
    pieces: object
    """Holds the pieces of Q."""
    k: object
    v: object
    """Holds, as k does, its pieces one after the other; `empty` is one for both, as in forward/kernel.py."""
    tile_ids: object
    bits: object
    """Is None: there is no dropout in fp32."""


@gluon.jit
def first_tile(place, k0, call, tile: gl.constexpr):
    """Return the first key tile of a head, among all."""
    KEYS: gl.constexpr = tile.KEYS
    h_k, H_k = place.h // call.shape.group, call.shape.H // call.shape.group
    return first_block(call.packed, place.b, h_k, H_k, k0, call.shape.blocks, KEYS) * (KEYS // tile.B_C)


@gluon.jit
def load_pieces(X, channel, y, j, rows, PIECES: gl.constexpr):
    """Load key tile j as use y."""
    bar = expect(channel.full, y, X.pieces.block_type.nbytes * PIECES)
    PAIR: gl.constexpr = 0 if X.pair is None else 2
    if PAIR:
        triton_compat.load(X.pair, [0, j * X.pieces.block_shape[0], 0], bar, stage(channel.memory[0], y))
    memory = channel.memory[1] if PAIR else channel.memory
    for n in gl.static_range(PAIR, PIECES):
        at = stage(memory, y * (PIECES - PAIR) + n - PAIR)
        triton_compat.load(X.pieces, [n * rows + j * X.pieces.block_shape[0], 0], bar, at)


@gluon.jit
def load_queries(Q, shared, place, q0, n, packed, WARPGROUPS: gl.constexpr):
    """Load query tile n, as it comes."""
    b = place.b if packed is None else 0
    wait_before(shared.q.empty, n)
    bar = expect(shared.q.full, n, Q.block_type.nbytes * WARPGROUPS)
    for w in gl.static_range(WARPGROUPS):
        triton_compat.load(Q, [b, place.h, q0 + place.i0 + 64 * w, 0], bar, shared.q.memory.index(w))


@gluon.jit
def load(Q, K, V, shared, counter, call, tile: gl.constexpr):
    """Run the producer warp."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    PIECES: gl.constexpr = tile.PIECES
    t = gl.program_id(0)
    n = 0  # tiles of queries so far
    y = 0  # tiles of keys so far
    while t < call.shape.tiles * call.shape.heads:
        place, m, q0, k0 = query_tile(t, call, tile)
        if place.i0 < place.M:  # packed sequences may be shorter
            send_tile(shared.tile_ids, t, n)
            loop = loop_of(place, m, call.variant, tile)
            first = first_tile(place, k0, call, tile)
            count = loop.hi - loop.lo
            j_before = 0
            if tile.Q_SEPARATE:  # it is split before K and V can come
                load_queries(Q, shared, place, q0, n, call.packed, WARPGROUPS)
            wait_dependencies()
            for x in range(count + 1):  # K one tile ahead of V: the order in which they are used
                j = j_before
                wait_before(shared.k.empty, y)
                if x < count:
                    j = first + key_tile(call.variant, loop, loop.hi - 1 - x)
                    load_pieces(K, shared.k, y, j, call.shape.rows, PIECES)
                if not tile.Q_SEPARATE:
                    if x == 0:  # behind K, which need not wait for the queries before
                        load_queries(Q, shared, place, q0, n, call.packed, WARPGROUPS)
                if x > 0:
                    load_pieces(V, shared.v, y - 1, j_before, call.shape.rows, PIECES)
                if x == 1:
                    t = fetch_next_tile(counter)
                j_before = j
                y += 1
            y -= 1
            n += 1
        else:
            t = fetch_next_tile(counter)
    send_tile(shared.tile_ids, t, n)
    reset_counter(counter)


@gluon.jit
def write(o, m, l, O, L, place, q0, row0, call, P_SCALE_LOG2: gl.constexpr):
    """Write O and lse of 64 rows, once all keys have been seen; l is 2^P_SCALE_LOG2 times too large, and m is
    P_SCALE_LOG2 too small."""
    if call.variant.sink is not None:
        m, l, alpha = join_sink(m, l, gl.load(call.variant.sink + place.h).to(gl.float32))
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
    inverse, lse = finalize(m, l)
    rows = row0 + gl.arange(0, m.shape[0], m.type.layout)
    gl.store(
        row_values(L, call.packed, place.b, place.h, call.shape.H, q0, call.shape.M) + rows, lse, mask=rows < place.M
    )
    o = o * gl.convert_layout(inverse * 2.0**P_SCALE_LOG2, gl.SliceLayout(1, o.type.layout))[:, None]
    rows = row0 + gl.arange(0, o.shape[0], gl.SliceLayout(1, o.type.layout))[:, None]
    entries = gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))[None, :]
    at = origin(O, place.b, place.h, q0) + rows.to(gl.int64) * O.row + entries
    gl.store(at, o, mask=(rows < place.M) & (entries < call.shape.d_v))


@gluon.jit
def next_probabilities(S, m, l, unit, y, shared, tile: gl.constexpr):
    """Compute P of the next key tile, m and l with it, and the factor that rescales O so far."""
    m_new, shift = row_max(gl.max(S, 1), m, unit, tile.P_SCALE_LOG2)
    P = exponentials(S, shift, unit[:, None], y, tile.WAIT_PV)
    if tile.WAIT_PV == 3:  # passed long ago; but a basic block ends here, and ptxas moves no wait above it
        wait(shared.v.full, y)
    alpha = gl.exp2(m - shift)
    return P, m_new, l * alpha + gl.sum(P, 1), alpha


@gluon.jit
def attend(W: gl.constexpr, O, L, K, V, shared, call, c, tile: gl.constexpr):
    """Compute 64 rows of every query tile, in warpgroup W."""
    B_C: gl.constexpr = tile.B_C
    D: gl.constexpr = tile.D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_C, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([64, B_C], gl.float32, s_layout)
    zero_o = gl.zeros([64, D], gl.float32, o_layout)
    n = 0  # tiles of queries so far
    y = 0  # tiles of keys so far
    if tile.PINGPONG and W == 1:
        named_barrier("arrive", 0)
    t = receive_tile(shared.tile_ids, n, 4)
    unit = gl.full([64], 0.0, gl.float32, row_layout)
    unit = next_unit(unit, t, c, shared, call.shape, n, W, row_layout, tile)
    wait_dependencies()
    while t < call.shape.tiles * call.shape.heads:
        place, tile_of_head, q0, k0 = query_tile(t, call, tile)
        loop = loop_of(place, tile_of_head, call.variant, tile)
        first = first_tile(place, k0, call, tile)
        row0 = place.i0 + 64 * W
        part = part_of(loop, place, row0, call.variant, tile)
        y = skip_tiles(W, shared, y, loop.hi - part.hi, tile)
        x = part.hi - 1
        j = key_tile(call.variant, loop, x)
        if not tile.Q_SEPARATE:
            unit = unit_of(c, shared, n, W, row_layout, tile)
        descale_k, descale = descale_of(K, first + j, tile), descale_of(V, first + j, tile)
        wait(shared.k.full, y)
        q = q_pieces(shared.pieces, y, W, tile)
        S = end_logits(begin_logits(q, shared.k, y, zero, tile), 0, tile)
        arrive(shared.k.empty, y)
        unit_j = to_base_2(unit, descale_k)
        if is_partial(x, part):
            S = masked(S, place, row0, j * B_C, call.variant)
        nothing = gl.full([64], float("-inf"), gl.float32, row_layout)
        m, shift = row_max(gl.max(S, 1), nothing, unit_j, tile.P_SCALE_LOG2)
        P = gl.exp2(S * unit_j[:, None] - shift[:, None])
        l = gl.sum(P, 1)
        p = split_columns(P, shared.pieces.dtype, p_layout, tile.PIECES)
        alpha = gl.full([64], 0.0, gl.float32, row_layout)
        o = zero_o
        while x > part.lo:
            x -= 1
            j = key_tile(call.variant, loop, x)
            descale_k, descale_next = descale_of(K, first + j, tile), descale_of(V, first + j, tile)  # early: slow
            wait(shared.k.full, y + 1)
            if tile.PINGPONG:
                named_barrier("sync", W)
            q = q_pieces(shared.pieces, y, W, tile)
            S_next = begin_logits(q, shared.k, y + 1, zero, tile)
            wait(shared.v.full, y)
            o_next = product(p, pieces_of(shared.v, y, False, tile.PIECES), zero_o, tile.PIECES)
            if tile.PINGPONG:
                named_barrier("arrive", 1 - W)
            S_new = end_logits(S_next, tile.PIECES * (tile.PIECES + 1) // 2, tile)
            unit_j = to_base_2(unit, descale_k)
            if tile.MASK_IN_LOOP:
                if is_partial(x, part):
                    S_new = masked(S_new, place, row0, j * B_C, call.variant)
            P, m, l, alpha_new = next_probabilities(S_new, m, l, unit_j, y, shared, tile)
            o_next = warpgroup_mma_wait(0, [o_next])
            arrive(shared.k.empty, y + 1)
            o = accumulate_o(o, alpha, o_next, descale, tile.P_SCALE_LOG2)
            p = split_columns(P, shared.pieces.dtype, p_layout, tile.PIECES)
            descale, alpha = descale_next, alpha_new
            y += 1
        if not tile.Q_SEPARATE:
            arrive(shared.q.empty, n)
        wait(shared.v.full, y)
        o_last = product(p, pieces_of(shared.v, y, False, tile.PIECES), zero_o, tile.PIECES)
        t = receive_tile(shared.tile_ids, n + 1, 4)
        # all products that read this tile's pieces are complete
        unit = next_unit(unit, t, c, shared, call.shape, n + 1, W, row_layout, tile)
        o = accumulate_o(o, alpha, warpgroup_mma_wait(0, [o_last]), descale, tile.P_SCALE_LOG2)
        write(o, m, l, O, L, place, q0, row0, call, tile.P_SCALE_LOG2)
        y = skip_tiles(W, shared, y + 1, part.lo - loop.lo, tile)
        n += 1


@gluon.jit
def counts_of(shape):
    """Return a launch's shape. It hands counts over as 2 n + 1 (see `odd` in host/arguments.py)."""
    return Shape(
        shape.M >> 1, shape.N >> 1, shape.d_v >> 1, shape.H >> 1, shape.group >> 1, shape.heads >> 1,
        shape.section >> 1, shape.tiles >> 1, shape.blocks >> 1, shape.rows >> 1,
    )  # fmt: skip


# not specialised on lengths, nor on what is counted from them
@gluon.jit(do_not_specialize=["packed", "shape", "variant"])
def attention_forward_fp32(
    Q, K, K_pair, V, K_descale, V_descale, O, L, counter, packed, variant, c, shape, order: gl.constexpr,
    tile: gl.constexpr,
):  # fmt: skip
    """Compute O and L of every tile of queries. c turns logits into base 2; `order` is forward/kernel.py's."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    D: gl.constexpr = tile.D
    PIECES: gl.constexpr = tile.PIECES
    STAGES: gl.constexpr = tile.KV_STAGES
    dtype: gl.constexpr = K.dtype
    keys, values = Keys(K, K_descale, K_pair), Keys(V, V_descale)  # as arguments, descriptors must stand alone
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    pieces = gl.allocate_shared_memory(dtype, [WARPGROUPS * PIECES, 64, D], rows)
    if tile.Q_SEPARATE:
        q = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, 1, 1, 64, D], Q.layout)
    else:
        q = triton_compat.reinterpret(pieces, gl.float32, [PIECES, 1, 1, 64, D], Q.layout)
    shape = counts_of(shape)
    done = barriers(STAGES, WARPGROUPS)
    if tile.PAIRED:
        k = (
            gl.allocate_shared_memory(dtype, [STAGES, 2, B_C, D], K_pair.layout),
            gl.allocate_shared_memory(dtype, [STAGES * (PIECES - 2), B_C, D], K.layout),
        )
    else:
        k = gl.allocate_shared_memory(dtype, [STAGES * PIECES, B_C, D], K.layout)
    shared = Shared(
        Channel(q, barriers(1, 1), barriers(1, WARPGROUPS)),
        pieces,
        Channel(k, barriers(STAGES, 1), done),
        Channel(
            gl.allocate_shared_memory(dtype, [STAGES * PIECES, B_C, D], V.layout),
            barriers(STAGES, 1),
            done,
        ),
        tile_channel(WARPGROUPS),
        None,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (0, O, L, keys, values, shared, Call(shape, packed, variant, (), order), c, tile)),
            (attend, (1, O, L, keys, values, shared, Call(shape, packed, variant, (), order), c, tile)),
            (load, (Q, keys, values, shared, counter, Call(shape, packed, variant, (), order), tile)),
        ],
        [4, 1], [tile.REGISTERS, 24],
    )  # fmt: skip
