"""Variants: options of a call beyond q, k, v and its mask, each compared with the call without it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from tilewise.values.intervals import Window
from tilewise.values.masks import Full, Mask
from tilewise.values.score import Alibi, Score, SoftCap

TILE = 128
"""Queries and keys of the tiles that `visited` counts."""
CUTS = (0, 3000, 3100, 8192, 9000, 16384)
"""Where five packed sequences begin and end; other totals are cut in these proportions."""
DOCUMENTS = (0, *accumulate(64 + 448 * (37 * n % 128) // 127 for n in range(128)))
"""Where 128 documents of 64 to 512 tokens begin and end, long and short ones mixed."""
FULL = Full()

Scores = Callable[[int, torch.device], tuple[Score, ...]]


@dataclass(frozen=True, eq=False)
class Variant:
    """One thing that a call asks for."""

    group: int = 1
    """Query heads that share a key head."""
    mask: Mask = FULL
    """What it hides besides what the case hides."""
    score: Scores = lambda heads, device: ()
    sink: bool = False
    """A sink that learns: its gradient belongs to the backward."""
    dropout: float = 0.0
    deterministic: bool = False
    queries: int = 0
    """Queries of each sequence, the last ones; 0: as many as keys."""
    values: int = 0
    """The head size of v; 0: that of q and k."""
    cuts: tuple[int, ...] = ()
    """The tokens of the batch as packed sequences, cut in these proportions; () is no packing."""
    padded: bool = False
    """The batch's sequences are of mixed lengths, with padding behind them."""
    full: bool = False
    """Whether it is measured without the causal mask as well."""

    @property
    def packed(self) -> bool:
        """Tell whether sequences are packed."""
        return bool(self.cuts)


def softcap(heads: int, device: torch.device) -> tuple[Score, ...]:
    """Return Gemma 2's soft cap.

    Logits of normal q and k stay far below 50, so leaving it out would only change rounding. The accuracy rule checks
    its numbers; the conformance tests check that it is there.
    """
    return (SoftCap(50.0),)


def alibi(heads: int, device: torch.device) -> tuple[Score, ...]:
    """Return the paper's slopes: 2^(-8 / H), 2^(-16 / H), ..., 2^-8."""
    return (Alibi(torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device))),)


VARIANTS = {
    "GQA 8": Variant(group=8),
    "GQA 4": Variant(group=4),
    "softcap": Variant(score=softcap),
    "ALiBi": Variant(score=alibi),
    "window 1024": Variant(mask=Window(1023, 0)),
    "sink": Variant(sink=True),
    "dropout 0.1": Variant(dropout=0.1),
    "deterministic": Variant(deterministic=True, full=True),
    "varlen": Variant(cuts=CUTS),
}
"""Every variant, by name."""
SHAPES = {
    "8 queries": Variant(queries=8),
    "GQA 4, one query": Variant(group=4, queries=1),
    "GQA 4, 2048 queries": Variant(group=4, queries=2048),
    "128 documents": Variant(cuts=DOCUMENTS),
    "padded": Variant(padded=True),
    "window 128": Variant(mask=Window(127, 0)),
    "GQA 8, sink, window 128": Variant(group=8, sink=True, mask=Window(127, 0)),
    "values of 128": Variant(values=128),
}
"""What cases ask for by themselves, and nobody compares with a call that does not."""
PLAIN = Variant()


def cut(tokens: int, cuts: tuple[int, ...] = CUTS) -> tuple[int, ...]:
    """Return lengths of packed sequences with this total of tokens."""
    ends = [tokens * end // cuts[-1] for end in cuts]
    return tuple(end - start for start, end in pairwise(ends))


def visited(mask: Mask, length: int) -> int:
    """Count the tiles of a sequence in which some query sees some key, for masks of one interval a row."""
    count = 0
    for first in range(0, length, TILE):
        last = min(first + TILE, length) - 1
        lo = max([0, *(part.keys(first)[0] for part in mask.parts)])
        hi = min([length, *(part.keys(last)[1] for part in mask.parts)])
        count += -(-hi // TILE) - lo // TILE
    return count
