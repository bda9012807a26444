"""Compute the backward's products in two groups of warps, for head sizes to 128; by_gradient.py uses some functions.

Each group owns 64 rows of K and V, with their S, P, dP, dS, dK and dV. For dQ the groups exchange dS through shared
memory. S is transposed, (keys, queries). So P^T and dS^T are register operands of dV += P^T dO and dK += dS^T Q. dQ of
a query tile is computed one tile late: no group waits for the other's dS, and they drift into opposite phases.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...tile.gradients import seen
from ...tile.masks import query_range_of
from ...tile.scores import Entries, apply_scores, scores_backward
from ...tile.softmax import LN2, probabilities
from ..parts.channel import arrive, end_block, stage, wait
from ..parts.dropout_bits import apply_bits, apply_dropout, read_bits
from ..parts.pieces import (
    as_factor_of,
    contract,
    expand,
    halves_of,
    rows_of,
    scaled,
    tile_at,
    tile_in_loop,
    wait_for,
    wait_for_both,
    zeros_of,
)
from ..parts.queue import receive_tile
from ..parts.ragged import zero_keys, zero_queries
from ..parts.threads import as_tile, by_thread, positions
from .gqa_reduce import add_partials, by_register
from .keys import Step, exists, first_step, is_partial, keys_of, next_step, part_at, part_of, place_of, within
from .outputs import memory_of_gradients, store_pieces, wait_stores


@gluon.jit
def tile_probabilities(S, logs, place, j0, partial, variant, shared, unit, y):
    """Compute P of a transposed tile, before dropout; the mask applies to a `partial` tile. Keep what the mask reads
    apart from what scores read, else ptxas computes it for every tile. y >> 31 is 0, which ptxas cannot know."""
    layout: gl.constexpr = S.type.layout
    i = gl.arange(0, S.shape[1], gl.SliceLayout(0, layout))[None, :]
    j = gl.arange(0, S.shape[0], gl.SliceLayout(1, layout))[:, None]
    T = scored(S, place, j0, variant)
    if shared.shift is not None:
        T = T - row_shift(T, shared, y)
    P = probabilities(T, logs[None, :], unit, False)
    if partial:
        if len(variant.scores) > 0:
            j0 += y >> 31
        shown = inside(S, place, j0, variant) if variant.lists is None else seen(place, variant, i, j0, j)
        P = gl.where(shown, P, 0.0)
    return P


@gluon.jit
def inside(S, place, j0, variant):
    """Return which queries of a transposed tile are in the interval that sees a key."""
    row, first, column = positions(S)
    j = j0 + row
    lo, hi = query_range_of(variant.mask, place.b, j, place.M, place.shift)
    count = gl.where(j < place.N, gl.maximum(hi - lo, 0), 0)
    # one comparison tests both bounds: before the first query, the unsigned difference wraps
    after = column - (lo - place.i0 - first)
    shown = after.to(gl.uint32) < count.to(gl.uint32)
    return as_tile(shown, S)


@gluon.jit
def entries(S, place, j0):
    """Return where a transposed tile's entries are, by thread."""
    row, first, column = positions(S)
    return Entries(place.b, place.h, place.i0 + place.shift + first, column, j0 + row, 0)


@gluon.jit
def scored(S, place, j0, variant):
    """Return the logits of a transposed tile after all scores."""
    if len(variant.scores) == 0:
        return S
    else:
        return as_tile(apply_scores(variant.scores, by_thread(S), entries(S, place, j0), len(variant.scores)), S)


@gluon.jit
def row_shift(T, shared, y):
    """Load what the logits of use y are shifted by. # (1, B_r)"""
    return stage(shared.shift, y).load(gl.SliceLayout(0, T.type.layout))[None, :]


@gluon.jit
def logits(P, logs):
    """Recover the logits from P, so that they take no registers until then. Where P is 0 they may be any number, as
    past the last row, where logs are inf."""
    PTX: gl.constexpr = "max.f32 $0, $1, 0f00800000; lg2.approx.ftz.f32 $0, $0;"
    log = gl.inline_asm_elementwise(PTX, "=f,f", [P], dtype=gl.float32, is_pure=True, pack=1)
    return log * LN2 + gl.where(logs < float("inf"), logs, 0.0) * LN2


