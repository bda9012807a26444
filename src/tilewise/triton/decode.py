"""The forward with split keys: few rows of queries, or keys in a cache (FlashDecoding, Dao et al. 2023).

W programs for each key head take equal pieces of its line (tile/line.py). A tile of rows whose keys one program sums is
written at once. Of others, a program leaves a partial sum, at most two in all, which `attention_combine` adds in the
order of keys. With a CHUNK every piece of CHUNK keys leaves one.
"""
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from ..tile.blocks import dot, width
from ..tile.cache import Keys, entry_of, keys_of, load_keys, queries_of, scale_of
from ..tile.line import find, line_of, owner_of, pick, piece_of
from ..tile.masks import key_range_of, key_tiles, visible
from ..tile.rows import Rows, fill
from ..tile.scores import Entries, apply_scores
from ..tile.softmax import finalize, join_sink, online_softmax

P_SCALE = tl.constexpr(2.0**15)
"""Scales P where products are in fp16, to fill its range."""
LARGEST = tl.constexpr(2.0**126)
E4M3 = tl.constexpr(tl.float8e4nv)
# (a0, b0) and (a1, b1) of two keys become (a0, a1) and (b0, b1)
UNPACK = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 first, second;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {first, second}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")


@triton.jit
def step(t, q, acc, m, l, K, V, h, keys, at, variant, c, k_scale, split: tl.constexpr, MASKED: tl.constexpr):
    """One key tile: S = Q K^T, its scores and mask, the online softmax, O += P V. q: what `queries` returns."""
    P_SIZE: tl.constexpr = split.P
    D: tl.constexpr = split.d
    B_C: tl.constexpr = split.B_C
    PRECISION: tl.constexpr = split.PRECISION
    if split.AHEAD:
        q = load_queries(q[0], q[1] & (t >= 0), D)  # naming t keeps the load in the loop
    TYPE: tl.constexpr = q[0].dtype
    SLICE: tl.constexpr = q[0].shape[1]
    j = (t * B_C + tl.arange(0, B_C))[None, :]
    S = dot(q[0], load_keys(K, h, keys, t, P_SIZE, D, B_C, SLICE, MASKED).to(TYPE).T, PRECISION)  # (B_r, B_c)
    for n in tl.static_range(1, len(q)):
        S += dot(q[n], load_keys(K, h, keys, t, P_SIZE, D, B_C, SLICE, MASKED, n * SLICE).to(TYPE).T, PRECISION)
    if k_scale is not None:
        S *= k_scale
    S = apply_scores(variant.scores, S, Entries(at.b, at.h, at.i0, at.i, 0, j), len(variant.scores))
    if MASKED:
        seen = visible(variant.mask, at.b, at.h, at.i, j) & (j >= keys.first) & (j < keys.last)
        S = tl.where(seen, S, float("-inf"))
    P, alpha, m, l = online_softmax(S, m, l, c)
    values = load_values(V, h, keys, t, TYPE, split, MASKED)
    if split.PAIRS:
        P *= P_SCALE
    sums = ()
    for n in tl.static_range(len(values)):
        if TYPE == tl.float32:
            sums += (tl.fma(acc[n], alpha[:, None], dot(P, values[n], PRECISION)),)
        else:
            sums += (tl.dot(P.to(TYPE), values[n], acc[n] * alpha[:, None]),)  # (B_r, d_v)
    return sums, m, l


