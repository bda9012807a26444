"""A problem as its ranks see it: for each pair of ranks, which keys travel and which calls compute them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..attention.api import attention, attention_backward
from ..merge.api import merge
from ..values.intervals import Causal, Padding, Prefix, Spans, Window
from ..values.masks import Full, Mask, intersect
from ..values.of import MaskOf
from ..values.origin import Origin
from ..values.score import Bias, Score
from ..values.tables import Dense, Documents
from ..values.value import Value
from .held import Numbers, held
from .pieces import Box, Piece, Pieces, index, join, length
from .reach import Reach, reach

V = TypeVar("V", bound=Value)
ROWS, KEYS = 16, 64
"""Multiples at which a part's dropout must begin, for kernels."""
CUT = Causal, Window, Dense, Documents, Padding, Prefix, Spans, MaskOf
"""Masks that `Shards` can cut to some rows and keys, or that follow from a call's place."""
READING = "ring", "halo"
"""Plans that read the mask's numbers, to find what travels."""
FEW = 3
"""So many calls of bands has a rank of Zigzag with its own keys; more become one call of Spans."""


class Block(NamedTuple):
    """One call: rows of a rank, keys of a buffer, and what they are in the whole."""

    rows: slice
    keys: slice
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
    place in `pieces` and in `axis`, the group. `head` and `heads` say which heads of the whole these are.
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
    plan: str = "ring"
    axis: Any = None
    made: dict[tuple[int, int | None], Parts] = field(default_factory=dict)
    """What `pair` has found."""

    @property
    def learned(self) -> list[tuple[Tensor, bool]]:
        """Return the tensors of scores that have gradients, each with whether a call reads its part alone of it."""
        return [(t, one.broadcasts) for one in self.score if one.learns for t in one.tensors]

    def pair(self, to: int, source: int | None) -> Parts:
        """Return what rank `to` does with the keys of rank `source`, or if that is None with all that its rows see."""
        if (to, source) not in self.made:
            keys = self.seen(to) if source is None else self.pieces[source]
            self.made[to, source] = self.parts(self.pieces[to], keys)
        return self.made[to, source]

    def seen(self, to: int) -> Pieces:
        """Return the keys that a rank's rows may see: those of each of its pieces lie in one piece of them."""
        boxes = [self.box(rows, (0, self.reach.N)) for rows in self.pieces[to]]
        return join(sorted(box[2:] for box in boxes if box is not None))

    def parts(self, rows: Pieces, keys: Pieces) -> Parts:
        """Return the keys, of some, that rows see, and the calls that compute them."""
        boxes = [[self.box(a, b) for b in keys] for a in rows]
        hulls = [self.hull(column) for column in zip(*boxes, strict=True)]
        blocks: list[Block] = []
        r = 0
        for (a0, a1), row in zip(rows, boxes, strict=True):
            c = 0
            for box, hull in zip(row, hulls, strict=True):
                if box is not None and hull is not None:
                    i0, i1, j0, j1 = box
                    at = slice(r + i0 - a0, r + i1 - a0), slice(c + j0 - hull[0], c + j1 - hull[0])
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
        visible = (lo < hi).any(0).nonzero()
        if not len(visible):  # boxes span the rows between those that see something
            return Parts((), ())
        r0, r1 = int(visible[0]), int(visible[-1]) + 1
        spans = Spans(*(end[:, r0:r1].expand(self.batch, -1).int().contiguous().to(self.device) for end in (lo, hi)))
        box = int(at[r0]), int(at[r1 - 1]) + 1, keys[0][0], keys[-1][1]
        return Parts(keys, (Block(slice(r0, r1), slice(0, length(keys)), box, spans),))

    def box(self, rows: Piece, keys: Piece) -> Box | None:
        """Return what rows see of keys; with dropout it begins at multiples that kernels take, where pieces do."""
        box = self.reach.box(rows, keys)
        if box is None or not self.options.get("dropout"):
            return box
        i0, i1, j0, j1 = box
        return max(rows[0], i0 // ROWS * ROWS), i1, max(keys[0], j0 // KEYS * KEYS), j1

    @staticmethod
    def hull(boxes: Iterable[Box | None]) -> Piece | None:
        """Return the keys that all boxes span."""
        found = [box for box in boxes if box is not None]
        return (min(box[2] for box in found), max(box[3] for box in found)) if found else None

    @property
    def joins(self) -> bool:
        """Tell whether wholly visible boxes may be one call wherever they lie in the whole."""
        placed = any([score.positional for score in self.score])
        return not (placed or self.options.get("dropout"))

    def add(self, blocks: list[Block], v: Block) -> None:
        """Append a call, or extend the last one by it: keys after keys, rows below rows."""
        if blocks and self.joins and blocks[-1].mask and v.mask:
            last = blocks[-1]
            if last.rows == v.rows and last.keys.stop == v.keys.start:
                blocks.pop()
                wider = last._replace(keys=slice(last.keys.start, v.keys.stop))
                self.add(blocks, wider)  # which may be below the one before
                return
            if last.keys == v.keys and last.rows.stop == v.rows.start:
                blocks[-1] = last._replace(rows=slice(last.rows.start, v.rows.stop))
                return
        blocks.append(v)

    def arguments(self, v: Block) -> dict[str, Any]:
        """Return the options of one call."""
        i0, _, j0, _ = v.box
        origin = None if v.mask and self.joins else Origin(i0, j0, self.head, self.heads)
        mask = v.mask
        if mask is None:
            parts = [cut_mask(part, v) for part in self.mask.parts if not isinstance(part, (Causal, Window))]
            mask = intersect((*parts, *self.band(*v.box).parts))
        score = tuple([cut_bias(one, v) if isinstance(one, Bias) else one for one in self.score])
        return self.options | {"mask": mask, "score": score, "origin": origin}

    def band(self, i0: int, i1: int, j0: int, j1: int) -> Mask:
        """Return what Causal and Window parts say in a box, of whose last corner they show something."""
        lo, hi = self.reach.lo, self.reach.hi
        left = None if j0 - (i1 - 1) >= lo else (j1 - i1) - lo
        right = None if j1 - 1 - i0 <= hi else hi - (j1 - i1)
        if left is None and right is None:
            return Full()
        return Causal() if left is None and right == 0 else Window(left, right)


def cut_mask(part: Mask, v: Block) -> Mask:
    """Return a part of the mask in a box. Padding (lengths), Prefix and functions follow from the call's place."""
    i0, i1, j0, j1 = v.box
    found = cut(part, M=v.rows if part.broadcasts else slice(i0, i1), N=slice(j0, j1))
    return Spans(*((ends - j0).clamp(0, j1 - j0) for ends in found.tensors)) if isinstance(found, Spans) else found


def cut_bias(bias: Bias, v: Block) -> Bias:
    """Return a bias in a box; if it wants a gradient, as a leaf."""
    return Bias(in_block(bias.bias, v).detach().requires_grad_(bias.bias.requires_grad))


def in_block(x: Tensor, v: Block) -> Tensor:
    """Return the part of a tensor that broadcasts to (B, H, M, N), whose rows are the rank's."""
    return cut_tensor(x, "BHMN", M=v.rows, N=slice(*v.box[2:]))


def cut(value: V, **part: slice) -> V:
    """Return a mask or score for some rows ("M") or keys ("N"); differentiable."""
    if not any(size in shape for shape in value.shapes for size in part):
        return value
    tensors = [cut_tensor(t, shape, **part) for t, shape in zip(value.tensors, value.shapes, strict=True)]
    return value.rebuild(value.plain[1:], tuple(tensors))


def cut_tensor(t: Tensor, shape: str, **part: slice) -> Tensor:
    """Return a part of a tensor whose last dimensions `shape` names; those of one entry stay."""
    every, names = slice(None), shape[len(shape) - t.ndim :]
    return t[tuple([part.get(name, every) if size > 1 else every for name, size in zip(names, t.shape, strict=True)])]


def shards_of(
    axis: Any, plan: str, N: int, pieces: tuple[Pieces, ...], own: int, head: int, heads: int | None, mask: Mask,
    score: tuple[Score, ...], options: dict[str, Any], q: Tensor, numbers: Numbers | None = None,
) -> Shards:  # fmt: skip
    """Return the problem in pieces. Plans of READING read the numbers of the mask, unless they are given."""
    if plan not in READING:
        numbers = held(intersect(tuple([part for part in mask.parts if not part.captures])))
    elif numbers is None:
        numbers = held(mask)
    found = reach(numbers, len(mask.parts), N, q.shape[0], heads or q.shape[2])
    s = Shards(pieces, own, found, mask, score, options, head, heads, q.shape[0], q.device, plan, axis)
    same = s.joins, bool(options.get("dropout")), s.batch, s.device, found.exact, heads or q.shape[2]
    s.made = _made(pieces, numbers, plan, N, same)
    return s


@lru_cache(16)
def _made(pieces: Any, numbers: Numbers, plan: str, N: int, options: Any) -> dict[Any, Any]:
    """Return the calls of each pair of ranks, as far as they were made."""
    return {}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which parts are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward_parts(s: Shards, sums: tuple[Tensor, Tensor], q: Tensor, keys: tuple[Tensor, ...], parts: Parts) -> None:
    """Compute a rank's calls over some keys, and fold them into (o, lse), in place."""
    for v in parts.blocks:
        k, x = (t[:, v.keys] for t in keys)
        given = s.arguments(v) | {"return_lse": True, "out_dtype": wide(q.dtype)}
        o, lse = attention(q[:, v.rows], k, x, **given)
        merge([(o, lse)], into=(sums[0][:, v.rows], sums[1][:, :, v.rows]))  # type: ignore[list-item]


def forward_at_once(
    s: Shards, nothing: Callable[[], tuple[Tensor, Tensor]], q: Tensor, keys: tuple[Tensor, ...], parts: Parts,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (o, lse) of a rank's calls, where no row is in two of them: nothing is merged, and o is in q's type.

    nothing: makes (o, lse) of rows that see no keys.
    """
    found = None
    for v in parts.blocks:
        k, x = (t[:, v.keys] for t in keys)
        o, lse = attention(q[:, v.rows], k, x, sink=sink, return_lse=True, **s.arguments(v))
        if o.shape[1] == q.shape[1]:
            return o, lse  # type: ignore[return-value]
        found = found or nothing()
        found[0][:, v.rows], found[1][:, :, v.rows] = o, lse
    return found or nothing()


class Given(NamedTuple):
    """What every part's backward reads: do and o in q's type, lse and dlse of the whole."""

    do: Tensor
    o: Tensor
    lse: Tensor
    dlse: Tensor | None


def backward_parts(
    s: Shards,
    g: Given,
    q: Tensor,
    keys: tuple[Tensor, ...],
    parts: Parts,
    dq: Tensor | None,
    learned: Sequence[tuple[Tensor, bool]],
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Return dq with what a rank's calls over some keys add to it, and the gradients of these keys, (dk, dv), or ().

    All are in the type of sums. Gradients of `s.learned` that want one are added to `learned`.
    """
    sums: list[Tensor | None] = [None, None]
    for v in parts.blocks:
        k, x = (t[:, v.keys] for t in keys)
        do, o = (t[:, v.rows] for t in (g.do, g.o))
        lse, dlse = (None if t is None else t[:, :, v.rows].contiguous() for t in (g.lse, g.dlse))
        given = s.arguments(v) | {"dlse": dlse, "out_dtype": wide(q.dtype)}
        found = attention_backward(do, q[:, v.rows], k, x, o, lse, **given)  # type: ignore[arg-type]
        dq = added(dq, found[0], v.rows, q)
        sums = [added(*each, v.keys, t) for *each, t in zip(sums, found[1:3], keys, strict=True)]
        for (total, cuts), grad in zip(learned, found[3:], strict=True):
            (in_block(total, v) if cuts else total).add_(grad)
    return dq, tuple(total for total in sums if total is not None)


def added(total: Tensor | None, part: Tensor, at: slice, like: Tensor) -> Tensor:
    """Return a sum of gradients of `like` with a part of its rows added; one of all rows begins it."""
    if total is None:
        if part.shape == like.shape:
            return part
        total = part.new_zeros(like.shape)
    total[:, at] += part
    return total
