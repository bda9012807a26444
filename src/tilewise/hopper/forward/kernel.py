"""Compute the forward on Hopper: one persistent program per multiprocessor, its warps in roles.

    load          one warp      loads tiles of Q, K and V into shared memory by TMA, and fetches the next tile's number
    attend        warpgroups    compute 64 rows of queries each: S = Q K^T, the online softmax in registers, O += P V
    produce_bits  2 or 4 warps  with dropout only: generate its mask bits

Matrix products are asynchronous. S of the next key tile is started before O += P V of this one. So both run while the
other warpgroup does its softmax (FlashAttention-3, section 3). Tile numbers come from a counter in memory,
longest tiles first.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...tile.rows import row_values
from ...tile.softmax import finalize, join_sink
from ..parts import triton_compat
from ..parts.call import Call
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    launch_dependents,
    named_barrier,
    stage,
    wait,
    wait_before,
    wait_dependencies,
)
from ..parts.dropout_bits import apply_dropout, bits, dropout_words, in_whole, read_bits
from ..parts.queue import fetch_next_tile, receive_tile, reset_counter, send_tile, tile_channel
from ..parts.ragged import fill_outputs, store_inside, zero_queries_past, zero_values
from .eight_bits import (
    BLOCK_K,
    BLOCK_Q,
    P_SCALE,
    descaled,
    first_rows,
    known,
    ones_of,
    pack,
    positive,
    scale_at,
    scale_of,
    unpack,
    values_box,
)
from .pages import load_rows, query_tile_in_cache, zero_unseen
from .queries import is_partial, key_tile, loop_of, part_of, query_tile, skip_tiles
from .softmax import any_below, begin, masked, online, scored


class Tile(NamedTuple):
    """Hold what a kernel is compiled for; all are constants."""

    WARPGROUPS: int
    """Counts the warpgroups, of 64 query rows each."""
    B_C: int
    D: int
    """Counts the columns of a row in shared memory: the head size, rounded up to 64, 128 or 256."""
    Q_STAGES: int
    KV_STAGES: int
    PINGPONG: bool
    """Says whether named barriers order the warpgroups' products (ping-pong)."""
    MASK_IN_LOOP: bool
    """Says whether other key tiles than a warpgroup's first may need the mask."""
    HALF_FIRST_TILE: bool
    """Says whether warpgroup 0 sees only half of its first key tile: the diagonal of a square tile."""
    FETCH_EARLY: bool
    """Says whether the next tile's number is fetched after the second load rather than after the last."""
    DROPOUT_WARPS: int
    """Counts the warps that generate dropout bits; without dropout it is 0."""
    WAIT_PV: int
    """Says where the softmax lets the previous product finish: 0 where ptxas puts it, 1 after the row maximum, 2 half
    way. With 3 it finishes before the softmax begins: then nothing overlaps inside a warpgroup."""
    BOUNDED: bool
    """Says whether a score bounds the logits so closely that one shift of the exponents serves a whole row."""
    REGISTERS: int
    """Counts the registers of a thread that attends."""
    QK_BITS: int = 16
    """Counts the bits of an entry of Q and K: 16, or 8 with a scale for each block."""
    PV_BITS: int = 16
    FRESH: int = 0
    """Says whether P V of each key tile begins at zero and joins O in registers: 0 no, 1 yes, 2 in two halves of its
    columns, before the next S. Sums of 8-bit products that stay in the tensor core drift with length."""
    SUMS: bool = False
    """Says whether row sums are products of P with ones, and half of P's bits are computed without exponentials."""
    PAGE: int | None = None
    """Counts the rows of a page of a cache, 0 if it is contiguous; None where keys are in no cache."""
    LOCATE_EARLY: bool = False
    """Says whether the first tile is located while earlier kernels run: no tensor tells where it is."""


