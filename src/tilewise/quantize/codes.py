"""Quantize Q, K and V for 8-bit attention: the codes and scales, in plain torch. quantize/kernel.py computes the same
bits.

Before they are rounded, Q and K change in three ways that leave Q K^T as it is, or known:

    balance  a power of two per channel moves from K to Q, so that their channels are of one size; exact
    smooth   K loses the mean of SAMPLES of its keys; a row's logits lose q . mean, which lse gets back (`q_shift`).
             Where scores or a sink act on the logits, nothing is subtracted
    rotate   signs, then Hadamard's matrix: both are multiplied by one orthogonal matrix (QuIP, FlashAttention-3), so
             that no entry stands out. Padded to `size` columns, and not normalised: 1 / size is in `q_descale`

Then Q is int8 with a scale for each row, K int8 with a scale for each block of 128 keys. With "fp8", V is e4m3 with a
power of two for each such block, and transposed: its columns are keys, in each 16 in the order of `key_order`. A matrix
unit's accumulators of S then hold P as the next product wants it.

Rows lie in blocks, of 64 queries and of 128 keys. A sequence begins with a block and ends in zeros, so no scale depends
on another sequence; nor does it on keys outside the Padding of a mask.

Rotary comes first where its tables are given (`EightBits`). What is e4m3 already (`Quantized`) is a code as it is.

What is not finite: a row of Q gets a NaN scale, as does a block of K; an entry of V becomes NaN. So NaN reaches every
row that it reaches in 16 bits, and from K also rows that see other keys of its block.
"""

from functools import reduce

import torch
from torch import Tensor

from ..call.operands import Codes, Operands
from ..call.problem import Problem
from ..values.intervals import PaddingLengths, PaddingRange

BLOCK_Q, BLOCK_K = 64, 128
"""Rows of a block of Q, and of one of K and V."""
SAMPLES = 256
"""Rows of a head that decide its mean and its balance."""
INT8 = 127.0
LEAST = 2.0**-100
"""Rows and blocks whose entries are all smaller count as zeros."""
MOST = 24
"""The largest exponent of balance."""
MOST_OF_V = 126
"""The largest exponent of V's scales, so that their reciprocals exist."""


def columns(p: Problem) -> int:
    """Return the columns of what is multiplied for Q K^T: 64, 128 or 256 of codes, or the head size."""
    return p.products.columns(p)


def smooths(p: Problem) -> bool:
    """Tell whether K loses its mean: not where scores or a sink act on the logits."""
    return not (p.recipe.score or p.recipe.sink)


def blocks_of(p: Problem) -> tuple[int, int]:
    """Return a head's blocks of queries, and of keys; for packed sequences, those of all sequences."""
    return p.query_blocks(BLOCK_Q), p.key_blocks(BLOCK_K)