@triton.jit
def load_values(V, h, keys, t, TYPE: tl.constexpr, split: tl.constexpr, MASKED: tl.constexpr):
    """Load the values of key tile t. With PAIRS two neighbours in 8 bits are loaded as one integer, and returned in two
    blocks: matrix units take two keys at a time, and shared memory is read that way in units of 16 bits alone."""
    P_SIZE: tl.constexpr = split.P
    D_V: tl.constexpr = split.d_v
    B_C: tl.constexpr = split.B_C
    BLOCK: tl.constexpr = width(TYPE, split.d_v)
    if split.PAIRS:
        pairs = Rows(V.ptr.to(tl.pointer_type(tl.uint16), bitcast=True), V.batch // 2, V.row // 2, V.head // 2)
        x = load_keys(pairs, h, keys, t, P_SIZE, D_V // 2, B_C, BLOCK // 2, MASKED)
        return unpack(x, split.HOPPER)
    else:
        return (load_keys(V, h, keys, t, P_SIZE, D_V, B_C, BLOCK, MASKED).to(TYPE),)


@triton.jit
def unpack(x, HOPPER: tl.constexpr):
    """Return the first and the second of two neighbours in e4m3, each in fp16."""
    if HOPPER:  # 3 instructions, not 10
        return tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        first, second = (x & 255).to(tl.uint8), (x >> 8).to(tl.uint8)
        return first.to(E4M3, bitcast=True).to(tl.float16), second.to(E4M3, bitcast=True).to(tl.float16)


@triton.jit
def sum_keys(q, K, V, h, keys, at, variant, c, k_scale, tiles, first, last, split: tl.constexpr):
    """Sum the key tiles in [first, last) that a tile of rows sees, in order. `tiles`: what `key_tiles` returns."""
    lo, full_lo, full_hi, hi = tiles
    lo, hi = tl.maximum(lo, first), tl.minimum(hi, last)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    B_R: tl.constexpr = split.B_R
    BLOCK: tl.constexpr = width(q[0].dtype.element_ty if split.AHEAD else q[0].dtype, split.d_v)
    STAGES: tl.constexpr = split.STAGES
    if split.PAIRS:
        acc = (tl.zeros([B_R, BLOCK // 2], tl.float32), tl.zeros([B_R, BLOCK // 2], tl.float32))
    else:
        acc = (tl.zeros([B_R, BLOCK], tl.float32),)
    m = tl.full([B_R], float("-inf"), tl.float32)
    l = tl.zeros([B_R], tl.float32)
    # in large tiles, addresses that loops share would spill
    for t in tl.range(lo, full_lo, num_stages=1, disable_licm=B_R > 16):
        acc, m, l = step(t, q, acc, m, l, K, V, h, keys, at, variant, c, k_scale, split, True)
    for t in tl.range(full_lo, full_hi, num_stages=STAGES):
        acc, m, l = step(t, q, acc, m, l, K, V, h, keys, at, variant, c, k_scale, split, False)
    for t in tl.range(full_hi, hi, num_stages=1, disable_licm=B_R > 16):
        acc, m, l = step(t, q, acc, m, l, K, V, h, keys, at, variant, c, k_scale, split, True)
    if split.PAIRS:
        return tl.join(acc[0], acc[1]).reshape(B_R, BLOCK) * (1 / P_SCALE), m, l
    else:
        return acc[0], m, l


@triton.jit
def queries(ptr, seen, split: tl.constexpr):
    """Return rows of q, in slices of columns; or their addresses and which there are, for `step` to load."""
    if split.AHEAD:
        return ptr, seen
    else:
        return load_queries(ptr, seen, split.d)


@triton.jit
def load_queries(ptr, seen, d: tl.constexpr):
    """Load rows of q from their addresses, in slices of columns."""
    BLOCK: tl.constexpr = width(ptr.dtype.element_ty, d)
    SLICE: tl.constexpr = slice_of(ptr.dtype.element_ty, BLOCK)
    q = ()
    for n in tl.static_range(BLOCK // SLICE):
        entries = n * SLICE + tl.arange(0, SLICE)
        inside = seen[:, None] & (entries < d)[None, :]
        q += (tl.load(ptr[:, None] + entries[None, :], mask=inside, other=0.0),)
    return q


@triton.constexpr_function
def slice_of(dtype, block):
    """Return the columns of q and K that are multiplied at a time: few in wide blocks of fp32, which splits each."""
    return 32 if dtype == tl.float32 and block > 128 else block


@triton.jit
def in_fp16(q):
    """Return rows of q in fp16, in which 8-bit keys are exact, and the power of two that each is divided by. So none
    overflows, and what is lost is below 2^-24 of the row's largest entry."""
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.minimum(tl.where(power == 0.0, 1.0, power), LARGEST)
    return (q * (1.0 / power)[:, None]).to(tl.float16), power[:, None]


@triton.jit
def write(O, L, acc, m, l, sink, b, rows, heads, seen, d_v: tl.constexpr):
    """Store o and lse of rows whose keys are all summed."""
    if sink is not None:
        m, l, alpha = join_sink(m, l, tl.load(sink + heads).to(tl.float32))
        acc = acc * alpha[:, None]
    inverse, lse = finalize(m, l)
    entries = tl.arange(0, acc.shape[1])
    ptr = address(O, b, rows, heads)[:, None] + entries[None, :]
    inside = seen[:, None] & (entries < d_v)[None, :]
    tl.store(ptr, (acc * inverse[:, None]).to(O.ptr.dtype.element_ty), mask=inside)
    tl.store(address(L, b, rows, heads), lse, mask=seen)


@triton.jit
def address(X, b, rows, heads):
    """Return the addresses of rows and heads, one each."""
    return X.ptr + (b.to(tl.int64) * X.batch + rows.to(tl.int64) * X.row + heads.to(tl.int64) * X.head)


@triton.jit
def places_of(r, h, M, split: tl.constexpr):
    """Return the rows of tile r: their numbers, their queries and heads, and whether there are such queries."""
    row = r * split.B_R + tl.arange(0, split.B_R)
    return row, row // split.G, h * split.G + row % split.G, row < M * split.G


@triton.jit
def partial_at(partial, slot, H_k, h, d_v: tl.constexpr):
    """Return the address of a partial sum, d_v numbers, m and l, of one row or several of a key head."""
    return partial + (slot * H_k + h) * (d_v + 2)


@triton.jit(do_not_specialize=["batch", "variant", "H_k", "W"])
def attention_decode(Q, K, V, O, L, partial, batch, variant, scales, c, H_k, W, split: tl.constexpr):
    """Sum one piece of the line of one key head. Neighbouring programs read the heads of one key at a time.

    Q, O and L are `Rows`; so are K and V, by page or entry, row and head.
    """
    B_R: tl.constexpr = split.B_R
    G: tl.constexpr = split.G
    D_V: tl.constexpr = split.d_v
    SIZE: tl.constexpr = split.CHUNK if split.CHUNK > 0 else split.B_C
    if split.HOPPER:
        tl.extra.cuda.gdc_wait()  # first, as attention_combine reads what kernels before this one wrote
        tl.extra.cuda.gdc_launch_dependents()
    line = line_of(batch, variant.mask, W, split)
    h, w = tl.program_id(0) % H_k, tl.program_id(0) // H_k
    at, stop = piece_of(line, w)
    while at < stop:
        b, r, x, each = find(line, at)
        count = tl.minimum(each - x, stop - at)
        if split.CHUNK > 0:
            count = tl.minimum(count, 1)
        q0, M = queries_of(batch, b)
        start, N = keys_of(batch, b)
        _, i, heads, seen = places_of(r, h, M, split)
        first_row = N - M + r * B_R // G
        last_row = N - M + tl.minimum((r * B_R + B_R - 1) // G, M - 1)
        first, _ = key_range_of(variant.mask, b, first_row, N)
        _, last = key_range_of(variant.mask, b, last_row, N)
        entry = entry_of(batch, b)
        table = None if batch.table is None else batch.table + entry * (batch.width // 2)
        keys = Keys(table, entry, None if batch.starts is None else start, first, last)
        tiles = key_tiles(variant.mask, b, first_row, last_row, N, split.B_C)
        begin, _ = key_range_of(variant.mask, b, N - M, N)
        begin = (begin // SIZE + x) * (SIZE // split.B_C)
        of_rows = b if batch.cu_q is None else b * 0
        rows = i if batch.cu_q is None else q0 + i
        q = queries(address(Q, of_rows, rows, heads), seen, split)
        place = Entries(b, heads[:, None], 0, (N - M + i)[:, None], 0, 0)
        k_scale = None if scales is None else scale_of(scales.k, b, h, scales.k_batch, scales.k_head)
        if split.PAIRS:
            half, power = in_fp16(q[0])
            q = (half,)
            k_scale *= power
        acc, m, l = sum_keys(
            q, K, V, h, keys, place, variant, c, k_scale, tiles, begin, begin + count * (SIZE // split.B_C), split
        )
        if scales is not None:
            acc *= scale_of(scales.v, b, h, scales.v_batch, scales.v_head)
        # computed anew, as rows kept over the loops would spill
        row, i, heads, seen = places_of((r * each + x + count - 1) // each, h, M, split)
        rows = i if batch.cu_q is None else q0 + i
        if count == each:
            write(O, L, acc, m, l, variant.sink, of_rows, rows, heads, seen, D_V)
        else:
            store_partial(partial, acc, m, l, batch, b, q0, row, r, x, w, H_k, h, seen, split)
        at += count
    if batch.cu_q is not None:
        fill_rest(O, L, batch, G, H_k, D_V)


@triton.jit
def store_partial(partial, acc, m, l, batch, b, q0, row, r, x, w, H_k, h, seen, split: tl.constexpr):
    """Store a piece's sums: for a CHUNK by row and piece, else in one of the program's two tiles."""
    D_V: tl.constexpr = split.d_v
    slots = slots_of(batch, q0, row, x, w, x == 0, split)
    ptr = partial_at(partial, slots, H_k, h, D_V)
    entries = tl.arange(0, acc.shape[1])
    tl.store(ptr[:, None] + entries[None, :], acc, mask=seen[:, None] & (entries < D_V)[None, :])
    tl.store(ptr + D_V, m, mask=seen)
    tl.store(ptr + D_V + 1, l, mask=seen)


@triton.jit
def slots_of(batch, q0, row, x, w, starts, split: tl.constexpr):
    """Return where the sums of rows (of one row tile) lie that program w, or for a CHUNK piece x, leaves of them."""
    if split.CHUNK > 0:
        most = tl.cdiv(batch.capacity // 2, split.CHUNK) + 1
        return (q0 * split.G + row).to(tl.int64) * most + x
    else:
        return (2 * w + starts.to(tl.int32)).to(tl.int64) * split.B_R + row % split.B_R


@triton.jit
def fill_rest(O, L, batch, G: tl.constexpr, H_k, d_v: tl.constexpr):
    """Write o = 0 and lse = -inf in the rows after the last sequence; programs divide them."""
    total = batch.rows // 2
    end = tl.minimum(tl.maximum(tl.load(batch.cu_q + batch.B // 2), 0), total)
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    first, step = end + tl.program_id(0) * 16, tl.num_programs(0) * 16
    fill(((O, G * H_k, d_v),), L.ptr, first, total, step, total, rows, columns)


@triton.jit(do_not_specialize=["batch", "variant", "H_k", "W"])
def attention_combine(O, L, partial, batch, variant, H_k, W, split: tl.constexpr, B_X: tl.constexpr):
    """Add the partial sums of one row of one query head, B_X at a time, in the order of keys. Other rows are done."""
    G: tl.constexpr = split.G
    D_V: tl.constexpr = split.d_v
    line = line_of(batch, variant.mask, W, split)
    row, head = tl.program_id(0) // (G * H_k), tl.program_id(0) % (G * H_k)
    B = batch.B // 2
    sequences = tl.arange(0, line.end.shape[0])
    q_first, m_all = queries_of(batch, tl.minimum(sequences, B - 1))
    b = tl.sum(((q_first + m_all <= row) & (sequences < B)).to(tl.int32), 0)
    b_real = tl.minimum(b, B - 1)
    q0, M = queries_of(batch, b_real)
    i = row - q0
    y = i * G + head % G
    each = pick(line, line.each, b)
    place = pick(line, line.end - line.tiles * line.each, b) + y // split.B_R * each
    first, parts = 0, each
    if split.CHUNK == 0:
        first = owner_of(line, place)
        parts = owner_of(line, place + each - 1) - first + 1
    sums = (b < B) & (i >= 0) & (i < M) & (parts > 1)
    if split.HOPPER and (sums | (tl.program_id(0) == 0)):  # one waits anyway, so that this ends after attention_decode
        tl.extra.cuda.gdc_wait()
    if not sums:
        return
    _, N = keys_of(batch, b)
    lo, _ = key_range_of(variant.mask, b, N - M, N)
    # groups of chunks begin at the same keys, wherever this call's queries begin
    skip = lo // split.CHUNK % B_X if split.CHUNK > 0 else 0
    BLOCK: tl.constexpr = width(tl.float32, D_V)
    entries = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([1, BLOCK], tl.float32)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    for x0 in range(-skip, parts, B_X):
        x = x0 + tl.arange(0, B_X)
        there = (x >= 0) & (x < parts)
        slots = slots_of(batch, q0, y, x, first + x, x == 0, split)
        ptr = partial_at(partial, slots, H_k, head // G, D_V)
        m_x = tl.load(ptr + D_V, mask=there, other=float("-inf"))
        l_x = tl.load(ptr + D_V + 1, mask=there, other=0.0)
        part = tl.load(ptr[:, None] + entries, mask=there[:, None] & (entries < D_V), other=0.0)
        m_new = tl.maximum(m, tl.max(m_x, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight, alpha = tl.exp2(m_x - shift), tl.exp2(m - shift)
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, None], 0)[None, :]
        l, m = l * alpha + tl.sum(l_x * weight, 0), m_new
    of_rows = b if batch.cu_q is None else b * 0
    rows = tl.zeros([1], tl.int32) + (i if batch.cu_q is None else row)
    heads = tl.zeros([1], tl.int32) + head
    write(O, L, acc, m, l, variant.sink, of_rows, rows, heads, heads >= 0, D_V)
