"""Compute 64 rows of queries in a warpgroup: S = Q K^T, the online softmax, O += P V.

S of the next key tile is started before O += P V of this one, so that both run while the other warpgroup does its
softmax.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from ...tile.rows import row_values
from ...tile.softmax import finalize, join_sink
from ..parts.channel import arrive, named_barrier, wait, wait_dependencies
from ..parts.dropout_bits import apply_dropout, read_bits
from ..parts.pieces import contract, pieces_of, rows_of, scaled, store_piece, tile_at, tile_in_loop, tile_of, times
from ..parts.queue import receive_tile
from ..parts.ragged import fill_outputs, store_inside, zero_queries_past
from .eight_bits import in_units, key_scales, pack, positive, product_of, rescaled, row_scales, scale_of
from .pages import located, zero_hidden
from .queries import column_of, is_partial, key_tile, loop_of, part_of, skip_tiles, tiles_of
from .softmax import any_below, begin, masked, online, scored
from .sums import accumulator, finish_products, join, join_halves, no_sums, rescale, start_products, totals


@gluon.jit
def attend(W: gl.constexpr, O, O_rows, L, shared, unused, call, c, codes, tile: gl.constexpr):
    """Compute 64 rows of every query tile, in warpgroup W."""
    wait_dependencies()
    if W == 0:  # while the first tile is loaded
        fill_outputs(unused, call.packed)
    n = 0  # tiles of queries so far
    y = 0  # tiles of keys so far
    if tile.PINGPONG and W == tile.WARPGROUPS - 1:
        named_barrier("arrive", 0)
    t = receive_tile(shared.tile_ids, n, 4)
    while t < tiles_of(call, tile):
        place, tile_of_head, q0, k0 = located(t, call, tile)
        loop = loop_of(place, tile_of_head, call.variant, tile)
        row0 = place.i0 + 64 * W
        at = n % tile.Q_STAGES * tile.WARPGROUPS + W
        q = queries(W, shared, n, y, tile)
        part = part_of(loop, place, row0, call.variant, tile)
        column = column_of(t, tile)
        y = skip_tiles(W, shared, y, loop.hi - part.hi, tile, tile.K_PIECES)
        o, m, l, lse_shift, t, y = loop_over_keys(
            W, O.dtype, shared, q, codes, place, loop, part, row0, q0, k0, n, y, call, c, tile
        )
        if call.variant.dropout is not None:
            o = scaled(o, call.variant.dropout.rescale)
        if tile.BOUNDED:
            m = gl.where(l == 0.0, float("-inf"), m)
        write(o, m, l, O, O_rows, L, shared.o, at, place, q0, row0, column, call, lse_shift, c is None, tile)
        y = skip_tiles(W, shared, y, part.lo - loop.lo, tile, tile.K_PIECES)
        if tile.Q_STAGES == 1:
            tma.store_wait(0)
            arrive(shared.q.empty, n)
        n += 1
    tma.store_wait(0)


@gluon.jit
def loop_over_keys(
    W: gl.constexpr, TYPE: gl.constexpr, shared, q, codes, place, loop, part, row0, q0, k0, n, y, call, c,
    tile: gl.constexpr,
):  # fmt: skip
    """Sum over the key tiles of `part`, from the last to the first. Return O, m, l, what lse misses, the next tile's
    number, and the next use."""
    B_C: gl.constexpr = tile.B_C
    K_PIECES: gl.constexpr = tile.K_PIECES
    INTEGERS: gl.constexpr = tile.QK_BITS == 8 and shared.k.memory[0].dtype == gl.int8
    s_layout: gl.constexpr = accumulator(B_C, tile.QK_BITS)
    SCORES: gl.constexpr = len(call.variant.scores) > 0
    BY_ROW: gl.constexpr = tile.QK_BITS == 8 and not SCORES
    E4M3: gl.constexpr = tile.SUM_BY_PRODUCT and not INTEGERS
    zero = gl.zeros([64, B_C], gl.int32 if INTEGERS else gl.float32, s_layout)
    x = part.hi - 1
    j = key_tile(call.variant, loop, x)
    rows = row_scales(codes, place, row0, q0, k0, call, s_layout, tile)
    k_scale, v_scale = key_scales(codes, rows, j, tile)
    wait(shared.q.full, n)
    if SCORES:  # which may compute several rows together
        zero_queries_past(q, place, row0, call.packed)
    wait(shared.k.full, y * K_PIECES)
    S_first = first_logits(q, shared.k, y, zero.dtype, tile.HALF_FIRST_TILE and W == 0, tile)
    arrive(shared.k.empty, (y + 1) * K_PIECES - 1)
    S_first = product_of(S_first, rows, k_scale, SCORES, True, tile)
    c_first = scale_of(S_first, c, rows.scale * k_scale) if BY_ROW else c
    m, l, P_first = begin(
        S_first, is_partial(x, part), place, row0, j * B_C, call.variant, c_first, s_layout, E4M3, BY_ROW, tile
    )
    p = operand(P_first, read_bits(shared.bits, y * tile.WARPGROUPS + W, 0, zero), TYPE, call, tile)
    zero_hidden(place, j, call, shared, y, tile)
    sums = no_sums(s_layout, tile)
    if tile.Q_STAGES > 1:  # by now the O of the tile before has left its Q stage
        if n > 0:
            tma.store_wait(0)
            arrive(shared.q.empty, n - 1)
    LATER: gl.constexpr = tile.SUM_BY_PRODUCT + (tile.PROMOTE != "halves") * len(sums.o)
    below = any_below(m, E4M3, tile)
    while x > part.lo:
        x -= 1
        j = key_tile(call.variant, loop, x)
        k_scale, v_next = key_scales(codes, rows, j, tile)  # early: it takes long
        sums = join_halves(sums, p, shared, y, W if tile.PINGPONG else None, tile)
        wait(shared.k.full, (y + 1) * K_PIECES)
        if tile.PINGPONG and tile.PROMOTE != "halves":
            named_barrier("sync", W)
        S = start_logits(queries(W, shared, n, y, tile), shared.k, y + 1, zero, tile)
        products = start_products(sums, p, shared, y, tile)
        if tile.PINGPONG:
            named_barrier("arrive", (W + 1) % tile.WARPGROUPS)
        words = read_bits(shared.bits, (y + 1) * tile.WARPGROUPS + W, 0, zero)
        if tile.WAIT_PV == 3:
            products = finish_products(products, tile)
        S = warpgroup_mma_wait(LATER, [release_pieces(S, shared.k, y + 1, LATER, tile)])
        S = product_of(S, rows, k_scale, SCORES, tile.MASK_IN_LOOP, tile)
        c_j = scale_of(S, c, rows.scale * k_scale) if BY_ROW else c
        partial = is_partial(x, part) if tile.MASK_IN_LOOP else False
        S = scored(S, partial, place, row0, j * B_C, call.variant)
        if tile.MASK_IN_LOOP:
            if partial:
                if BY_ROW:
                    S, c_j = positive(S, c_j)
                S = masked(S, place, row0, j * B_C, call.variant)
        P, m, l, alpha, below = online(S, m, l, c_j, y, below, E4M3, BY_ROW, tile)
        products = finish_products(products, tile)
        arrive(shared.k.empty, (y + 2) * K_PIECES - 1)
        sums = join(sums, products, tile)
        p = operand(P, words, TYPE, call, tile)
        sums = rescale(sums, alpha, rescaled(alpha, v_scale, v_next, tile), tile)
        v_scale = v_next
        y += 1
    if tile.PAGE is not None:
        zero_hidden(place, j, call, shared, y, tile)
    products = start_products(sums, p, shared, y, tile)
    t = receive_tile(shared.tile_ids, n + 1, 4)
    sums = join(sums, finish_products(products, tile), tile)
    o, l = totals(join_halves(sums, p, shared, y, None, tile), l, m, tile)
    o, l = in_units(o, l, v_scale, c, tile)
    return o, m, l, rows.lse_shift, t, y + 1


@gluon.jit
def queries(W: gl.constexpr, shared, n, y, tile: gl.constexpr):
    """Return Q of warpgroup W's tile n. With K in pieces, ptxas would keep all its addresses."""
    at = n % tile.Q_STAGES * tile.WARPGROUPS + W
    if tile.K_PIECES == 1:
        return tile_of(shared.q.memory, at * (16 // tile.QK_BITS))
    else:
        return tile_in_loop(shared.q.memory, at, y)


@gluon.jit
def first_logits(q, channel, y, TYPE: gl.constexpr, HALF: gl.constexpr, tile: gl.constexpr):
    """Compute Q K^T of key tile y, or only the first HALF of its columns."""
    COLUMNS: gl.constexpr = tile.B_C // 2 if HALF else tile.B_C
    zero = gl.zeros([64, COLUMNS], TYPE, accumulator(COLUMNS, tile.QK_BITS))
    return warpgroup_mma_wait(0, [release_pieces(start_logits(q, channel, y, zero, tile), channel, y, 0, tile)])


@gluon.jit
def start_logits(q, channel, y, zero, tile: gl.constexpr):
    """Start S = Q K^T of key tile y, of as many keys as `zero` has columns. K's first piece has come."""
    K_PIECES: gl.constexpr = tile.K_PIECES
    S = zero
    for p in gl.static_range(K_PIECES):
        n = y * K_PIECES + p
        if p > 0:
            wait(channel.full, n)
        k = rows_of(tile_at(channel.memory, n), 0, zero.shape[1])
        S = contract(part_of_columns(q, p, K_PIECES), k, S, p > 0)
    return S


@gluon.jit
def part_of_columns(pieces, PART: gl.constexpr, PARTS: gl.constexpr):
    """Return one of so many parts of the columns, which lies in a single piece if there are several."""
    if PARTS == 1:
        return pieces
    else:
        SIZE: gl.constexpr = pieces[0].shape[1]
        COLUMNS: gl.constexpr = SIZE * len(pieces) // PARTS
        return (pieces[PART * COLUMNS // SIZE].slice(PART * COLUMNS % SIZE, COLUMNS, 1),)


@gluon.jit
def release_pieces(S, channel, y, LATER: gl.constexpr, tile: gl.constexpr):
    """Release the pieces of K but for the last, as S has used them. LATER products were started after S."""
    K_PIECES: gl.constexpr = tile.K_PIECES
    for p in gl.static_range(K_PIECES - 1):
        S = warpgroup_mma_wait(LATER + K_PIECES - 1 - p, [S])
        arrive(channel.empty, y * K_PIECES + p)
    return S


@gluon.jit
def operand(P, words, TYPE: gl.constexpr, call, tile: gl.constexpr):
    """Return P as the loop carries it."""
    if tile.PV_BITS == 8:
        return pack(P, tile.SUM_BY_PRODUCT)
    else:
        layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(pieces_of(tile.D_V)[0], 16), 2)
        return gl.convert_layout(apply_dropout(P.to(TYPE), words, call.variant), layout)


@gluon.jit
def write(
    o, m, l, O, O_rows, L, memory, at, place, q0, row0, column, call, lse_shift, NATURAL: gl.constexpr,
    tile: gl.constexpr,
):  # fmt: skip
    """Write O from `column` on and lse of 64 rows, once all keys have been seen. O leaves through its rows' stage of Q,
    but from registers if O_rows is in fp32. m may be NATURAL. lse_shift is what logits of 8-bit codes miss."""
    if call.variant.sink is not None:
        m, l, alpha = join_sink(m, l, gl.load(call.variant.sink + place.h).to(gl.float32), NATURAL)
        o = times(o, alpha)
    inverse, lse = finalize(m, l, NATURAL)
    if tile.QK_BITS == 8:
        lse = gl.where(lse == float("-inf"), lse, lse + gl.convert_layout(lse_shift, lse.type.layout))
    rows = row0 + gl.arange(0, m.shape[0], m.type.layout)
    gl.store(
        row_values(L, call.packed, place.b, place.h, call.shape.H, q0, call.shape.M) + rows, lse, mask=rows < place.M
    )
    o = times(o, inverse)
    D_V: gl.constexpr = pieces_of(tile.D_V)
    for p in gl.static_range(len(D_V)):
        if O_rows is None:
            store_piece(O, o[p].to(O.dtype), place.b, place.h, row0, column, memory[p], at, D_V[p])
        elif O_rows.ptr.dtype.element_ty != O.dtype:  # in fp32, for which q's stage has no room
            store_inside(O_rows, o[p], place.b, place.h, q0 + row0, place.M - row0, call.shape.d_v, column)
        elif row0 + 64 <= place.M:
            store_piece(O, o[p].to(O.dtype), 0, place.h, q0 + row0, column, memory[p], at, D_V[p])
        else:
            rest = o[p].to(O.dtype)
            store_inside(O_rows, rest, place.b, place.h, q0 + row0, place.M - row0, call.shape.d_v, column)
        column += D_V[p]
