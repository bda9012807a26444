"""The tiled algorithm in torch: FlashAttention-2's loops, a few heads at a time.

The forward's outer loop runs over query tiles, the backward's over key tiles. Each product covers several key heads at
once, with the query heads of a group stacked into rows: q (heads, G * rows, D), S (heads, G * rows, columns). Batch
entries of one length that fit one tile are computed together, their heads treated as more heads.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem, empty_parts, lse_shape
from ..merge.sink import sink_gradient
from ..program import Entries
from ..program.bounds import Grid, tiles
from ..quantize.dequantize import probabilities
from ..values.dropout import philox
from ..values.masks import Mask
from .sequences import COLUMNS, Sequence, choose_tiles, compute_type, count_of, heads_first, heads_serially, sequences

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LARGE_LSE = 4096.0
"""Below this, rounding lse changes P by a relative 2^-12 at most, which is less than rounding S does."""
HIDDEN, OPEN, WHOLE = range(3)
"""What masks show of a tile: no entry; some, maybe none or all; all."""


class Tile(NamedTuple):
    """Rows i0:i1 and columns j0:j1 of S, for some heads.

    `keep` is its mask and broadcasts to (entries, heads, rows, columns); None if the mask hides nothing.
    """

    h: slice
    i0: int
    i1: int
    j0: int
    j1: int
    keep: Tensor | None


def forward(p: Problem, x: Operands, seed: Tensor | None, own: Iterable[Sequence]) -> Saved:
    """Compute o and lse of a call's `own` sequences."""
    kind = compute_type(p)
    o = x.q.new_empty(*x.q.shape[:-1], p.D_v, dtype=p.out_dtype)
    lse = x.q.new_empty(lse_shape(x.q.shape), dtype=kind)
    if (cu_q := p.recipe.layout_of(x.extra).cu_q) is not None:
        _unowned(o, cu_q).zero_()
        _unowned(lse.T, cu_q).fill_(-torch.inf)
    B_r = choose_tiles(p)[1]
    sink = p.values(x.extra)[2]
    for s in own:
        for h_k, rows in zip(heads_serially(s), _shown(p, s), strict=True):
            for i0, row in zip(range(0, s.q.shape[1], B_r), rows, strict=True):
                _forward_tile(p, s, h_k, i0, row, (o, lse), sink, seed)
    return Saved(o, lse, seed)


def _forward_tile(p, s, h_k, i0, row, outputs, sink, seed):
    """Compute one query tile's rows of o and lse, in a loop over the key tiles it sees."""
    i1 = min(i0 + choose_tiles(p)[1], s.q.shape[1])
    h = _query_heads(p, h_k)
    q = _stack(s.q[h, i0:i1], h_k)  # (heads, G * rows, D)
    acc = q.new_zeros(*q.shape[:2], p.D_v)
    m = q.new_full((*q.shape[:2], 1), -torch.inf)
    l = q.new_zeros(*q.shape[:2], 1)
    for tile in _tiles(s, h, i0, i1, row):
        j = slice(tile.j0, tile.j1)
        S = _scores(p, s, tile, q, s.k[h_k, j])[0]
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        m_safe = m_new.masked_fill(m_new == -torch.inf, 0.0)  # the row has seen no key yet: exp2(-inf - 0) = 0
        P = _exp_(p, S.sub_(m_safe))
        alpha = _exp_(p, m - m_safe)
        rounded = probabilities(p, P)
        l = l * alpha + (P if p.recipe.score else rounded).sum(-1, keepdim=True)
        m = m_new
        if seed is not None:
            rounded = rounded.mul_(_dropout_factor(p, s, tile, seed).view(P.shape))
        acc = acc.mul_(alpha).baddbmm_(rounded, s.v[h_k, j])
    if sink is not None:
        s_sink = (sink[h].to(m.dtype) * _base(p)).repeat(count_of(s)).view(acc.shape[0], -1, 1, 1)
        s_sink = s_sink.expand(-1, -1, i1 - i0, 1).reshape(m.shape)
        m_new = torch.maximum(m, s_sink)
        m_safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
        alpha = _exp_(p, m - m_safe)
        l = l * alpha + _exp_(p, s_sink - m_safe)
        acc, m = acc.mul_(alpha), m_new
    acc.div_(l.masked_fill(l == 0.0, 1.0))
    o, lse = outputs
    p.layout.rows_of(o, s.b, s.rows)[:, i0:i1, h] = (
        acc.view(count_of(s), -1, i1 - i0, p.D_v).transpose(1, 2).to(o.dtype)
    )
    L = m + torch.log(l) if p.recipe.score else (m + torch.log2(l)) * LN2
    p.layout.lse_of(lse, s.b, s.rows)[:, h, i0:i1] = L.view(count_of(s), -1, i1 - i0)