@gluon.jit
def gradient(P, dP, logs, delta, S, place, j0, variant, shared, y):
    """Compute dS of a transposed tile: the gradient with respect to the scaled logits."""
    dS = P * (dP - delta)
    if len(variant.scores) == 0:
        return dS
    else:
        T = logits(P, logs)
        if shared.shift is not None:
            T = T + row_shift(T, shared, y)
        at = entries(S, place, j0)
        return as_tile(scores_backward(variant.scores, by_thread(dS), by_thread(S), by_thread(T), at, 0), S)


@gluon.jit
def rounded(P, dtype: gl.constexpr):
    """Round P to 16 bits, and return these and their value in fp32. Left to itself, ptxas rounds one number at a time,
    which is slow."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $4, $3; {.reg .b32 x; shl.b32 x, $0, 16; mov.b32 $1, x;"
            "and.b32 x, $0, 0xffff0000; mov.b32 $2, x;}",
            "=r,=f,=f,f,f", [P], dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $4, $3; {.reg .b16 x, y; mov.b32 {x, y}, $0; cvt.f32.f16 $1, x; cvt.f32.f16 $2, y;}",
            "=r,=f,=f,f,f", [P], dtype=(gl.float16, gl.float32), is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def row_block(W: gl.constexpr, n, y, dv, place, j0, partial, shared, call, tile: gl.constexpr):
    """Compute S, dP, P and dS of one query tile for 64 keys; return the running product of dV, and dS."""
    B_R: gl.constexpr = tile.B_R
    D: gl.constexpr = tile.D
    dtype: gl.constexpr = shared.k[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([64, B_R], gl.float32, s_layout)
    zero_queries(place, call.packed, shared, y, tile)
    q = tile_at(shared.q.memory, y)
    do = tile_at(shared.do.memory, y)
    k = tile_in_loop(shared.k, n, y)
    v = tile_in_loop(shared.v, 0, y)
    wait(shared.q.full, y)
    S = contract(rows_of(k, 64 * W), q, zero)
    wait(shared.do.full, y)
    dP = contract(rows_of(v, 64 * W), do, zero)
    logs = stage(shared.logs, y).load(row_layout)
    words = read_bits(shared.bits, y, 64 * W, zero)
    S = warpgroup_mma_wait(len(v), [S])
    P = tile_probabilities(S, logs, place, j0, partial, call.variant, shared, call.shape.unit, y)
    if tile.GROUP > 1 and W == 0:  # else ptxas has both groups wait for dP above their exponentials
        end_block(y)
    LATE: gl.constexpr = B_R == 128 or len(call.variant.scores) > 0 or call.variant.dropout is not None
    if not LATE:
        delta = stage(shared.delta, y).load(row_layout)
    if B_R == 128:
        p16, P = rounded(P, dtype)
    else:
        p16 = P.to(dtype)
    p = as_factor_of(apply_dropout(p16, words, call.variant), dv[0])
    dP = warpgroup_mma_wait(0, [dP])
    dv = expand(p, do, dv)
    if LATE:  # 16 or 32 registers fewer while S and dP are alive
        delta = stage(shared.delta, y).load(row_layout)
        if len(call.variant.scores) > 0:
            logs = stage(shared.logs, y).load(row_layout)
    if call.variant.dropout is not None:
        dP = apply_bits(dP, words) * call.variant.dropout.rescale
        if D == 128 and len(call.variant.scores) == 0:  # until here it waits in 16 bits, in half as many registers
            P = p16.to(gl.float32)
    ds = gradient(P, dP, logs[None, :], delta[None, :], S, place, j0, call.variant, shared, y)
    return dv, ds.to(dtype)


@gluon.jit
def dq_block(ds, k, W: gl.constexpr, tile: gl.constexpr):
    """Start group W's block of dQ = dS K: half of 128 rows, half of 128 columns or a piece of fewer, or else its own
    keys' part."""
    COLUMNS: gl.constexpr = 32 if tile.D == 96 and W == 1 else 64
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zero = gl.zeros([64, COLUMNS], gl.float32, layout)
    if tile.B_R == 128:
        return warpgroup_mma(ds.slice(64 * W, 64, 1).permute((1, 0)), k[0], zero, use_acc=False, is_async=True)
    elif tile.D == 128:
        return warpgroup_mma(ds.permute((1, 0)), k[0].slice(64 * W, 64, 1), zero, use_acc=False, is_async=True)
    elif tile.D == 96:
        return warpgroup_mma(ds.permute((1, 0)), k[W], zero, use_acc=False, is_async=True)
    else:
        own = ds.slice(64 * W, 64, 0).permute((1, 0))
        return warpgroup_mma(own, k[0].slice(64 * W, 64, 0), zero, use_acc=False, is_async=True)


