"""A problem as its ranks see it: for each pair of ranks, which keys travel and which calls compute them."""

from dataclasses import dataclass, field
from functools import lru_cache, singledispatchmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.api import attention, attention_backward
from ..merge.api import merge
from ..values.intervals import Causal, Padding, PaddingKeys, Prefix, Spans, Window
from ..values.masks import Full, Mask, intersect
from ..values.origin import Origin
from ..values.score import Alibi, Bias, Score
from ..values.tables import Dense, Documents
from .held import Numbers, held
from .pieces import Box, Pieces, crop, index, join, length
from .reach import Reach, reach

ROWS, KEYS = 16, 64
"""Multiples at which a part's dropout must begin, for kernels."""
CUT = Causal, Window, Dense, Documents, Padding, Prefix, Spans
"""Masks that `Shards` can cut to some rows and keys."""
FEW = 3
"""So many calls of bands has a rank of Zigzag with its own keys; more become one call of Spans."""


class Block(NamedTuple):
    """One call: rows of a rank, keys of a buffer, and what they are in the whole."""

    r0: int
    r1: int
    c0: int
    c1: int
    box: Box
    mask: Mask | None
    """Full() where the whole's mask hides nothing, Spans where rows or keys lie apart in the whole; None: cut it."""


class Parts(NamedTuple):
    """What rank s sends to rank r, and what r computes with it."""

    keys: Pieces
    blocks: tuple[Block, ...]