def empty_codes(p: Problem, device: torch.device) -> Codes:
    """Allocate codes, unwritten: (size + 8) bytes a query, and size a key, with "fp8" twice that."""
    size, (of_q, of_k, of_v) = columns(p), p.products.code_types
    queries, keys = (p.batch * h * n for h, n in zip((p.H, p.H_k), blocks_of(p), strict=True))

    def empty(*shape: int, dtype: torch.dtype | None = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    v = () if of_v is None else (empty(keys, size, BLOCK_K, dtype=of_v), empty(keys))
    return Codes(
        empty(queries, BLOCK_Q, size, dtype=of_q), empty(keys, BLOCK_K, size, dtype=of_k), empty(queries, BLOCK_Q),
        empty(keys), empty(queries, BLOCK_Q), empty(p.B, p.H_k, size), empty(p.B, p.H_k, size), *v,
    )  # fmt: skip


def key_bounds(p: Problem, x: Operands) -> tuple[Tensor | None, Tensor | None]:
    """Return the starts and the ends (B,) of the keys that a mask's first Padding shows; None for no bound."""
    for mask in p.values(x.extra)[0]:
        if isinstance(mask, (PaddingLengths, PaddingRange)):
            return getattr(mask, "starts", None), mask.lengths
    return None, None


def quantize(p: Problem, x: Operands) -> Codes:
    """Return the codes of the whole padded batch, or of each packed sequence. Blocks that none owns are zeros."""
    codes, layout, (starts, ends) = empty_codes(p, x.q.device), p.recipe.layout_of(x.extra), key_bounds(p, x)
    for t in codes.present():
        t.view(torch.int8).zero_()
    q_count, k_count = blocks_of(p)
    for b, rows, keys in layout.groups(p):
        q, k, v = (layout.rows_of(t, b, at) for t, at in ((x.q, rows), (x.k, keys), (x.v, keys)))
        own, N = Operands(q, k, v, x.extra), keys.stop - keys.start
        lo, hi = (
            x.q.new_full((b.stop - b.start,), bound, dtype=torch.int64) if t is None else t[b].long().clamp(0, N)
            for t, bound in ((starts, 0), (ends, N))
        )
        parts = _copied(p, own, b) if p.products.scales else _rounded(p, own, b, lo, hi)
        of_q, of_k = (p.H, q_count, _blocks(b, rows, BLOCK_Q)), (p.H_k, k_count, _blocks(b, keys, BLOCK_K))
        for name, to, part in zip(Codes._fields, codes.present(), parts.present(), strict=False):
            if name in ("mean", "balance"):
                to[b] = part
            else:
                heads, count, blocks = of_q if name.startswith("q") else of_k
                to.unflatten(0, (p.batch, heads, count))[:, :, blocks] = part
    return codes


def _blocks(b: slice, rows: slice, size: int) -> slice:
    """Return the blocks of sequences' rows. Each sequence before them wastes less than one."""
    first = rows.start // size + b.start
    return slice(first, first + -(-(rows.stop - rows.start) // size))


def _rounded(p: Problem, x: Operands, b: slice, lo: Tensor, hi: Tensor) -> Codes:
    """Return the codes of batch entries of one length, (entries, heads, blocks, …): of the keys lo <= j < hi."""
    size, angles = columns(p), p.recipe.products_of(x.extra).angles
    q, k = x.q, x.k
    if angles is not None:  # positions count from 0
        q, k = (angles.rotate(t, slice(0, t.shape[1])) for t in (q, k))
    q, k, v = (_columns(t, size) for t in (q, k, x.v))
    signs = signs_of(size, x.q.device)
    j = torch.arange(k.shape[2], device=k.device)
    inside = ((j >= lo[:, None]) & (j < hi[:, None]))[:, None, :, None]
    found = given_statistics(p, x)
    mean, balance = statistics(p, q, k, lo, hi) if found is None else (t[b] for t in found)
    of_q, of_mean = (per_query_head(p, t)[:, :, None] for t in (balance * signs, mean))
    q_int8, q_descale = _int8(rotated(q * of_q), -1)
    q_shift = (q * of_mean).sum(-1, keepdim=True) * p.scale
    k = rotated(torch.where(inside, (k - mean[:, :, None]) * (signs / balance)[:, :, None], 0.0))
    k_int8, k_descale = int8_blocks(_cut(k, BLOCK_K))
    of_v: tuple[Tensor, ...] = ()
    if p.products.codes_of_v:
        v_e4m3, v_descale = e4m3_blocks(_cut(torch.where(inside, v, 0.0), BLOCK_K))
        of_v = v_e4m3[..., key_order(v.device), :].mT, v_descale
    return Codes(
        _cut(q_int8, BLOCK_Q), k_int8, _cut(q_descale / size, BLOCK_Q)[..., 0], k_descale,
        _cut(q_shift, BLOCK_Q)[..., 0], mean, balance, *of_v,
    )  # fmt: skip


def _copied(p: Problem, x: Operands, b: slice) -> Codes:
    """Return the same of e4m3 tensors, which are codes already; numbers that are alike everywhere broadcast."""
    q, k, v = (
        _cut(_columns(t.view(torch.int8), columns(p)), rows).to(torch.int8).view(torch.float8_e4m3fn)
        for t, rows in ((x.q, BLOCK_Q), (x.k, BLOCK_K), (x.v, BLOCK_K))
    )
    of_q, of_k, of_v = (t[b, :, None] for t in p.recipe.products_of(x.extra).scales)
    of_q, zero = per_query_head(p, of_q)[..., None], of_q.new_zeros(())
    return Codes(q, k, of_q, of_k, zero, zero, of_q.new_ones(()), v[..., key_order(v.device), :].mT, of_v)


def given_statistics(p: Problem, x: Operands) -> tuple[Tensor, Tensor] | None:
    """Return the mean and the balance that the caller gave, (B, H_k, size). None if the call decides them."""
    return p.recipe.products_of(x.extra).statistics(columns(p), smooths(p))


def statistics(p: Problem, q: Tensor, k: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Return K's mean and the balance, (entries, H_k, size), from SAMPLES rows of each head, which may repeat.

    q, k: (entries, heads, rows, size). What is not finite counts as 0. The samples of Q alternate among the heads that
    share a key head. The balance brings K's mean square to Q's: the fourth root of their quotient, to the nearest power
    of two, with log2 taken to be linear between them.
    """
    group, samples = p.H // p.H_k, torch.arange(SAMPLES, device=q.device)
    of_keys, of_queries = _sampled(k, lo, hi), _sampled(q, torch.zeros_like(lo), q.shape[2])
    of_queries = of_queries.unflatten(1, (p.H_k, group))[:, :, samples % group, samples]
    mean = _total(of_keys) / SAMPLES if smooths(p) else torch.zeros_like(of_keys[:, :, 0])
    away = of_keys - mean[:, :, None]
    below = _total(of_queries * of_queries)
    quotient = _total(away * away) / torch.where(below > 0.0, below, 1.0)
    usable = (quotient > 0.0) & (quotient < torch.inf) & (below > 0.0)
    bits = torch.where(usable, quotient, 1.0).view(torch.int32)
    exponent = ((bits - (125 << 23)) >> 25).clamp(-MOST, MOST)  # (log2 + 2) / 4, rounded down
    return mean, power(exponent)


def _sampled(x: Tensor, lo: Tensor, hi: Tensor | int) -> Tensor:
    """Return rows lo + s (hi - lo) // SAMPLES of each entry, (entries, heads, SAMPLES, size); 0 without rows."""
    count = (hi - lo).clamp(min=0)[:, None]
    rows = lo[:, None] + torch.arange(SAMPLES, device=x.device) * count // SAMPLES  # (entries, SAMPLES)
    rows = torch.where(count > 0, rows, x.shape[2])[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    found = torch.nn.functional.pad(x, (0, 0, 0, 1)).gather(2, rows)
    return torch.where(found.abs() < torch.inf, found, 0.0)


def _total(x: Tensor) -> Tensor:
    """Sum (entries, heads, SAMPLES, size) over the samples: every 16th one after the other, then halves."""
    total = reduce(torch.add, x.unflatten(2, (-1, 16)).unbind(2))
    while total.shape[2] > 1:
        total = torch.add(*total.chunk(2, 2))
    return total[:, :, 0]


def signs_of(size: int, device: torch.device) -> Tensor:
    """Return the fixed signs, 1 or -1, of each column."""
    column = torch.arange(size, device=device)
    return 1.0 - 2.0 * ((column * 40503 + 12345) >> 8 & 1)


def rotated(x: Tensor) -> Tensor:
    """Multiply rows by Hadamard's matrix, whose entries are 1 and -1: butterflies of neighbours, then of pairs, …"""
    shape, step = x.shape, 1
    while step < shape[-1]:
        a, b = x.view(*shape[:-1], shape[-1] // (2 * step), 2, step).unbind(-2)
        x = torch.stack([a + b, a - b], -2).view(shape)
        step *= 2
    return x


def int8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 (…, rows, columns) and the descale factor (…) of each block of rows: the largest becomes 127."""
    codes, descale = _int8(x, (-2, -1))
    return codes, descale[..., 0, 0]


def _int8(x: Tensor, dims: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the descale factors; the largest of each group, along `dims`, becomes 127."""
    top = torch.where(x.abs() < torch.inf, x.abs(), torch.inf).amax(dims, keepdim=True)  # inf for NaN, too
    exists = (top >= LEAST) & (top < torch.inf)
    most = torch.full_like(top, INT8)  # with a number, a GPU would round the divisor's reciprocal before it multiplies
    scale = torch.where(exists, most / torch.where(exists, top, 1.0), 0.0)
    codes = (torch.where(x.abs() < torch.inf, x, 0.0) * scale).round().to(torch.int8)  # half to even
    return codes, torch.where(top < torch.inf, torch.where(exists, top / most, 0.0), torch.nan)


def e4m3_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 (…, rows, columns) and the descale factor (…), a power of two, of each block of rows.

    The largest finite entry comes into [128, 256). What is not finite becomes NaN.
    """
    finite = x.abs() < torch.inf
    top = torch.where(finite, x.abs(), 0.0).amax((-2, -1))
    exponent = (134 - (top.view(torch.int32) >> 23)).clamp(max=MOST_OF_V)
    codes = torch.where(finite, x * power(exponent)[..., None, None], torch.nan).to(torch.float8_e4m3fn)
    return codes, power(-exponent)


def key_order(device: torch.device) -> Tensor:
    """Return which key of a block each column of V's codes holds.

    The accumulator of S gives thread r of four the columns 8 b + 2 r + e of each 16, and the product with V expects of
    it the columns 4 r + 2 b + e. So there lies key 8 b + 2 r + e.
    """
    return torch.arange(BLOCK_K, device=device).view(-1, 2, 4, 2).transpose(1, 2).flatten()


def power(exponent: Tensor) -> Tensor:
    """Return 2^n for int32 n from -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _columns(x: Tensor, size: int) -> Tensor:
    """Return (entries, heads, rows, size) in fp32, zero past the head size."""
    return torch.nn.functional.pad(x.transpose(1, 2).float(), (0, size - x.shape[-1]))


def _cut(x: Tensor, rows: int) -> Tensor:
    """Cut (…, length, columns) into blocks (…, blocks, rows, columns), zero past the end."""
    whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % rows))
    return whole.unflatten(-2, (whole.shape[-2] // rows, rows))


def per_query_head(p: Problem, x: Tensor, axis: int = 1) -> Tensor:
    """Repeat what each key head has for its query heads."""
    return x.repeat_interleave(p.H // p.H_k, axis)
