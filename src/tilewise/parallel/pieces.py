"""Pieces of a sequence: which rows a rank holds, as global intervals in local order."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

Piece = tuple[int, int]
Pieces = tuple[Piece, ...]
Box = tuple[int, int, int, int]
"""Rows i0:i1 and keys j0:j1 of the whole."""


def length(pieces: Pieces) -> int:
    """Return how many rows pieces hold."""
    return sum(end - start for start, end in pieces)


@lru_cache(64)
def spelt(pieces: tuple[Pieces, ...]) -> str:
    """Return every rank's pieces as text."""
    return str(pieces)


def join(pieces: Iterable[Piece]) -> Pieces:
    """Return pieces in order with those that touch or overlap made one, and empty ones left out."""
    out: list[Piece] = []
    for start, end in pieces:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif start < end:
            out.append((start, end))
    return tuple(out)


def joined(pieces: tuple[Pieces, ...], inner: int) -> tuple[Pieces, ...]:
    """Return what every `inner` ranks in a row hold in common, sorted."""
    groups = (pieces[x : x + inner] for x in range(0, len(pieces), inner))
    return tuple(join(sorted(piece for own in group for piece in own)) for group in groups)


def meet(a: Pieces, b: Pieces) -> Pieces:
    """Return where the pieces of two lists, each in order, overlap."""
    found, x, y = [], 0, 0
    while x < len(a) and y < len(b):
        start, end = max(a[x][0], b[y][0]), min(a[x][1], b[y][1])
        if start < end:
            found.append((start, end))
        x, y = (x + 1, y) if a[x][1] < b[y][1] else (x, y + 1)
    return tuple(found)


def index(pieces: Pieces, device: torch.device | str | None = None) -> Tensor:
    """Return the global positions of local rows, int64."""
    return torch.cat([torch.arange(start, end, device=device) for start, end in pieces or ((0, 0),)])


def places(pieces: Pieces, part: Pieces) -> list[slice]:
    """Return where global intervals `part` are in a buffer that holds `pieces`; each lies in one of them."""
    found, base = [], 0
    for start, end in pieces:
        found += [slice(base + a - start, base + b - start) for a, b in part if start <= a and b <= end]
        base += end - start
    return found