@dataclass(eq=False)
class Shards:
    """A problem in pieces.

    mask and score are the whole's, but for the rows of Dense and Bias, which are this rank's. `own` is this rank's
    place in `pieces`. `head` and `heads` say which heads of the whole these are.
    """

    pieces: tuple[Pieces, ...]
    own: int
    reach: Reach
    mask: Mask
    score: tuple[Score, ...]
    options: dict[str, Any]
    """scale, dropout, seed, precision, deterministic, backend."""
    head: int = 0
    heads: int | None = None
    batch: int = 1
    device: torch.device | str = "cpu"
    known: dict[tuple[int, int], Parts] = field(default_factory=dict)

    def pair(self, to: int, source: int) -> Parts:
        """Return what rank `to` does with the keys of rank `source`."""
        if (to, source) not in self.known:
            self.known[to, source] = self.parts(self.pieces[to], self.pieces[source])
        return self.known[to, source]

    def parts(self, rows: Pieces, keys: Pieces) -> Parts:
        """Return the keys, of some, that rows see, and the calls that compute them."""
        boxes = [[self.box(a, b) for b in keys] for a in rows]
        hulls = [self.hull([row[n] for row in boxes]) for n in range(len(keys))]
        blocks: list[Block] = []
        r = 0
        for (a0, a1), row in zip(rows, boxes, strict=True):
            c = 0
            for box, hull in zip(row, hulls, strict=True):
                if box is not None and hull is not None:
                    i0, i1, j0, j1 = box
                    at = r + i0 - a0, r + i1 - a0, c + j0 - hull[0], c + j1 - hull[0]
                    self.add(blocks, Block(*at, box, Full() if self.reach.covers(*box) else None))
                c += 0 if hull is None else hull[1] - hull[0]
            r += a1 - a0
        found = Parts(tuple(hull for hull in hulls if hull), tuple(blocks))
        few = len(blocks) <= FEW and (self.reach.each is None or all(v.mask for v in blocks))
        if few or not (self.joins and self.reach.exact):
            return found
        return self.one_call(rows, found.keys) or found

    def one_call(self, rows: Pieces, keys: Pieces) -> Parts | None:
        """Return the one call of rows with keys, pieces of the whole: an interval of it is one of theirs, too.

        None if some row's keys begin or end before those of the row above it.
        """
        at = index(rows)
        ends = [end[:, at] for end in self.reach.intervals()]
        if any(bool((end.diff(dim=1) < 0).any()) for end in ends):
            return None
        lo, hi = (torch.stack([(end - a).clamp(0, b - a) for a, b in keys]).sum(0) for end in ends)
        seen = (lo < hi).any(0).nonzero()
        if not len(seen):  # boxes span the rows between those that see something
            return Parts((), ())
        r0, r1 = int(seen[0]), int(seen[-1]) + 1
        spans = Spans(*(end[:, r0:r1].expand(self.batch, -1).int().contiguous().to(self.device) for end in (lo, hi)))
        box = int(at[r0]), int(at[r1 - 1]) + 1, keys[0][0], keys[-1][1]
        return Parts(keys, (Block(r0, r1, 0, length(keys), box, spans),))

    def box(self, rows: tuple[int, int], keys: tuple[int, int]) -> Box | None:
        """Return what rows see of keys; with dropout it begins at multiples that kernels take, where pieces do."""
        box = crop(rows, keys, self.reach.first, self.reach.end)
        if box is None or not self.options.get("dropout"):
            return box
        i0, i1, j0, j1 = box
        return max(rows[0], i0 // ROWS * ROWS), i1, max(keys[0], j0 // KEYS * KEYS), j1

    @staticmethod
    def hull(boxes: list[Box | None]) -> tuple[int, int] | None:
        """Return the keys that all boxes span."""
        seen = [box for box in boxes if box is not None]
        return (min(box[2] for box in seen), max(box[3] for box in seen)) if seen else None

    @property
    def joins(self) -> bool:
        """Tell whether wholly seen boxes may be one call wherever they lie in the whole."""
        placed = any(isinstance(score, (Alibi, Bias)) for score in self.score)
        return not (placed or self.options.get("dropout"))

    def add(self, blocks: list[Block], v: Block) -> None:
        """Append a call, or extend the last one by it: keys after keys, rows below rows."""
        last = blocks[-1] if blocks else None
        if last and self.joins and last.mask and v.mask:
            if (last.r0, last.r1, last.c1) == (v.r0, v.r1, v.c0):
                blocks[-1] = v = last._replace(c1=v.c1)
                last = blocks[-2] if len(blocks) > 1 else None
                if last and last.mask and (last.r1, last.c0, last.c1) == (v.r0, v.c0, v.c1):
                    blocks[-2:] = [last._replace(r1=v.r1)]
                return
            if (last.r1, last.c0, last.c1) == (v.r0, v.c0, v.c1):
                blocks[-1] = last._replace(r1=v.r1)
                return
        blocks.append(v)

    def arguments(self, v: Block) -> dict[str, Any]:
        """Return the options of one call."""
        i0, i1, j0, j1 = v.box
        origin = None if v.mask and self.joins else Origin(i0, j0, self.head, self.heads)
        mask = v.mask
        if mask is None:
            cut = intersect(tuple(part for one in self.mask.parts for part in self.cut(one, v)))
            mask = cut & self.band(i0, i1, j0, j1)
        score = tuple([self.cut_bias(one, v) if isinstance(one, Bias) else one for one in self.score])
        return self.options | {"mask": mask, "score": score, "origin": origin}

    def band(self, i0: int, i1: int, j0: int, j1: int) -> Mask:
        """Return what Causal and Window parts say in a box, of whose last corner they show something."""
        lo, hi = self.reach.lo, self.reach.hi
        left = None if lo is None or j0 - (i1 - 1) >= lo else (j1 - i1) - lo
        right = None if hi is None or j1 - 1 - i0 <= hi else hi - (j1 - i1)
        if left is None and right is None:
            return Full()
        return Causal() if left is None and right == 0 else Window(left, right)

    @singledispatchmethod
    def cut(self, part: Mask, v: Block) -> tuple[Mask, ...]:
        """Return one part of the mask in a box. Padding (lengths) and Prefix follow from the call's place."""
        return (part,)

    @cut.register(Causal)
    @cut.register(Window)
    def _(self, part: Mask, v: Block) -> tuple[Mask, ...]:
        return ()

    @cut.register
    def _(self, part: Documents, v: Block) -> tuple[Mask, ...]:
        i0, i1, j0, j1 = v.box
        return (Documents(part.q_ids[:, i0:i1].contiguous(), part.k_ids[:, j0:j1].contiguous()),)

    @cut.register
    def _(self, part: PaddingKeys, v: Block) -> tuple[Mask, ...]:
        return (PaddingKeys(part.real[:, v.box[2] : v.box[3]]),)

    @cut.register
    def _(self, part: Spans, v: Block) -> tuple[Mask, ...]:
        i0, i1, j0, j1 = v.box
        return (Spans(*((ends[:, i0:i1] - j0).clamp(0, j1 - j0) for ends in part.tensors)),)

    @cut.register
    def _(self, part: Dense, v: Block) -> tuple[Mask, ...]:
        return (Dense(sliced(part.seen, v)),)

    def cut_bias(self, bias: Bias, v: Block) -> Bias:
        """Return a bias in a box; if it wants a gradient, as a leaf."""
        part = sliced(bias.bias.detach(), v)
        return Bias(part.requires_grad_() if bias.bias.requires_grad else part)


def shards_of(
    plan: str, N: int, pieces: tuple[Pieces, ...], own: int, mask: Mask, score: tuple[Score, ...],
    options: dict[str, Any], head: int, heads: int | None, q: Tensor, numbers: Numbers | None = None,
) -> Shards:  # fmt: skip
    """Return the problem in pieces. "ring" needs the numbers of the mask, and reads them unless they are given."""
    if plan != "ring":
        numbers = held(intersect(tuple([part for part in mask.parts if not part.captures])))
    elif numbers is None:
        numbers = held(mask)
    found = reach(numbers, len(mask.parts), N)
    s = Shards(pieces, own, found, mask, score, options, head, heads, q.shape[0], q.device)
    s.known = _known(pieces, numbers, plan, N, (s.joins, bool(options.get("dropout")), s.batch, s.device, found.exact))
    return s


@lru_cache(16)
def _known(pieces: Any, numbers: Numbers, plan: str, N: int, options: Any) -> dict[Any, Any]:
    """Return the calls of each pair of ranks, as far as they are known."""
    return {}


def sliced(x: Tensor, v: Block) -> Tensor:
    """Return a tensor's part, whose rows are the rank's and whose columns are the whole's, where it has more than 1."""
    rows = slice(v.r0, v.r1) if x.ndim > 1 and x.shape[-2] > 1 else slice(None)
    columns = slice(v.box[2], v.box[3]) if x.ndim > 0 and x.shape[-1] > 1 else slice(None)
    return x[..., rows, columns] if x.ndim > 1 else x[columns] if x.ndim else x


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which parts are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward_parts(s: Shards, sums: tuple[Tensor, Tensor], q: Tensor, keys: tuple[Tensor, ...], parts: Parts) -> None:
    """Compute a rank's calls over some keys, and fold them into (o, lse), in place."""
    for v in parts.blocks:
        k, x = (t[:, v.c0 : v.c1] for t in keys)
        given = s.arguments(v) | {"return_lse": True, "out_dtype": wide(q.dtype)}
        o, lse = attention(q[:, v.r0 : v.r1], k, x, **given)
        fold(sums[0][:, v.r0 : v.r1], sums[1][:, :, v.r0 : v.r1], o, lse)


def fold(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join a part of the keys into o (B, M, H, D) and lse (B, H, M), in place."""
    if o.is_cuda:
        merge([(part, part_lse)], into=(o, lse))
        return
    joined = torch.logaddexp(lse, part_lse)
    seen = joined.masked_fill(joined == -torch.inf, 0.0)
    keep, take = (torch.exp(x - seen).transpose(1, 2)[..., None] for x in (lse, part_lse))
    o.mul_(keep).add_(part * take)
    lse.copy_(joined)


class Given(NamedTuple):
    """What every part's backward reads: do in q's type, lse of the whole, delta = rowsum(do * o) - dlse."""

    do: Tensor
    o: Tensor
    lse: Tensor
    delta: Tensor


def backward_parts(
    s: Shards, g: Given, q: Tensor, keys: tuple[Tensor, ...], parts: Parts, dq: Tensor, learned: dict[int, Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of some keys, (dk, dv), in the type of sums, of a rank's calls over them; () without keys.

    Those of queries are added to `dq`, and of biases to `learned`.
    """
    sums: tuple[Tensor, ...] = ()
    for v in parts.blocks:
        rows, columns = slice(v.r0, v.r1), slice(v.c0, v.c1)
        given = s.arguments(v)
        k, x = (t[:, columns] for t in keys)
        lse, delta = (t[:, :, rows].contiguous() for t in (g.lse, g.delta))
        found = attention_backward(
            g.do[:, rows], q[:, rows], k, x, g.o[:, rows], lse, delta=delta, out_dtype=wide(q.dtype), **given
        )
        dq[:, rows] += found[0]
        if not sums and k.shape == keys[0].shape:
            sums = tuple(found[1:3])  # a call with all keys begins the sums
        else:
            sums = sums or tuple(torch.zeros_like(t, dtype=dq.dtype) for t in keys)
            for total, part in zip(sums, found[1:3], strict=True):
                total[:, columns] += part
        of_biases = iter(found[3:])
        for n, score in enumerate(given["score"]):
            if isinstance(score, Bias) and score.bias.requires_grad:
                total = sliced(learned[n], v)
                total += next(of_biases)
    return sums


def joined(pieces: tuple[Pieces, ...], inner: int) -> tuple[Pieces, ...]:
    """Return what every `inner` ranks in a row hold in common, sorted."""
    groups = (pieces[x : x + inner] for x in range(0, len(pieces), inner))
    return tuple(join(sorted(piece for own in group for piece in own)) for group in groups)


def rows_of(pieces: tuple[Pieces, ...]) -> list[int]:
    """Return how many rows every rank holds."""
    return [length(own) for own in pieces]
