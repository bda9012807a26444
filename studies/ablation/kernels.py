"""Device code of the ablations only: two kernels, an order of tiles and a mask.

one_role        Hopper's forward without warp specialisation: every warp loads, multiplies and computes its softmax
keys_outside    the portable forward in FlashAttention-1's order: keys in the outer loop, queries in the inner one
"""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.hopper.forward.attend import write
from tilewise.hopper.forward.kernel import counts_of
from tilewise.hopper.forward.queries import is_partial, key_tile, loop_of, query_tile
from tilewise.hopper.forward.softmax import begin, masked, online
from tilewise.hopper.parts import triton_compat
from tilewise.hopper.parts.call import Call
from tilewise.hopper.parts.channel import Channel, barriers, expect, stage, wait
from tilewise.tile.blocks import block, dot, load_rows, store_rows
from tilewise.tile.masks import OPEN, Part, everywhere, visible
from tilewise.tile.ranges import query_range, tile_at
from tilewise.tile.rows import row_values
from tilewise.tile.schedule import assign
from tilewise.tile.softmax import finalize, online_softmax


@triton.jit
def shortest_first(program, tiles, heads, section):
    """Assign tiles as `assign` does, but the first one first, which is the shortest with causal masks."""
    matrix, tile = assign(program, tiles, heads, section)
    return matrix, tiles - 1 - tile


@triton.jit
def anything(b, h, i, j):
    """Show every key; the compiler removes this mask."""
    return i == i  # noqa: PLR0124


@triton.jit
def unsure(b, i):
    """Show every key to each row.

    But asked for alone, as first row of a tile (a multiple of 64), a row sees none, so that no tile counts as full.
    """
    if len(i.shape) > 0:
        return -OPEN, OPEN
    else:
        return -OPEN, tl.where(i % 64 == 0, 0, OPEN)


NO_TILE_FULL = Part(anything, unsure, everywhere, ())
"""A mask that hides nothing, and yet has to be applied to every tile."""