def backward(p: Problem, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None) -> Grads:
    kind = compute_type(p)
    dq, dk, dv = empty_parts(p, x)
    delta = (do.to(kind) * saved.o.to(kind)).sum(-1).transpose(-1, -2)  # (B, H, M) or (H, T)
    if dlse is not None:
        delta = delta - dlse
    extra: list[Tensor | None] = [
        t.new_zeros(t.shape, dtype=kind) if want else None for t, want in zip(x.extra, p.wanted, strict=True)
    ]
    for s in sequences(p, x):
        do_s = heads_first(p.layout.rows_of(do, s.b, s.rows), kind)
        L = p.layout.lse_of(saved.lse, s.b, s.rows) * _base(p)
        L = L.masked_fill(L == -torch.inf, 0.0).flatten(0, 1)
        delta_s = p.layout.lse_of(delta, s.b, s.rows).flatten(0, 1)
        dq_s = torch.zeros_like(s.q)
        dk_s, dv_s = (p.layout.rows_of(grad, s.b, s.columns).transpose(1, 2) for grad in (dk, dv))
        for h_k, rows in zip(heads_serially(s), _shown(p, s), strict=True):
            lost = _lost(p, s, h_k, rows, L)
            for n, j0 in enumerate(range(0, s.k.shape[1], COLUMNS)):
                column = [row[n] for row in rows]
                _backward_tile(p, s, h_k, j0, column, (do_s, L, lost, delta_s, saved.seed), (dq_s, dk_s, dv_s, extra))
        p.layout.rows_of(dq, s.b, s.rows).copy_(dq_s.unflatten(0, (count_of(s), p.H)).transpose(1, 2))
    layout = p.recipe.layout_of(x.extra)
    for grad, cu in ((dq, layout.cu_q), (dk, layout.cu_k), (dv, layout.cu_k)):
        if cu is not None:
            _unowned(grad, cu).zero_()
    if p.recipe.sink:
        index = p.sink_at
        if p.wanted[index]:
            extra[index] = sink_gradient(x.extra[index], saved.lse.to(kind), delta)
    typed = [None if g is None else g.to(t.dtype) for g, t in zip(extra, x.extra, strict=True)]
    return Grads(dq, dk, dv, tuple(typed))


def _backward_tile(p, s, h_k, j0, column, given, outputs):
    """Compute one key tile's rows of dk and dv, and add its contributions to dq and dbias.

    The loop runs over the query tiles that see it.
    """
    do, L, lost, delta, seed = given
    dq, dk, dv, extra = outputs
    h = _query_heads(p, h_k)
    B_r = choose_tiles(p)[1]
    j1 = min(j0 + COLUMNS, s.k.shape[1])
    k, v = s.k[h_k, j0:j1], s.v[h_k, j0:j1]
    dk_tile, dv_tile = torch.zeros_like(k), torch.zeros_like(v)
    for i0, show in zip(range(0, s.q.shape[1], B_r), column, strict=True):
        i1 = min(i0 + B_r, s.q.shape[1])
        tile = _look(s, h, i0, i1, j0, j1, show)
        if tile is None:
            continue
        q, do_i = _stack(s.q[h, i0:i1], h_k), _stack(do[h, i0:i1], h_k)
        S, stages = _scores(p, s, tile, q, k)
        S = S.sub_(L[h, i0:i1].reshape(*q.shape[:2], 1))
        if lost is not None:
            S = S.sub_(lost[:, i0:i1].reshape(*q.shape[:2], 1))
        P = _exp_(p, S)
        dP = torch.bmm(do_i, v.mT)
        P_kept = P
        if seed is not None:
            Z = _dropout_factor(p, s, tile, seed).view(P.shape)
            P_kept, dP = P * Z, dP.mul_(Z)
        dv_tile.baddbmm_(P_kept.mT, do_i)
        dS = dP.sub_(delta[h, i0:i1].reshape(*q.shape[:2], 1)).mul_(P)
        dS = _through_scores(p, s, tile, dS, stages, extra)
        dq_view = dq[h, i0:i1]
        dq_view += torch.bmm(dS, k).view(dq_view.shape).mul_(p.scale)
        dk_tile.baddbmm_(dS.mT, q, alpha=p.scale)
    for grad, found in ((dk, dk_tile), (dv, dv_tile)):
        grad[:, h_k, j0:j1] = found.unflatten(0, (count_of(s), -1))