class Shape(NamedTuple):
    """Hold lengths and counts of a launch; for packed sequences, M and N count all rows."""

    M: object
    N: object
    d_v: object
    H: object
    group: object
    heads: object
    section: object
    tiles: object


class Shared(NamedTuple):
    """Hold everything in shared memory."""

    q: object
    o: object
    """Is the memory of q, through which O leaves, in O's type."""
    k: object
    v: object
    """Shares `empty` with k: it is complete for use n when the products with K's use n and V's use n - 1 are over."""
    tile_ids: object
    bits: object
    """Holds the channel of dropout bits, or None."""
    ones: object
    """Holds a tile of ones, which sums P's rows, or None."""


@gluon.jit
def located(t, call, tile: gl.constexpr):
    """Locate tile t of all, as `query_tile` does."""
    if tile.PAGE is None:
        return query_tile(t, call, tile)
    else:
        return query_tile_in_cache(t, call, tile)


@gluon.jit
def load(Q, K, V, shared, counter, call, codes, tile: gl.constexpr):
    """Run the producer warp."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    FETCH_EARLY: gl.constexpr = tile.FETCH_EARLY
    if not tile.LOCATE_EARLY:
        wait_dependencies()
    t = gl.program_id(0)
    n = 0  # tiles of queries so far
    y = 0  # tiles of keys so far
    while t < call.shape.tiles * call.shape.heads:
        place, m, q0, k0 = located(t, call, tile)
        if place.i0 < place.M:  # packed sequences may be shorter
            send_tile(shared.tile_ids, t, n)
            b = place.b if call.packed is None else 0
            loop = loop_of(place, m, call.variant, tile)
            h_k = place.h // call.shape.group
            q_row, k_row = first_rows(place, q0, k0, call.packed, tile)
            v_row = k_row if tile.PV_BITS == 8 else k0
            if tile.LOCATE_EARLY:
                wait_dependencies()  # for Q, K and V, once
            wait_before(shared.q.empty, n)
            bar = expect(shared.q.full, n, Q.block_type.nbytes * WARPGROUPS)
            for w in gl.static_range(WARPGROUPS):
                at = shared.q.memory.index((n % Q_STAGES * WARPGROUPS + w) * (16 // tile.QK_BITS))
                triton_compat.load(Q, [b, place.h, q_row + place.i0 + 64 * w, 0], bar, at)
            count = loop.hi - loop.lo
            j_before = 0
            for x in range(count + 1):  # K one tile ahead of V: the order in which they are used
                j = j_before
                wait_before(shared.k.empty, y)
                if x < count:
                    j = key_tile(call.variant, loop, loop.hi - 1 - x)
                    if tile.PAGE is None:
                        bar = expect(shared.k.full, y, K.block_type.nbytes)
                        triton_compat.load(K, [b, h_k, k_row + j * B_C, 0], bar, stage(shared.k.memory, y))
                    else:
                        load_rows(K, shared.k, y, call, place, h_k, k_row + j * B_C, tile)
                if x > 0:
                    if tile.PAGE is None:
                        bar = expect(shared.v.full, y - 1, V.block_type.nbytes)
                        row, column = values_box(v_row + j_before * B_C, tile)
                        triton_compat.load(V, [b, h_k, row, column], bar, stage(shared.v.memory, y - 1))
                    else:
                        load_rows(V, shared.v, y - 1, call, place, h_k, v_row + j_before * B_C, tile)
                if FETCH_EARLY:
                    if x == 1:
                        t = fetch_next_tile(counter)
                j_before = j
                y += 1
            y -= 1
            if not FETCH_EARLY:
                t = fetch_next_tile(counter)
            n += 1
        else:
            t = fetch_next_tile(counter)
    send_tile(shared.tile_ids, t, n)
    reset_counter(counter)


@gluon.jit
def produce_bits(shared, call, tile: gl.constexpr):
    """Generate dropout bits, in the order in which the other warps want them."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    wait_dependencies()
    seed = gl.load(call.variant.dropout.seed)
    threshold = gl.to_tensor(call.variant.dropout.threshold).to(gl.uint32)
    n = 0  # tiles of queries so far
    y = 0  # tiles of keys so far
    t = receive_tile(shared.tile_ids, n, DROPOUT_WARPS)
    while t < call.shape.tiles * call.shape.heads:
        place, tile_of_head, _, _ = query_tile(t, call, tile)
        loop = loop_of(place, tile_of_head, call.variant, tile)
        first = part_of(loop, place, place.i0, call.variant, tile)
        second = part_of(loop, place, place.i0 + 64, call.variant, tile)
        for passed in range(loop.hi - loop.lo):
            x = loop.hi - 1 - passed
            j = key_tile(call.variant, loop, x)
            for w in gl.static_range(WARPGROUPS):
                part = first if w == 0 else second
                u = y * WARPGROUPS + w
                wait_before(shared.bits.empty, u)
                if (x >= part.lo) & (x < part.hi):
                    matrix, i0, j0 = in_whole(call.variant.dropout.counters, place, place.i0 + 64 * w, j * B_C)
                    words = dropout_words(seed, threshold, matrix, i0, j0, 64, B_C, False, DROPOUT_WARPS)
                    stage(shared.bits.memory, u).store(words)
                arrive(shared.bits.full, u)
            y += 1
        n += 1
        t = receive_tile(shared.tile_ids, n, DROPOUT_WARPS)


