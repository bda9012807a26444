"""The forward with split keys: few rows of queries, or keys in a cache (FlashDecoding, Dao et al. 2023).

W programs for each key head take equal pieces of its line (tile/line.py). A tile of rows whose keys one program sums is
written at once. Of others, a program leaves a partial sum, at most two in all, which `attention_combine` adds in the
order of keys. With a CHUNK every piece of CHUNK keys leaves one.
"""
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from ...tile.blocks import dot, width
from ...tile.cache import Keys, entry_of, load_keys, scale_of
from ...tile.combine import address, places_of, store_partial, write
from ...tile.line import line_of, piece_of, work_at
from ...tile.masks import visible
from ...tile.rows import Output, Rows, fill
from ...tile.scores import Entries, apply_scores
from ...tile.softmax import online_softmax

P_SCALE = tl.constexpr(2.0**15)
"""Scales P where products are in fp16, to fill its range."""
LARGEST = tl.constexpr(2.0**126)
WIDE = tl.constexpr(256)
"""Head size above which q, K and V are in slices: of a block of 512 columns, addresses alone would fill registers."""
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
    """One key tile: S = Q K^T, its scores and mask, the online softmax, O += P V. q: what `queries` returns; V: None
    where values are the first columns of keys."""
    P_SIZE: tl.constexpr = split.P
    D: tl.constexpr = split.d
    B_C: tl.constexpr = split.B_C
    PRECISION: tl.constexpr = split.PRECISION
    if split.AHEAD:
        q = load_queries(q[0], q[1] & (t >= 0), D)  # naming t keeps the load in the loop
    TYPE: tl.constexpr = q[0].dtype
    SLICE: tl.constexpr = q[0].shape[1]
    j = (t * B_C + tl.arange(0, B_C))[None, :]
    k = (load_keys(K, h, keys, t, P_SIZE, D, B_C, SLICE, MASKED).to(TYPE),)
    S = dot(q[0], k[0].T, PRECISION)  # (B_r, B_c)
    for n in tl.static_range(1, len(q)):
        k += (load_keys(K, h, keys, t, P_SIZE, D, B_C, q[n].shape[1], MASKED, n * SLICE).to(TYPE),)
        S += dot(q[n], k[n].T, PRECISION)
    if k_scale is not None:
        S *= k_scale
    S = apply_scores(variant.scores, S, Entries(at.b, at.h, at.i0, at.i, 0, j), len(variant.scores))
    if MASKED:
        seen = visible(variant.mask, at.b, at.h, at.i, j) & (j >= keys.first) & (j < keys.last)
        S = tl.where(seen, S, float("-inf"))
    P, alpha, m, l = online_softmax(S, m, l, c)
    values = k if V is None else load_values(V, h, keys, t, acc, TYPE, split, MASKED)
    if split.PAIRS:
        P *= P_SCALE
    sums = ()
    for n in tl.static_range(len(acc)):
        if TYPE == tl.float32:
            sums += (tl.fma(acc[n], alpha[:, None], dot(P, values[n], PRECISION)),)
        else:
            sums += (tl.dot(P.to(TYPE), values[n], acc[n] * alpha[:, None]),)  # (B_r, d_v)
    return sums, m, l