@gluon.jit
def release_tile(y, shared):
    """Skip use y, a tile that none of group W's keys sees."""
    wait(shared.q.full, y)
    arrive(shared.q.empty, y)
    wait(shared.do.full, y)
    arrive(shared.do.empty, y)
    if shared.bits is not None:
        wait(shared.bits.full, y)
        arrive(shared.bits.empty, y)


@gluon.jit
def store_zero_ds(W: gl.constexpr, y, shared):
    """Store zeros as group W's dS of use y."""
    ds = stage(shared.ds.memory, y).slice(64 * W, 64, 0)
    B_R: gl.constexpr = ds.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    ds.store(gl.zeros([64, B_R], ds.dtype, layout))
    fence_async_shared()


@gluon.jit
def skip_tile(W: gl.constexpr, n, y, shared, tile: gl.constexpr):
    """Skip use y in group W, but compute its block of dQ. Return the next use."""
    release_tile(y, shared)
    store_zero_ds(W, y, shared)
    arrive(shared.ds.full, y)
    wait(shared.ds.full, y)
    k = tile_in_loop(shared.k, n, y)
    send_dq(warpgroup_mma_wait(0, [dq_block(stage(shared.ds.memory, y), k, W, tile)]), shared, y, W)
    return y + 1


@gluon.jit
def skip_next_tile(W: gl.constexpr, n, y, shared, tile: gl.constexpr):
    """Skip use y + 1 in group W, but compute its block of dQ of use y."""
    release_tile(y + 1, shared)
    wait(shared.ds.full, y)
    store_zero_ds(W, y + 1, shared)
    k = tile_in_loop(shared.k, n, y)
    dq = warpgroup_mma_wait(0, [dq_block(stage(shared.ds.memory, y), k, W, tile)])
    arrive(shared.ds.full, y + 1)
    send_dq(dq, shared, y, W)


@gluon.jit
def send_dq(dq, shared, y, W):
    """Send a block of dQ, use y of memory W, to the writer warp in register order: 16-byte stores without bank
    conflicts. Postprocess restores the order."""
    ROWS: gl.constexpr = dq.shape[1] // 4
    x = by_register(dq).reshape([ROWS, 256])
    mbarrier.wait(shared.dq.empty.index(W), (y & 1) ^ 1)
    shared.dq.memory.index(W).slice(0, ROWS, 0).store(x)
    fence_async_shared()
    mbarrier.arrive(shared.dq.full.index(W))


@gluon.jit
def next_tile(W: gl.constexpr, n, y, dk, dv, step, keys, partial, shared, call, tile: gl.constexpr):
    """Add one more query tile, use y + 1, to dK and dV, and compute group W's piece of dQ of the tile before."""
    place = place_of(step, keys, call, tile.B_R)
    j0 = keys.j0 + 64 * W
    dv_next, ds = row_block(W, n, y + 1, dv, place, j0, partial, shared, call, tile)
    # both halves of the previous dS are there, and both groups are done with the one before that
    wait(shared.ds.full, y)
    stage(shared.ds.memory, y + 1).slice(64 * W, 64, 0).store(ds)
    fence_async_shared()
    dq = dq_block(stage(shared.ds.memory, y), tile_in_loop(shared.k, n, y), W, tile)
    dk_next = expand(ds, tile_at(shared.q.memory, y + 1), dk)
    dv, dq = wait_for_both(len(dk), dv_next, dq)
    arrive(shared.ds.full, y + 1)
    arrive(shared.do.empty, y + 1)
    send_dq(dq, shared, y, W)
    dk = wait_for(0, dk_next)
    arrive(shared.q.empty, y + 1)
    return dk, dv