@gluon.jit
def logits(q, k, HALF_FIRST_TILE: gl.constexpr, TYPE: gl.constexpr, BITS: gl.constexpr):
    """Compute Q K^T, or with HALF_FIRST_TILE only the first half of its columns."""
    B_C: gl.constexpr = k.shape[0] // 2 if HALF_FIRST_TILE else k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_C, 256 // BITS])
    k = k.slice(0, B_C, 0)
    S = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([64, B_C], TYPE, layout), use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [S])


@gluon.jit
def weigh(p, v, o, tile: gl.constexpr, COLUMN: gl.constexpr = 0):
    """Start O += P V, or a new O."""
    if tile.PV_BITS == 8:
        v = v.reshape([tile.D, tile.B_C]).slice(COLUMN, o.shape[1], 0).permute((1, 0))
        p = unpack(p, gl.DotOperandLayout(0, o.type.layout, 4))
    else:
        v = v.reshape([tile.B_C, tile.D])
    return warpgroup_mma(p, v, o, use_acc=tile.FRESH == 0, is_async=True)


@gluon.jit
def added(x, alpha, new):
    """Return x * alpha + new; alpha is a factor for each row."""
    return x * gl.convert_layout(alpha, gl.SliceLayout(1, x.type.layout))[:, None] + new


@gluon.jit
def weigh_in_turn(p, v, o, o_right, alpha, zero, tile: gl.constexpr):
    """Compute o * alpha + P V, for the left half of O's columns and then the right: registers hold half of P V."""
    o = added(o, alpha, warpgroup_mma_wait(0, [weigh(p, v, zero, tile)]))
    o_right = added(o_right, alpha, warpgroup_mma_wait(0, [weigh(p, v, zero, tile, o.shape[1])]))
    return o, o_right


@gluon.jit
def sum_rows(p, ones, l):
    """Start the sums of P's rows."""
    p = unpack(p, gl.DotOperandLayout(0, l.type.layout, 4))
    return warpgroup_mma(p, ones.permute((1, 0)), l, use_acc=False, is_async=True)


@gluon.jit
def operand(P, words, TYPE: gl.constexpr, call, layout: gl.constexpr, tile: gl.constexpr):
    """Return P as the loop carries it."""
    if tile.PV_BITS == 8:
        return pack(P, tile.SUMS)
    else:
        return gl.convert_layout(apply_dropout(P.to(TYPE), words, call.variant), layout)