@triton.jit
def load_values(V, h, keys, t, acc, TYPE: tl.constexpr, split: tl.constexpr, MASKED: tl.constexpr):
    """Load the values of key tile t, in slices as `acc`. With PAIRS two neighbours in 8 bits are loaded as one integer,
    and returned in two blocks: matrix units take two keys at a time, and shared memory is read that way in units of 16
    bits alone."""
    P_SIZE: tl.constexpr = split.P
    D_V: tl.constexpr = split.d_v
    B_C: tl.constexpr = split.B_C
    SLICE: tl.constexpr = acc[0].shape[1]
    if split.PAIRS:
        pairs = Rows(V.ptr.to(tl.pointer_type(tl.uint16), bitcast=True), V.batch // 2, V.row // 2, V.head // 2)
        x = load_keys(pairs, h, keys, t, P_SIZE, D_V // 2, B_C, SLICE, MASKED)
        return unpack(x, split.HOPPER)
    else:
        values = ()
        for n in tl.static_range(len(acc)):
            values += (load_keys(V, h, keys, t, P_SIZE, D_V, B_C, acc[n].shape[1], MASKED, n * SLICE).to(TYPE),)
        return values


@triton.jit
def unpack(x, HOPPER: tl.constexpr):
    """Return the first and the second of two neighbours in e4m3, each in fp16."""
    if HOPPER:  # 3 instructions, not 10
        return tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        first, second = (x & 255).to(tl.uint8), (x >> 8).to(tl.uint8)
        return first.to(E4M3, bitcast=True).to(tl.float16), second.to(E4M3, bitcast=True).to(tl.float16)


@triton.jit
def sum_keys(q, K, V, h, keys, at, variant, c, k_scale, work, split: tl.constexpr):
    """Sum key tiles, in order. work: what `work_at` returns."""
    B_R: tl.constexpr = split.B_R
    TYPE: tl.constexpr = q[0].dtype.element_ty if split.AHEAD else q[0].dtype
    STAGES: tl.constexpr = split.STAGES
    if split.PAIRS:
        BLOCK: tl.constexpr = width(TYPE, split.d_v)
        acc = (tl.zeros([B_R, BLOCK // 2], tl.float32), tl.zeros([B_R, BLOCK // 2], tl.float32))
    else:
        FROM: tl.constexpr = split.d if V is None else split.d_v
        SLICE: tl.constexpr = columns(TYPE, FROM, 0, of_v=True)
        acc = ()
        for n in tl.static_range((split.d_v + SLICE - 1) // SLICE):
            acc += (tl.zeros([B_R, columns(TYPE, FROM, n, of_v=True)], tl.float32),)
    m = tl.full([B_R], float("-inf"), tl.float32)
    l = tl.zeros([B_R], tl.float32)
    # in large tiles, addresses that loops share would spill
    SLICED: tl.constexpr = max(split.d, split.d_v) > WIDE
    LARGE: tl.constexpr = SLICED or B_R > 16
    for t in tl.range(work.lo, work.full_lo, num_stages=1, disable_licm=LARGE):
        acc, m, l = step(t, q, acc, m, l, K, V, h, keys, at, variant, c, k_scale, split, True)
    for t in tl.range(work.full_lo, work.full_hi, num_stages=STAGES, disable_licm=SLICED):
        acc, m, l = step(t, q, acc, m, l, K, V, h, keys, at, variant, c, k_scale, split, False)
    for t in tl.range(work.full_hi, work.hi, num_stages=1, disable_licm=LARGE):
        acc, m, l = step(t, q, acc, m, l, K, V, h, keys, at, variant, c, k_scale, split, True)
    if split.PAIRS:
        return (tl.join(acc[0], acc[1]).reshape(B_R, BLOCK) * (1 / P_SCALE),), m, l
    else:
        return acc, m, l


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
    TYPE: tl.constexpr = ptr.dtype.element_ty
    SLICE: tl.constexpr = columns(TYPE, d, 0)
    q = ()
    for n in tl.static_range((d + SLICE - 1) // SLICE):
        entries = n * SLICE + tl.arange(0, columns(TYPE, d, n))
        inside = seen[:, None] & (entries < d)[None, :]
        q += (tl.load(ptr[:, None] + entries[None, :], mask=inside, other=0.0),)
    return q


@triton.constexpr_function
def columns(dtype, d, n, of_v=False):
    """Return how many columns slice n of q, K or V has; all but the last are equal. There are several above WIDE
    columns, and of q and K in wide blocks of fp32, which splits each."""
    if d > WIDE.value or (dtype == tl.float32 and d > 128 and not of_v):
        most = 32 if dtype == tl.float32 else 128
        return min(most, width(tl.float32, d - n * most))
    return width(dtype, d)


@triton.jit
def in_fp16(q):
    """Return rows of q in fp16, in which 8-bit keys are exact, and the power of two that each is divided by. So none
    overflows, and what is lost is below 2^-24 of the row's largest entry."""
    q = q.to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.minimum(tl.where(power == 0.0, 1.0, power), LARGEST)
    return (q * (1.0 / power)[:, None]).to(tl.float16), power[:, None]


@triton.jit(do_not_specialize=["batch", "variant", "H_k", "W"])
def attention_decode(Q, K, V, O, L, partial, batch, variant, scales, c, H_k, W, split: tl.constexpr):
    """Sum one piece of the line of one key head. Neighbouring programs read the heads of one key at a time.

    Q, O and L are `Rows`; so are K and V, by page or entry, row and head.
    """
    B_R: tl.constexpr = split.B_R
    D_V: tl.constexpr = split.d_v
    if split.HOPPER:
        tl.extra.cuda.gdc_wait()  # first, as attention_combine reads what kernels before this one wrote
        tl.extra.cuda.gdc_launch_dependents()
    line = line_of(batch, variant.mask, W, tl.arange(0, split.B_B), split)
    h, w = tl.program_id(0) % H_k, tl.program_id(0) // H_k
    at, stop = piece_of(line, w)
    while at < stop:
        work = work_at(line, at, stop, batch, variant.mask, split)
        b, M, N = work.b, work.M, work.N
        i, heads, seen = places_of(work.r * B_R + tl.arange(0, B_R), h, M, split)
        entry = entry_of(batch, b)
        table = None if batch.table is None else batch.table + entry * (batch.width // 2)
        keys = Keys(table, entry, None if batch.starts is None else work.start, work.first, work.last)
        of_rows = b if batch.cu_q is None else b * 0
        rows = i if batch.cu_q is None else work.q0 + i
        q = queries(address(Q, of_rows, rows, heads), seen, split)
        place = Entries(b, heads[:, None], 0, (N - M + i)[:, None], 0, 0)
        k_scale = None if scales is None else scale_of(scales.k, b, h, scales.k_batch, scales.k_head)
        if split.PAIRS:
            half, power = in_fp16(q[0])
            q = (half,)
            k_scale *= power
        acc, m, l = sum_keys(q, K, V, h, keys, place, variant, c, k_scale, work, split)
        if scales is not None:  # keys in 8 bits are of one slice
            acc = (acc[0] * scale_of(scales.v, b, h, scales.v_batch, scales.v_head),)
        # computed anew, as rows kept over the loops would spill
        r = (work.r * work.each + work.x + work.count - 1) // work.each
        row = r * B_R + tl.arange(0, B_R)
        i, heads, seen = places_of(row, h, M, split)
        rows = i if batch.cu_q is None else work.q0 + i
        for n in tl.static_range(len(acc)):
            entries = n * acc[0].shape[1] + tl.arange(0, acc[n].shape[1])
            if work.count == work.each:
                write(O, L, acc[n], m, l, variant.sink, of_rows, rows, heads, seen, entries, D_V)
            else:
                store_partial(partial, acc[n], m, l, batch, work.q0, row, work.x, w, H_k, h, seen, entries, split)
        at += work.count
    if batch.cu_q is not None:
        fill_rest(O, L, batch, split.G, H_k, D_V)


@triton.jit
def fill_rest(O, L, batch, G: tl.constexpr, H_k, d_v: tl.constexpr):
    """Write o = 0 and lse = -inf in the rows after the last sequence; programs divide them."""
    total = batch.rows // 2
    end = tl.minimum(tl.maximum(tl.load(batch.cu_q + batch.B // 2), 0), total)
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    first, step = end + tl.program_id(0) * 16, tl.num_programs(0) * 16
    fill((Output(O, 2 * G * H_k + 1, 2 * d_v + 1),), L.ptr, first, total, step, total, rows, columns)