def _scores(p, s, tile, q, k):
    """Return a tile's masked S, in base 2 or with scores natural, and the natural logits that enter each score."""
    c = p.scale if s.scores else p.scale * LOG2E
    empty = q.new_empty(()).expand(q.shape[0], q.shape[1], k.shape[1])
    vanishes = c < torch.finfo(torch.float32).tiny  # with alpha = 0, oneDNN's bf16 product returns uninitialised memory
    S = torch.baddbmm(empty, q, k.mT, beta=0, alpha=1.0 if vanishes else c)
    if vanishes:
        S.mul_(c)
    stages = []
    if s.scores:
        at = _entries(s, tile.h, tile.i0, tile.i1, tile.j0, tile.j1)
        by_head = _per_query_head(S, s, tile)
        for score in s.scores:
            stages.append(by_head)
            by_head = score.apply(by_head, at)
        S = by_head.reshape(S.shape)
    if tile.keep is not None:
        _per_query_head(S, s, tile).masked_fill_(~tile.keep, -torch.inf)
    return S, stages


def _lost(p, s, h_k, rows, L):
    """Return log(sum_j exp(S - L)) for the rows of some key heads: what rounding a large lse = m + log l lost of log l.

    Only a bias makes lse so large, where it fills rows with -1e9 or torch.finfo(...).min. Otherwise return None.
    """
    h = _query_heads(p, h_k)
    large = (L[h].abs() >= LARGE_LSE) & L[h].isfinite()
    if not (p.biased and bool(large.any())):
        return None
    total = torch.zeros_like(L[h])
    B_r = choose_tiles(p)[1]
    for i0, row in zip(range(0, s.q.shape[1], B_r), rows, strict=True):
        i1 = min(i0 + B_r, s.q.shape[1])
        q = _stack(s.q[h, i0:i1], h_k)
        for tile in _tiles(s, h, i0, i1, row):
            S = _scores(p, s, tile, q, s.k[h_k, tile.j0 : tile.j1])[0]
            P = _exp_(p, S.sub_(L[h, i0:i1].reshape(*q.shape[:2], 1)))
            total[:, i0:i1] += P.sum(-1).view(-1, i1 - i0)
    return torch.log(total).masked_fill_(~large, 0.0)


def _base(p: Problem) -> float:
    """Return the factor from natural log to the unit of S: base 2, or with scores natural log.

    A bias may be too large to be multiplied.
    """
    return 1.0 if p.recipe.score else LOG2E


def _exp_(p: Problem, x: Tensor) -> Tensor:
    """Compute exp of a difference of logits, in place. exp2 is twice as fast as exp."""
    return (x.mul_(LOG2E) if p.recipe.score else x).exp2_()


def _through_scores(p, s, tile, dS, stages, extra):
    """Return the gradient of the scaled logits from that of S, and add to those of captured tensors that need one."""
    if not s.scores:
        return dS
    at = _entries(s, tile.h, tile.i0, tile.i1, tile.j0, tile.j1)._replace(seen=tile.keep)
    by_head = _per_query_head(dS, s, tile)
    index = sum(len(mask.captures) for mask in s.masks) + sum(len(score.captures) for score in s.scores)
    for score, S_in in zip(reversed(s.scores), reversed(stages), strict=True):
        count = len(score.captures)
        index -= count
        by_head = score.pull(by_head, S_in, at, extra[index : index + count])
    return by_head.reshape(dS.shape)