@gluon.jit
def write(o, m, l, O, O_rows, L, q, place, q0, row0, call, lse_shift, NATURAL: gl.constexpr):
    """Write O and lse of 64 rows, once all keys have been seen. O leaves through its rows' stage of Q, but from
    registers if O_rows is in fp32. m may be NATURAL. lse_shift is what logits of 8-bit codes miss, or None."""
    row_layout: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    if call.variant.sink is not None:
        m, l, alpha = join_sink(m, l, gl.load(call.variant.sink + place.h).to(gl.float32), NATURAL)
        o = o * gl.convert_layout(alpha, row_layout)[:, None]
    inverse, lse = finalize(m, l, NATURAL)
    if lse_shift is not None:
        lse = gl.where(lse == float("-inf"), lse, lse + gl.convert_layout(lse_shift, lse.type.layout))
    rows = row0 + gl.arange(0, m.shape[0], m.type.layout)
    gl.store(
        row_values(L, call.packed, place.b, place.h, call.shape.H, q0, call.shape.M) + rows, lse, mask=rows < place.M
    )
    o = o * gl.convert_layout(inverse, row_layout)[:, None]
    if O_rows is None:
        q.store(o.to(O.dtype))
        fence_async_shared()
        triton_compat.store(O, [place.b, place.h, row0, 0], q)
    elif O_rows.ptr.dtype.element_ty != O.dtype:  # in fp32, for which q's stage has no room
        store_inside(O_rows, o, place.b, place.h, q0 + row0, place.M - row0, call.shape.d_v, 0)
    else:
        o = o.to(O.dtype)
        if row0 + o.shape[0] <= place.M:
            q.store(o)
            fence_async_shared()
            triton_compat.store(O, [0, place.h, q0 + row0, 0], q)
        else:
            store_inside(O_rows, o, place.b, place.h, q0 + row0, place.M - row0, call.shape.d_v, 0)


