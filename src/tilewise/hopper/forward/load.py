"""Run the forward's warps that produce: those that load tiles, and those that generate dropout bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.channel import arrive, expect, stage, wait_before, wait_dependencies
from ..parts.dropout_bits import dropout_words, in_whole
from ..parts.pieces import bytes_of, load_pieces
from ..parts.queue import fetch_next_tile, receive_tile, reset_counter, send_tile
from .eight_bits import first_rows, load_values
from .pages import load_rows, located
from .queries import column_of, key_tile, loop_of, part_of, tiles_of


@gluon.jit
def load(Q, K, V, shared, counter, call, codes, tile: gl.constexpr):
    """Run the producer warp."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    FETCH_EARLY: gl.constexpr = tile.FETCH_EARLY
    K_PIECES: gl.constexpr = tile.K_PIECES
    COLUMNS: gl.constexpr = tile.D // K_PIECES
    if not tile.LOCATE_EARLY:
        wait_dependencies()
    t = gl.program_id(0)
    n = 0  # tiles of queries so far
    y = 0  # tiles of keys so far
    while t < tiles_of(call, tile):
        place, m, q0, k0 = located(t, call, tile)
        if place.i0 < place.M:  # packed sequences may be shorter
            send_tile(shared.tile_ids, t, n)
            b = place.b if call.packed is None else 0
            column = column_of(t, tile)
            loop = loop_of(place, m, call.variant, tile)
            h_k = place.h // call.shape.group
            q_row, k_row = first_rows(place, q0, k0, call.packed, tile)
            if tile.LOCATE_EARLY:
                wait_dependencies()  # for Q, K and V, once
            wait_before(shared.q.empty, n)
            bar = expect(shared.q.full, n, bytes_of(Q.block_type, tile.D) * WARPGROUPS)
            for w in gl.static_range(WARPGROUPS):
                at = (n % Q_STAGES * WARPGROUPS + w) * (16 // tile.QK_BITS)
                load_pieces(Q, b, place.h, q_row + place.i0 + 64 * w, bar, shared.q.memory, at)
            count = loop.hi - loop.lo
            j_before = 0
            for x in range(count + 1):  # K one tile ahead of V: the order in which they are used
                j = j_before
                wait_before(shared.k.empty, y * K_PIECES)
                if x < count:
                    j = key_tile(call.variant, loop, loop.hi - 1 - x)
                    if tile.PAGE is None:
                        for p in gl.static_range(K_PIECES):
                            u = y * K_PIECES + p
                            if p > 0:
                                wait_before(shared.k.empty, u)
                            bar = expect(shared.k.full, u, bytes_of(K.block_type, COLUMNS))
                            at = u % (K_PIECES * tile.KV_STAGES)
                            load_pieces(K, b, h_k, k_row + j * B_C, bar, shared.k.memory, at, p * COLUMNS)
                    else:
                        load_rows(K, shared.k, y, call, place, h_k, k_row + j * B_C, tile)
                if x > 0:
                    if K_PIECES > 1:
                        wait_before(shared.k.empty, (y + 1) * K_PIECES - 1)
                    if tile.PAGE is None:
                        row, code_row = k0 + j_before * B_C, k_row + j_before * B_C
                        load_values(V, shared.v, y - 1, b, h_k, row, code_row, column, tile)
                    else:
                        load_rows(V, shared.v, y - 1, call, place, h_k, k0 + j_before * B_C, tile)
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
    while t < tiles_of(call, tile):
        place, tile_of_head, _, _ = located(t, call, tile)
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