def _shown(p: Problem, s: Sequence) -> list[list[list[int]]]:
    """Return what masks show of a sequence's tiles, for each round of heads: rows of HIDDEN, OPEN or WHOLE.

    Bounds of the masks' programs say it of all tiles at once. A single tile is left open: a look at it costs less.
    """
    M, N, B_r = s.q.shape[1], s.k.shape[1], choose_tiles(p)[1]
    rounds, rows, columns = list(heads_serially(s)), -(-M // B_r), -(-N // s.width)
    if not s.masks or rows * columns <= 1:
        return [[[OPEN if s.masks else WHOLE] * columns] * rows] * len(rounds)
    grid = count_of(s), p.H, M, N, B_r, s.width
    possible, certain = possible_and_certain(s.masks, grid, s.shift, s.b.start)
    shown = possible.int() + certain
    if shown.shape[:2] == (1, 1):
        return [shown[0, 0].tolist()] * len(rounds)
    found = []
    for h_k in rounds:
        own = shown if shown.shape[1] == 1 else shown[:, _query_heads(p, h_k)]
        least, most = own.flatten(0, 1).aminmax(dim=0)
        found.append(least.where(least == most, OPEN).tolist())
    return found


def possible_and_certain(
    masks: Iterable[Mask], grid: tuple[int, int, int, int, int, int], shift: int, first: int = 0
) -> tuple[Any, Any]:
    """Return which tiles of a `Grid` masks may show a part of, and which they show all of."""
    every, zero = [], cast(Any, 0)
    for mask in masks:
        program, tensors, numbers, _ = mask.traced
        row: Any = mask.rows(Entries(zero, zero, zero, zero, shift)).i  # the index of row 0
        every.append(tiles(program, tensors, numbers, Grid(*grid, row, first)))
    possible, certain = [reduce(torch.logical_and, shown) for shown in zip(*every, strict=True)]
    return possible, certain


def _tiles(s: Sequence, h: slice, i0: int, i1: int, row: Iterable[int]) -> Iterator[Tile]:
    """Yield the key tiles that rows i0:i1 see; `row` says what masks show of each."""
    N = s.k.shape[1]
    for j0, show in zip(range(0, N, s.width), row, strict=True):
        tile = _look(s, h, i0, i1, j0, min(j0 + s.width, N), show)
        if tile is not None:
            yield tile


def _look(s: Sequence, h: slice, i0: int, i1: int, j0: int, j1: int, show: int) -> Tile | None:
    """Return one tile with its mask, or None if the masks hide all of it. Only an open one is evaluated."""
    if show != OPEN:
        return Tile(h, i0, i1, j0, j1, None) if show == WHOLE else None
    at = _entries(s, h, i0, i1, j0, j1)
    keep = s.q.new_ones((), dtype=torch.bool)
    for mask in s.masks:
        keep = keep & mask.keep(at)
    if not bool(keep.any()):
        return None
    return Tile(h, i0, i1, j0, j1, None if bool(keep.all()) else keep)


def _entries(s: Sequence, h: slice, i0: int, i1: int, j0: int, j1: int) -> Entries:
    """Return a tile's entries. If there are several batch entries, `h` is all of their heads."""
    heads = slice(h.start, min(h.stop, len(s.q) // count_of(s)))
    return Entries.at((s.b, heads, slice(i0, i1), slice(j0, j1)), s.shift, s.q.device)


def _range(s: Sequence, start: int, stop: int) -> Tensor:
    """Return indices on the operands' device, whatever torch's default device is."""
    return torch.arange(start, stop, device=s.q.device)


def _dropout_factor(p, s, tile, seed):
    """Return Z (H, rows, columns): 0 where dropped, `dropout_rescale` where kept; bitwise as `dropout.dropout_keep`.

    Each counter is computed only once, for all blocks of 16 rows and 64 columns that overlap the tile.
    """
    first, column, heads, matrix = p.origin.counters(p.H)
    each = _range(s, 0, s.q.shape[0])[tile.h, None, None]
    row = (s.b.start + each // p.H) * heads + matrix + each % p.H
    i0, i1, j0, j1 = tile.i0 + first, tile.i1 + first, tile.j0 + column, tile.j1 + column
    c_i = _range(s, i0 // 16 * 8, -(-i1 // 16) * 8)[:, None]
    c_j = _range(s, j0 // 64 * 8, -(-j1 // 64) * 8)
    words = torch.stack(philox((c_j, c_i, row, torch.zeros_like(row)), int(seed)))
    every = words[0] ^ words[1] ^ words[2] ^ words[3]
    numbers = torch.stack([(words >> byte & 0xFF) << 8 | every >> byte & 0xFF for byte in (0, 8, 16, 24)])
    numbers = numbers.view(2, 2, 4, len(row), -1, 8, len(c_j) // 8, 8)  # bit 3 of i, of j, bits 5 and 4; heads, i, j
    numbers = numbers.permute(3, 4, 0, 5, 6, 2, 1, 7).reshape(len(row), 2 * len(c_i), 8 * len(c_j))
    numbers = numbers[:, i0 % 16 :, j0 % 64 :][:, : i1 - i0, : j1 - j0]
    keep = numbers >= p.dropout.threshold
    return keep.to(compute_type(p)).mul_(p.dropout.rescale)


def _stack(rows: Tensor, h_k: slice) -> Tensor:
    """Reshape (H, rows, D) to (key heads, G * rows, D)."""
    return rows.reshape(h_k.stop - h_k.start, -1, rows.shape[-1])


def _query_heads(p: Problem, h_k: slice) -> slice:
    group = p.H // p.H_k
    return slice(h_k.start * group, h_k.stop * group)


def _per_query_head(S: Tensor, s: Sequence, tile: Tile) -> Tensor:
    """View (key heads, G * rows, columns) as (entries, heads, rows, columns)."""
    return S.view(count_of(s), -1, tile.i1 - tile.i0, tile.j1 - tile.j0)


def _unowned(rows: Tensor, cu: Tensor) -> Tensor:
    """Return the packed rows after the last sequence."""
    return rows[int(cu[-1]) :]