@gluon.jit
def attend(W: gl.constexpr, O, O_rows, L, shared, unused, call, c, codes, tile: gl.constexpr):
    """Compute 64 rows of every query tile, in warpgroup W."""
    wait_dependencies()
    if W == 0:  # while the first tile is loaded
        fill_outputs(unused, call.packed)
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    D: gl.constexpr = tile.D
    s_type: gl.constexpr = gl.int32 if tile.QK_BITS == 8 and shared.k.memory.dtype == gl.int8 else gl.float32
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_C, 256 // tile.QK_BITS])
    o_columns: gl.constexpr = D // 2 if tile.FRESH == 2 else D
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, o_columns, 256 // tile.PV_BITS])
    l_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 256 // tile.PV_BITS])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 32 // tile.PV_BITS)
    SCORES: gl.constexpr = len(call.variant.scores) > 0
    E4M3: gl.constexpr = tile.SUMS and s_type == gl.float32
    zero = gl.zeros([64, B_C], s_type, s_layout)
    zero_o = gl.zeros([64, o_columns], gl.float32, o_layout)
    zero_l = gl.zeros([64, 8], gl.float32, l_layout)
    n = 0  # tiles of queries so far
    y = 0  # tiles of keys so far
    if tile.PINGPONG and W == WARPGROUPS - 1:
        named_barrier("arrive", 0)
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        place, tile_of_head, q0, k0 = located(t, call, tile)
        loop = loop_of(place, tile_of_head, call.variant, tile)
        row0 = place.i0 + 64 * W
        at = n % tile.Q_STAGES * WARPGROUPS + W
        q = shared.q.memory.index(at * (16 // tile.QK_BITS)).reshape([64, D])
        part = part_of(loop, place, row0, call.variant, tile)
        y = skip_tiles(W, shared, y, loop.hi - part.hi, tile)
        x = part.hi - 1
        j = key_tile(call.variant, loop, x)
        if tile.QK_BITS == 8:
            q_row, k_row = first_rows(place, q0, k0, call.packed, tile)
            if call.packed is None:
                matrix, matrix_k = place.matrix, place.matrix // call.shape.group
            else:
                matrix, matrix_k = place.h, place.h // call.shape.group
            rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
            q_at = (matrix * (codes.q_blocks >> 1) + q_row // BLOCK_Q) * BLOCK_Q + rows
            q_scale = gl.load(codes.q_scale + q_at, mask=rows < place.M, other=0.0)
            lse_shift = gl.load(codes.q_shift + q_at, mask=rows < place.M, other=0.0)
            k_scale = scale_at(codes.k_scale, matrix_k, codes.k_blocks, k_row + j * B_C, BLOCK_K)
            if tile.PV_BITS == 8:
                v_scale = scale_at(codes.v_scale, matrix_k, codes.k_blocks, k_row + j * B_C, BLOCK_K)
        else:
            lse_shift = None
        wait(shared.q.full, n)
        if SCORES:  # which may compute several rows together
            zero_queries_past(q, place, row0, call.packed)
        wait(shared.k.full, y)
        S = logits(
            q, stage(shared.k.memory, y).reshape([B_C, D]), tile.HALF_FIRST_TILE and W == 0, s_type, tile.QK_BITS
        )
        arrive(shared.k.empty, y)
        c_first = c
        if tile.QK_BITS == 8:
            S = descaled(S, q_scale * k_scale) if SCORES else S.to(gl.float32)
            c_first = c if SCORES else scale_of(S, c, q_scale * k_scale)
        m, l, P = begin(S, is_partial(x, part), place, row0, j * B_C, call.variant, c_first, s_layout, E4M3, tile)
        first_words = read_bits(shared.bits, y * WARPGROUPS + W, 0, zero)
        p = operand(P, first_words, O.dtype, call, p_layout, tile)
        if tile.PAGE is None:
            zero_values(place, j, call.packed, shared, y, tile)
        else:
            zero_unseen(place, j, call, shared, y, tile)
        o = zero_o
        o_right = zero_o if tile.FRESH == 2 else zero_l
        alpha_before = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        alpha_l = alpha_before
        l_sum = zero_l
        if tile.Q_STAGES > 1:  # by now the O of the tile before has left its Q stage
            if n > 0:
                tma.store_wait(0)
                arrive(shared.q.empty, n - 1)
        below = any_below(m) if E4M3 and tile.FRESH == 1 else False
        while x > part.lo:
            x -= 1
            j = key_tile(call.variant, loop, x)
            if tile.QK_BITS == 8:  # early: it takes long
                k_scale = scale_at(codes.k_scale, matrix_k, codes.k_blocks, k_row + j * B_C, BLOCK_K)
                if tile.PV_BITS == 8:
                    v_next = scale_at(codes.v_scale, matrix_k, codes.k_blocks, k_row + j * B_C, BLOCK_K)
            if tile.FRESH == 2:
                wait(shared.v.full, y)
                # one turn is both halves and S: only their additions leave the tensor cores idle
                if tile.PINGPONG:
                    named_barrier("sync", W)
                o, o_right = weigh_in_turn(p, stage(shared.v.memory, y), o, o_right, alpha_before, zero_o, tile)
            wait(shared.k.full, y + 1)
            if tile.PINGPONG and tile.FRESH != 2:
                named_barrier("sync", W)
            k_next = stage(shared.k.memory, y + 1).reshape([B_C, D])
            S_next = warpgroup_mma(q, k_next.permute((1, 0)), zero, use_acc=False, is_async=True)
            if tile.SUMS:
                l_next = sum_rows(p, shared.ones, zero_l)
            if tile.FRESH != 2:
                wait(shared.v.full, y)
                o_next = weigh(p, stage(shared.v.memory, y), zero_o if tile.FRESH else o, tile)
            if tile.PINGPONG:
                named_barrier("arrive", (W + 1) % WARPGROUPS)
            words = read_bits(shared.bits, (y + 1) * WARPGROUPS + W, 0, zero)
            if tile.WAIT_PV == 3:
                o_next = warpgroup_mma_wait(0, [o_next])
            S_new = warpgroup_mma_wait(tile.SUMS + (tile.FRESH != 2), [S_next])
            if tile.QK_BITS == 8:
                S_new = descaled(S_new, q_scale * k_scale) if SCORES else S_new
                S_new = S_new.to(gl.float32) if tile.MASK_IN_LOOP else S_new
                c_j = c if SCORES else scale_of(S_new, c, q_scale * k_scale)
            else:
                c_j = c
            partial = False
            if tile.MASK_IN_LOOP:
                partial = is_partial(x, part)
            S_new = scored(S_new, partial, place, row0, j * B_C, call.variant)
            if tile.MASK_IN_LOOP:
                if partial:
                    if tile.QK_BITS == 8 and not SCORES:
                        S_new, c_j = positive(S_new, c_j)
                    S_new = masked(S_new, place, row0, j * B_C, call.variant)
            P_new, m, l, alpha_new, below = online(
                S_new, m, l, c_j, y, below, E4M3, tile.QK_BITS == 8 and not SCORES, tile
            )
            if tile.SUMS and tile.FRESH == 2:
                l_next = warpgroup_mma_wait(0, [l_next])
            elif tile.SUMS:
                o_next, l_next = warpgroup_mma_wait(0, [o_next, l_next])
            elif tile.FRESH != 2:
                o_next = warpgroup_mma_wait(0, [o_next])
            arrive(shared.k.empty, y + 1)
            if tile.FRESH == 1:
                o = added(o, alpha_before, o_next)
            elif tile.FRESH == 0:
                o = o_next
            if tile.SUMS:
                l_sum = added(l_sum, alpha_l, l_next)
                alpha_l = alpha_new
            if tile.PV_BITS == 8:
                alpha = alpha_new * (v_scale / v_next)
                v_scale = v_next
            else:
                alpha = alpha_new
            if tile.FRESH:
                alpha_before = alpha
            p = operand(P_new, words, O.dtype, call, p_layout, tile)
            if not (tile.BOUNDED or tile.FRESH):
                o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
            y += 1
        if tile.PAGE is not None:
            zero_unseen(place, j, call, shared, y, tile)
        wait(shared.v.full, y)
        if tile.SUMS:
            l_next = sum_rows(p, shared.ones, zero_l)
        if tile.FRESH != 2:
            o_last = weigh(p, stage(shared.v.memory, y), zero_o if tile.FRESH else o, tile)
        t = receive_tile(shared.tile_ids, n + 1, 4)
        if tile.SUMS:
            if tile.FRESH == 2:
                l_next = warpgroup_mma_wait(0, [l_next])
            else:
                o_last, l_next = warpgroup_mma_wait(0, [o_last, l_next])
            l_sum = added(l_sum, alpha_l, l_next)
            l = known(gl.convert_layout(gl.max(l_sum, 1), gl.SliceLayout(1, s_layout)), m)
        elif tile.FRESH != 2:
            o_last = warpgroup_mma_wait(0, [o_last])
        if tile.FRESH == 2:
            o, o_right = weigh_in_turn(p, stage(shared.v.memory, y), o, o_right, alpha_before, zero_o, tile)
            o = gl.join(o, o_right).permute((0, 2, 1)).reshape([64, D])
            whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 256 // tile.PV_BITS])
            o = gl.convert_layout(o, whole)
        elif tile.FRESH:
            o = added(o, alpha_before, o_last)
        else:
            o = o_last
        y += 1
        if tile.PV_BITS == 8:
            o = o * v_scale
            if c is None:  # then m is that of P itself
                o, l = o * P_SCALE, l * P_SCALE
        if call.variant.dropout is not None:
            o = o * call.variant.dropout.rescale
        if tile.BOUNDED:
            m = gl.where(l == 0.0, float("-inf"), m)
        write(o, m, l, O, O_rows, L, shared.o.index(at).reshape([64, D]), place, q0, row0, call, lse_shift, c is None)
        y = skip_tiles(W, shared, y, part.lo - loop.lo, tile)
        if tile.Q_STAGES == 1:
            tma.store_wait(0)
            arrive(shared.q.empty, n)
        n += 1
    tma.store_wait(0)


@gluon.jit
def counts_of(shape):
    """Return a launch's shape. It hands counts over as 2 n + 1 (see `odd` in host/launch.py). With >> in place of //,
    ptxas spills where registers are short."""
    return Shape(
        shape.M // 2, shape.N // 2, shape.d_v // 2, shape.H // 2, shape.group // 2, shape.heads // 2,
        shape.section // 2, shape.tiles // 2,
    )  # fmt: skip


# not specialised on lengths, nor on what is counted from them
@gluon.jit(do_not_specialize=["codes", "packed", "cache", "unused", "shape", "variant"])
def attention_forward(
    Q, K, V, codes, O, O_rows, L, counter, packed, cache, unused, variant, c, shape, order: gl.constexpr,
    tile: gl.constexpr,
):  # fmt: skip
    """Compute O and L of every tile of queries. c turns logits into base 2, or is None (see `row_max`). `order` says
    which tile comes when: `schedule.assign` or the like."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    D: gl.constexpr = tile.D
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    KV_STAGES: gl.constexpr = tile.KV_STAGES
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    V_ROWS: gl.constexpr = D if tile.PV_BITS == 8 else B_C  # codes of V are transposed
    V_COLUMNS: gl.constexpr = B_C if tile.PV_BITS == 8 else D
    REGISTERS: gl.constexpr = tile.REGISTERS
    shape = counts_of(shape)
    done = barriers(KV_STAGES, WARPGROUPS)
    o = gl.allocate_shared_memory(O.dtype, [Q_STAGES * WARPGROUPS, 1, 1, 64, D], O.layout)
    if tile.QK_BITS == 8:
        q = triton_compat.reinterpret(o, Q.dtype, [2 * Q_STAGES * WARPGROUPS, 1, 1, 64, D], Q.layout)
    else:
        q = o
    ones: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, B_C], gl.float8e4nv)
    shared = Shared(
        Channel(q, barriers(Q_STAGES, 1), barriers(Q_STAGES, WARPGROUPS)),
        o,
        Channel(
            gl.allocate_shared_memory(K.dtype, [KV_STAGES, 1, 1, B_C, D], K.layout),
            barriers(KV_STAGES, 1),
            done,
        ),
        Channel(
            gl.allocate_shared_memory(V.dtype, [KV_STAGES, 1, 1, V_ROWS, V_COLUMNS], V.layout),
            barriers(KV_STAGES, 1),
            done,
        ),
        tile_channel(WARPGROUPS + 1 if DROPOUT_WARPS else WARPGROUPS),
        bits(64, WARPGROUPS, 1) if DROPOUT_WARPS else None,
        gl.allocate_shared_memory(gl.float8e4nv, [8, B_C], ones, ones_of(B_C)) if tile.SUMS else None,
    )
    fence_async_shared()
    launch_dependents()
    if DROPOUT_WARPS:
        # four warpgroups divide 512 registers a thread, and three divide 504
        gl.static_assert(WARPGROUPS == 2)
        LEFT: gl.constexpr = (488 if DROPOUT_WARPS == 4 else 504) - 2 * REGISTERS
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (1, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (produce_bits, (shared, Call(shape, packed, variant, cache, order), tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [4, DROPOUT_WARPS, 1], [REGISTERS, LEFT, 24],
        )  # fmt: skip
    elif WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [1], [24],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (1, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (1, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (2, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 32],
        )  # fmt: skip