@gluon.jit
def next_tile_of_part(W: gl.constexpr, n, y, dk, dv, step, part, keys, shared, call, tile: gl.constexpr):
    """Do the same where an iteration may be outside group W's part of the loop: where the next query head begins."""
    partial = True if tile.TWO_LOOPS else tile.MASK_IN_LOOP & is_partial(step, part_at(step, part, tile))
    if tile.HALF_LOOPS and tile.GROUP > 1:
        if within(step, part):
            dk, dv = next_tile(W, n, y, dk, dv, step, keys, partial, shared, call, tile)
        else:
            skip_next_tile(W, n, y, shared, tile)
    else:
        dk, dv = next_tile(W, n, y, dk, dv, step, keys, partial, shared, call, tile)
    return dk, dv


@gluon.jit
def key_half(W: gl.constexpr, dK, dV, gqa_sums, shared, call, tile: gl.constexpr):
    """Compute rows 64 W to 64 W + 63 of dK and dV for every key tile, and group W's blocks of dQ."""
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        j0 = keys.j0 + 64 * W
        dk = zeros_of(64, tile.D)
        dv = zeros_of(64, tile.D_V)
        wait(shared.kv.full, n)
        wait_stores()  # the gradients of the keys before, meanwhile
        zero_keys(keys, call.packed, shared, n, tile)
        step = first_step(keys, call.variant, tile)
        part = part_of(step.loop, keys, j0, call.variant, tile)
        left_out = 0
        if tile.HALF_LOOPS:
            while exists(step) & ~within(step, part):
                y = skip_tile(W, n, y, shared, tile)
                step = next_step(step, keys, call.variant, tile)
            if tile.GROUP == 1:  # then loop over its part only, and stand by for the rest afterwards
                left_out = step.loop.hi - gl.maximum(step.x, part.hi)
                step = Step(step.h, step.x, part)
        if exists(step):
            place = place_of(step, keys, call, tile.B_R)
            dv_next, ds = row_block(W, n, y, dv, place, j0, is_partial(step, part), shared, call, tile)
            stage(shared.ds.memory, y).slice(64 * W, 64, 0).store(ds)
            fence_async_shared()
            arrive(shared.ds.full, y)
            dk_next = expand(ds, tile_at(shared.q.memory, y), dk)
            dv = wait_for(len(dk), dv_next)
            arrive(shared.do.empty, y)
            dk = wait_for(0, dk_next)
            arrive(shared.q.empty, y)
            step = next_step(step, keys, call.variant, tile)
            while exists(step):
                dk, dv = next_tile_of_part(W, n, y, dk, dv, step, part, keys, shared, call, tile)
                y += 1
                step = next_step(step, keys, call.variant, tile)
                if tile.TWO_LOOPS:
                    while exists(step) & ~is_partial(step, part_at(step, part, tile)):
                        dk, dv = next_tile(W, n, y, dk, dv, step, keys, False, shared, call, tile)
                        y += 1
                        step = next_step(step, keys, call.variant, tile)
            if tile.K_STAGES > 1:  # V is free, and the next K has another stage
                arrive(shared.kv.empty, 0)
            wait(shared.ds.full, y)
            dq_last = dq_block(stage(shared.ds.memory, y), tile_in_loop(shared.k, n, y), W, tile)
            send_dq(warpgroup_mma_wait(0, [dq_last]), shared, y, W)
            y += 1
        elif tile.K_STAGES > 1:
            arrive(shared.kv.empty, 0)
        for _ in range(left_out):
            y = skip_tile(W, n, y, shared, tile)
        if tile.K_STAGES == 1:
            arrive(shared.kv.empty, 0)
        of_dk, of_dv = memory_of_gradients(W, n, dK, shared, tile)
        mbarrier.wait(shared.dq.empty.index(W), (y & 1) ^ 1)
        if call.variant.dropout is not None:
            dv = scaled(dv, call.variant.dropout.rescale)
        parts, last = add_partials(W, dk + dv, keys, gqa_sums, call, tile)
        if last:
            dk, dv = halves_of(parts)
            store_pieces(dK, scaled(dk, call.shape.factor), keys, call.packed, j0, call.shape.d, of_dk, tile.D)
            if tile.K_STAGES == 1:
                wait_stores()
            store_pieces(dV, dv, keys, call.packed, j0, call.shape.d_v, of_dv, tile.D_V)
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)
    wait_stores()
