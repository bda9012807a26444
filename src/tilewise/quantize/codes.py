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

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.operands import Codes, Operands
from ..call.problem import Problem
from ..call.recipe import EIGHT_BITS
from ..values.intervals import PaddingLengths, PaddingRange
from ..values.masks import Mask
from ..values.rotation import turned

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


def eight_bits(p: Problem) -> bool:
    """Tell whether a call asks for 8-bit products."""
    return p.recipe.precision in EIGHT_BITS


def against(p: Problem) -> list[str]:
    """Return why no back end takes a call with 8-bit products; empty if there is no reason, or no such product."""
    if not eight_bits(p):
        return []
    name, found = f"precision {p.recipe.precision!r}", []
    if max(p.D, p.D_v) > 256:
        found.append(f"{name} takes head sizes up to 256, got {p.D} and {p.D_v}")
    if p.recipe.cached:
        found.append(f"{name} reads no cache; leave precision out")
    if p.recipe.precision == "fp8" and p.recipe.dropout:
        found.append(f"{name} has no dropout; use precision='int8'")
    return found


def size_of(p: Problem) -> int:
    """Return the columns of codes: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if max(p.D, p.D_v) <= size)


def smooths(p: Problem) -> bool:
    """Tell whether K loses its mean: not where scores or a sink act on the logits."""
    return not (p.recipe.score or p.recipe.sink)


def blocks_of(p: Problem) -> tuple[int, int]:
    """Return a head's blocks of queries, and of keys; for packed sequences, those of all sequences."""
    if p.recipe.varlen:
        return p.q.shape[0] // BLOCK_Q + p.B, p.k.shape[0] // BLOCK_K + p.B
    return -(-p.M // BLOCK_Q), -(-p.N // BLOCK_K)


def empty_codes(p: Problem, device: torch.device) -> Codes:
    """Allocate codes, unwritten: (size + 8) bytes a query, and size a key, with "fp8" twice that."""
    size, batch = size_of(p), 1 if p.recipe.varlen else p.B
    of_queries, of_keys = (batch * h * n for h, n in zip((p.H, p.H_k), blocks_of(p), strict=True))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    fp8, kind = p.recipe.precision == "fp8", torch.float8_e4m3fn if p.recipe.quantized else torch.int8
    return Codes(
        empty(of_queries, BLOCK_Q, size, dtype=kind), empty(of_keys, BLOCK_K, size, dtype=kind),
        empty(of_queries, BLOCK_Q), empty(of_keys), empty(of_queries, BLOCK_Q),
        empty(p.B, p.H_k, size), empty(p.B, p.H_k, size),
        empty(of_keys, size, BLOCK_K, dtype=torch.float8_e4m3fn) if fp8 else None, empty(of_keys) if fp8 else None,
    )  # fmt: skip


class Sequences(NamedTuple):
    """Batch entries of one length, or a single packed sequence: operands (entries, length, heads, head size)."""

    b: slice
    q: Tensor
    k: Tensor
    v: Tensor
    first_q: int
    first_k: int
    """The first block of each head."""
    lo: Tensor
    hi: Tensor
    """(entries,): the keys lo <= j < hi, which a Padding shows."""


def sequences(p: Problem, x: Operands) -> Iterator[Sequences]:
    """Yield the whole padded batch, or one packed sequence after the other."""
    masks = p.values(x.extra)[0]
    starts, ends = key_bounds(masks)
    lo = torch.zeros(p.B, dtype=torch.int64, device=x.q.device) if starts is None else starts.long().clamp(min=0)
    if not p.recipe.varlen:
        hi = torch.full_like(lo, p.N) if ends is None else ends.long().clamp(max=p.N)
        yield Sequences(slice(0, p.B), x.q, x.k, x.v, 0, 0, lo, hi)
        return
    cu_q, cu_k = (cu.tolist() for cu in x.extra[-2:])
    for b in range(p.B):
        (q0, q1), (k0, k1) = cu_q[b : b + 2], cu_k[b : b + 2]
        own = slice(b, b + 1)
        hi = torch.full_like(lo[own], k1 - k0) if ends is None else ends[own].long().clamp(max=k1 - k0)
        q, k, v = x.q[None, q0:q1], x.k[None, k0:k1], x.v[None, k0:k1]
        yield Sequences(own, q, k, v, q0 // BLOCK_Q + b, k0 // BLOCK_K + b, lo[own], hi)


def key_bounds(masks: tuple[Mask, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Return the starts and the ends (B,) of the keys that a mask's first Padding shows; None for no bound."""
    for mask in masks:
        if isinstance(mask, (PaddingLengths, PaddingRange)):
            return getattr(mask, "starts", None), mask.lengths
    return None, None


def quantize(p: Problem, x: Operands) -> Codes:
    """Return the codes of a call. Blocks that no sequence owns are zeros."""
    codes = empty_codes(p, x.q.device)
    for t in codes.present():
        t.view(torch.int8).zero_()
    for s in sequences(p, x):
        of_q, of_k = (0, s.first_q, s.q.shape[1]), (1, s.first_k, s.k.shape[1])
        parts = _copied(p, x, s) if p.recipe.quantized else _rounded(p, x, s)
        for name, to, part in zip(Codes._fields, codes, parts, strict=True):
            if to is None or part is None:
                continue
            if name in ("mean", "balance"):
                to[s.b] = part
            else:
                _blocks(p, to, *(of_q if name.startswith("q") else of_k)).copy_(part)
    return codes


def _rounded(p: Problem, x: Operands, s: Sequences) -> Codes:
    """Return the codes of sequences, (entries, heads, blocks, …), without those of V for "int8"."""
    signs = signs_of(size_of(p), x.q.device)
    q, k, v = (_columns(t, size_of(p)) for t in (*_turned(p, x, s.q, s.k), s.v))
    j = torch.arange(k.shape[2], device=k.device)
    inside = ((j >= s.lo[:, None]) & (j < s.hi[:, None]))[:, None, :, None]
    mean, balance = (t[s.b] for t in given_statistics(p, x)) if p.recipe.given else statistics(p, q, k, s)
    of_q, of_mean = (_per_query_head(p, t)[:, :, None] for t in (balance * signs, mean))
    q_int8, q_descale = int8_rows(rotated(q * of_q))
    q_shift = (q * of_mean).sum(-1, keepdim=True) * p.scale
    k = rotated(torch.where(inside, (k - mean[:, :, None]) * (signs / balance)[:, :, None], 0.0))
    k_int8, k_descale = int8_blocks(_cut(k, BLOCK_K))
    of_v: tuple[Tensor, ...] = ()
    if p.recipe.precision == "fp8":
        v_e4m3, v_descale = e4m3_blocks(_cut(torch.where(inside, v, 0.0), BLOCK_K))
        of_v = v_e4m3[..., key_order(v.device), :].mT, v_descale
    return Codes(
        _cut(q_int8, BLOCK_Q), k_int8, _cut(q_descale / size_of(p), BLOCK_Q)[..., 0], k_descale,
        _cut(q_shift, BLOCK_Q)[..., 0], mean, balance, *of_v,
    )  # fmt: skip


def _copied(p: Problem, x: Operands, s: Sequences) -> Codes:
    """Return the same of e4m3 tensors, which are codes already; numbers that are alike everywhere broadcast."""
    q, k, v = (
        _cut(_columns(t.view(torch.int8), size_of(p)), rows).to(torch.int8).view(torch.float8_e4m3fn)
        for t, rows in ((s.q, BLOCK_Q), (s.k, BLOCK_K), (s.v, BLOCK_K))
    )
    of_q, of_k, of_v = (t[s.b, :, None] for t in x.extra[p.after_sink : p.after_sink + 3])
    of_q, zero = _per_query_head(p, of_q)[..., None], of_q.new_zeros(())
    return Codes(q, k, of_q, of_k, zero, zero, of_q.new_ones(()), v[..., key_order(v.device), :].mT, of_v)


def tables_of(p: Problem, x: Operands) -> tuple[Tensor, Tensor]:
    """Return rotary's cos and sin, (positions, R / 2), of a call that has them."""
    first = p.after_sink + 2 * p.recipe.given
    cos, sin = x.extra[first : first + 2]
    return cos, sin


def _turned(p: Problem, x: Operands, *rows: Tensor) -> list[Tensor]:
    """Turn rows (entries, length, heads, D), from position 0 on, if the call has rotary's tables."""
    if not p.recipe.rotary:
        return list(rows)
    cos, sin = (t.float()[:, None] for t in tables_of(p, x))
    return [turned(t, cos[: t.shape[1]], sin[: t.shape[1]], p.recipe.rotary == "neighbours") for t in rows]


def given_statistics(p: Problem, x: Operands) -> tuple[Tensor, Tensor]:
    """Return the mean and the balance that the caller gave, (B, H_k, size): 0 and 1 past the head size."""
    mean, balance = x.extra[p.after_sink : p.after_sink + 2]
    wider = 0, size_of(p) - p.D
    mean = mean if smooths(p) else torch.zeros_like(mean)
    return torch.nn.functional.pad(mean, wider), torch.nn.functional.pad(balance, wider, value=1.0)


def statistics(p: Problem, q: Tensor, k: Tensor, s: Sequences) -> tuple[Tensor, Tensor]:
    """Return K's mean and the balance, (entries, H_k, size), from SAMPLES rows of each head, which may repeat.

    q, k: (entries, heads, rows, size). What is not finite counts as 0. The samples of Q take turns among the heads that
    share a key head. The balance brings K's mean square to Q's: the fourth root of their quotient, to the nearest power
    of two, with log2 taken to be linear between them.
    """
    group = p.H // p.H_k
    of_keys = _sampled(k, s.lo, s.hi)
    turns = torch.arange(SAMPLES, device=q.device) % group
    grouped = q.unflatten(1, (p.H_k, group))
    of_queries = torch.stack([_sampled(grouped[:, :, g], torch.zeros_like(s.lo), q.shape[2]) for g in range(group)], 2)
    of_queries = of_queries[:, :, turns, torch.arange(SAMPLES, device=q.device)]
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
    turns = torch.arange(SAMPLES, device=x.device)
    count = (hi - lo).clamp(min=0)[:, None]
    rows = lo[:, None] + turns * count // SAMPLES  # (entries, SAMPLES)
    exists = (count > 0).expand_as(rows)[:, None, :, None]
    if x.shape[2] == 0:
        return x.new_zeros(*x.shape[:2], SAMPLES, x.shape[3])
    at = rows.clamp(max=x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    found = torch.gather(x, 2, at)
    return torch.where(exists & (found.abs() < torch.inf), found, 0.0)


def _total(x: Tensor) -> Tensor:
    """Sum (entries, heads, SAMPLES, size) over the samples: every 16th one after the other, then halves."""
    parts = x.unflatten(2, (SAMPLES // 16, 16))
    total = parts[:, :, 0]
    for n in range(1, parts.shape[2]):
        total = total + parts[:, :, n]
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[:, :, :half] + total[:, :, half:]
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


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 (…, rows, columns) and the descale factor (…, rows, 1) of each row: the largest becomes 127."""
    return _int8(x, _largest(x).amax(-1, keepdim=True))


def int8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 (…, rows, columns) and the descale factor (…) of each block of rows: the largest becomes 127."""
    codes, descale = _int8(x, _largest(x).amax((-2, -1), keepdim=True))
    return codes, descale[..., 0, 0]


def _int8(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
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


def _largest(x: Tensor) -> Tensor:
    """Return |x|, and inf for NaN, so that a maximum tells whether all is finite."""
    return torch.where(x.abs() < torch.inf, x.abs(), torch.inf)


def _columns(x: Tensor, size: int) -> Tensor:
    """Return (entries, heads, rows, size) in fp32, zero past the head size."""
    return torch.nn.functional.pad(x.transpose(1, 2).float(), (0, size - x.shape[-1]))


def _cut(x: Tensor, rows: int) -> Tensor:
    """Cut (…, length, columns) into blocks (…, blocks, rows, columns), zero past the end."""
    whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % rows))
    return whole.unflatten(-2, (whole.shape[-2] // rows, rows))


def _blocks(p: Problem, t: Tensor, side: int, first: int, length: int) -> Tensor:
    """View the blocks of a sequence's rows, (entries, heads, blocks, …), from its first one on.

    `side` is 0 for queries, 1 for keys.
    """
    heads, rows = ((p.H, BLOCK_Q), (p.H_k, BLOCK_K))[side]
    whole = t.unflatten(0, (1 if p.recipe.varlen else p.B, heads, blocks_of(p)[side]))
    return whole[:, :, first : first + -(-length // rows)]


def _per_query_head(p: Problem, x: Tensor, axis: int = 1) -> Tensor:
    """Repeat what each key head has for its query heads."""
    return x.repeat_interleave(p.H // p.H_k, axis)


# What a forward saw, from its codes


def multiplied(p: Problem, x: Operands, codes: Codes) -> Operands:
    """Return q, k and v as the two products of a forward see them, in fp32: Q and K rotated, (…, heads, size)."""
    q = _rows(p, codes.q.float() * codes.q_descale[..., None], BLOCK_Q, x, 0)
    k = _rows(p, codes.k.float() * codes.k_descale[:, None, None], BLOCK_K, x, 1)
    return Operands(q, k, _values(p, x, codes), x.extra)


def dequantized(p: Problem, x: Operands, codes: Codes) -> Operands:
    """Return q, k and v as a forward saw them, in their own type and coordinates; K without its mean.

    The 16-bit backward takes these, with lse less `shift_of`: P sums to 1, as it did in the forward. With the original
    tensors it would not.
    """
    seen, size = multiplied(p, x, codes), size_of(p)
    signs = signs_of(size, x.q.device)
    q = rotated(seen.q) * signs / _per_query_head(p, _of_rows(p, codes.balance, x, 0), -2)
    k = rotated(seen.k) * (signs / size) * _of_rows(p, codes.balance, x, 1)
    return Operands(q[..., : p.D].to(p.dtype), k[..., : p.D].to(p.dtype), seen.v.to(p.dtype), x.extra)


def shift_of(p: Problem, x: Operands, codes: Codes) -> Tensor:
    """Return scale * q . mean of each row, of lse's shape: lse is that of the codes' logits plus this."""
    shift = _rows(p, codes.q_shift[..., None], BLOCK_Q, x, 0)[..., 0]  # (B, M, H) or (T, H)
    return shift.transpose(-1, -2).contiguous()


def mean_of_keys(p: Problem, x: Operands, codes: Codes) -> Tensor:
    """Return the mean that K lost, for each query: (B, 1, H, D), packed (T, H, D)."""
    return _per_query_head(p, _of_rows(p, codes.mean, x, 0), -2)[..., : p.D]


def probabilities(p: Problem, P: Tensor) -> Tensor:
    """Round P, at most 1, as its product with V does: with "fp8", 256 P is e4m3. Without scores, its sum is lse's."""
    return P.mul(256.0).to(torch.float8_e4m3fn).to(P.dtype).div_(256.0) if p.recipe.precision == "fp8" else P


def _values(p: Problem, x: Operands, codes: Codes) -> Tensor:
    if codes.v is None or codes.v_descale is None:
        return x.v.float()
    v = codes.v.float().mT[:, torch.argsort(key_order(x.v.device))]
    return _rows(p, v * codes.v_descale[:, None, None], BLOCK_K, x, 1)[..., : p.D_v]


def _rows(p: Problem, t: Tensor, rows: int, x: Operands, side: int) -> Tensor:
    """Take blocks (blocks, rows, columns) apart into (B, length, heads, columns), packed (T, heads, columns).

    `side` is 0 for queries, 1 for keys. Packed rows of no sequence hold any number.
    """
    heads, length = (p.H, p.M) if side == 0 else (p.H_k, p.N)
    if not p.recipe.varlen:
        count = -(-length // rows)
        return t.reshape(p.B, heads, count * rows, t.shape[-1])[:, :, :length].transpose(1, 2)
    if p.B == 0:  # all rows are of no sequence
        return t.new_zeros((x.q, x.k)[side].shape[0], heads, t.shape[-1])
    at, stride = _places(p, rows, x, side)
    return t.reshape(heads, stride * rows, t.shape[-1])[:, at].transpose(0, 1)


def _places(p: Problem, rows: int, x: Operands, side: int) -> tuple[Tensor, int]:
    """Return where in a head's blocks each packed row lies, and how many blocks a head has."""
    cu, total = x.extra[side - 2].long(), (x.q, x.k)[side].shape[0]
    at = torch.arange(total, device=cu.device)
    b = _sequence_of(p, at, cu)
    stride = total // rows + p.B
    return ((cu[b] // rows + b) * rows + at - cu[b]).clamp(0, stride * rows - 1), stride


def _of_rows(p: Problem, t: Tensor, x: Operands, side: int) -> Tensor:
    """Return numbers of each head (B, H_k, size) for each row: (B, 1, H_k, size), packed (T, H_k, size)."""
    if not p.recipe.varlen:
        return t[:, None]
    if p.B == 0:
        return t.new_zeros((x.q, x.k)[side].shape[0], *t.shape[1:])
    return t[_sequence_of(p, torch.arange((x.q, x.k)[side].shape[0], device=t.device), x.extra[side - 2].long())]


def _sequence_of(p: Problem, at: Tensor, cu: Tensor) -> Tensor:
    """Return which packed sequence owns each row."""
    return (torch.searchsorted(cu, at, right=True) - 1).clamp(0, p.B - 1)