@gluon.jit
def fetch(X, channel, y, loop, place, variant, shape):
    """Start the load of the y-th key tile into its stage, if there is one."""
    B_C: gl.constexpr = channel.memory.shape[3]
    if y < loop.hi - loop.lo:
        j = key_tile(variant, loop, loop.hi - 1 - y)
        bar = expect(channel.full, y, X.block_type.nbytes)
        triton_compat.load(X, [place.b, place.h // shape.group, j * B_C, 0], bar, stage(channel.memory, y))


@gluon.jit(do_not_specialize=["variant", "shape"])
def one_role(Q, K, V, O, L, variant, c, shape, order: gl.constexpr, tile: gl.constexpr):  # noqa: PLR0915, a role is one function
    """O and L of one tile of queries. A stage is loaded again once all warps are done with it, so they wait for each
    other at every key tile; the products are as asynchronous as the product's."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    ROWS: gl.constexpr = 64 * WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    D: gl.constexpr = tile.D
    STAGES: gl.constexpr = tile.KV_STAGES
    MASK_IN_LOOP: gl.constexpr = tile.MASK_IN_LOOP
    dtype: gl.constexpr = Q.dtype
    shape = counts_of(shape)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WARPGROUPS, 1], [16, B_C, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WARPGROUPS, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    queries = Channel(gl.allocate_shared_memory(dtype, [1, 1, 1, ROWS, D], Q.layout), barriers(1, 1), None)
    keys = Channel(gl.allocate_shared_memory(dtype, [STAGES, 1, 1, B_C, D], K.layout), barriers(STAGES, 1), None)
    values = Channel(gl.allocate_shared_memory(dtype, [STAGES, 1, 1, B_C, D], V.layout), barriers(STAGES, 1), None)
    fence_async_shared()
    triton_compat.barrier()

    place, tile_of_head, _, _ = query_tile(gl.program_id(0), Call(shape, None, variant, (), order), tile)
    loop = loop_of(place, tile_of_head, variant, tile)
    bar = expect(queries.full, 0, Q.block_type.nbytes)
    triton_compat.load(Q, [place.b, place.h, place.i0, 0], bar, stage(queries.memory, 0))
    for s in gl.static_range(STAGES):
        fetch(K, keys, s, loop, place, variant, shape)
        fetch(V, values, s, loop, place, variant, shape)

    q = stage(queries.memory, 0).reshape([ROWS, D])
    zero = gl.zeros([ROWS, B_C], gl.float32, s_layout)
    x = loop.hi - 1
    j = key_tile(variant, loop, x)
    wait(queries.full, 0)
    wait(keys.full, 0)
    k = stage(keys.memory, 0).reshape([B_C, D])
    S = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(0, [S])
    triton_compat.barrier()
    fetch(K, keys, STAGES, loop, place, variant, shape)
    m, l, P = begin(S, is_partial(x, loop), place, place.i0, j * B_C, variant, c, s_layout, False, False, tile)
    p = gl.convert_layout(P.to(dtype), p_layout)
    o = gl.zeros([ROWS, D], gl.float32, o_layout)
    y = 0
    while x > loop.lo:
        x -= 1
        j = key_tile(variant, loop, x)
        wait(keys.full, y + 1)
        k_next = stage(keys.memory, y + 1).reshape([B_C, D])
        S_next = warpgroup_mma(q, k_next.permute((1, 0)), zero, use_acc=False, is_async=True)
        wait(values.full, y)
        o_next = warpgroup_mma(p, stage(values.memory, y).reshape([B_C, D]), o, is_async=True)
        S_new = warpgroup_mma_wait(1, [S_next])
        if MASK_IN_LOOP:  # noqa: SIM102, a constant of the compiler stands alone
            if is_partial(x, loop):
                S_new = masked(S_new, place, place.i0, j * B_C, variant)
        P_new, m, l, alpha, _below = online(S_new, m, l, c, y, False, False, False, tile)
        o = warpgroup_mma_wait(0, [o_next])
        triton_compat.barrier()
        fetch(K, keys, y + 1 + STAGES, loop, place, variant, shape)
        fetch(V, values, y + STAGES, loop, place, variant, shape)
        p = gl.convert_layout(P_new.to(dtype), p_layout)
        o = o * gl.convert_layout(alpha, o_row_layout)[:, None]
        y += 1
    wait(values.full, y)
    o_last = warpgroup_mma(p, stage(values.memory, y).reshape([B_C, D]), o, is_async=True)
    o = warpgroup_mma_wait(0, [o_last])
    write(
        (o,), m, l, O, None, L, (queries.memory,), 0, place, 0, place.i0, 0, Call(shape, None, variant), None, False,
        tile,
    )  # fmt: skip
    tma.store_wait(0)


@triton.jit(do_not_specialize=["variant", "M", "N", "H"])
def keys_outside(Q, K, V, O, L, sums, maxima, totals, variant, c, M, N, H, tile: tl.constexpr):
    """Compute O and L of one head (Dao et al. 2022, algorithm 1).

    Each tile of keys is read once. For it, the sums of P V, the maxima and the totals of every row are read from memory
    and written back, in fp32. They begin as 0, -inf and 0.
    """
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    matrix = tl.program_id(0)
    b, h = matrix // H, matrix % H
    queries, running = block(Q, b, h, 0, B_R, d), block(sums, b, h, 0, B_R, d_v)
    keys, values = block(K, b, h // G, 0, B_C, d), block(V, b, h // G, 0, B_C, d_v)
    m_rows, l_rows = row_values(maxima, None, b, h, H, 0, M), row_values(totals, None, b, h, H, 0, M)
    for j in range(tl.cdiv(N, B_C)):
        k, v = load_rows(keys, j * B_C, N, True), load_rows(values, j * B_C, N, True)  # (B_c, d), (B_c, d_v)
        lo, full_lo, full_hi, hi = query_range(variant, 0, b, j * B_C, M, N, B_R, B_C)
        for x in range(lo, hi):
            i0 = tile_at(None, 0, x) * B_R
            rows = i0 + tl.arange(0, B_R)
            acc = load_rows(running, i0, M, True)  # (B_r, d_v)
            m = tl.load(m_rows + rows, mask=rows < M, other=float("-inf"))  # (B_r,)
            l = tl.load(l_rows + rows, mask=rows < M, other=0.0)  # (B_r,)
            S = dot(load_rows(queries, i0, M, True), k.T, PRECISION)  # (B_r, B_c)
            columns = j * B_C + tl.arange(0, B_C)[None, :]
            if (x < full_lo) | (x >= full_hi) | (j * B_C + B_C > N):
                seen = visible(variant.mask, b, h, rows[:, None] + (N - M), columns) & (columns < N)
                S = tl.where(seen, S, float("-inf"))
            P, alpha, m, l = online_softmax(S, m, l, c)
            store_rows(running, i0, M, tl.dot(P.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION))
            tl.store(m_rows + rows, m, mask=rows < M)
            tl.store(l_rows + rows, l, mask=rows < M)
        tl.debug_barrier()  # other threads of this program read these rows next
    for x in range(tl.cdiv(M, B_R)):
        rows = x * B_R + tl.arange(0, B_R)
        m = tl.load(m_rows + rows, mask=rows < M, other=float("-inf"))
        inverse, lse = finalize(m, tl.load(l_rows + rows, mask=rows < M, other=0.0))
        store_rows(
            block(O, b, h, 0, B_R, d_v),
            x * B_R,
            M,
            load_rows(running, x * B_R, M, True) * inverse[:, None],
        )
        tl.store(row_values(L, None, b, h, H, 0, M) + rows, lse, mask=rows < M)
