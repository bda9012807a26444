"""Masks as they were read: with tensors of their own on the host. What follows from them is saved by their numbers."""

import ctypes
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..call.dispatch import CHECK
from ..values.masks import Mask, intersect


@dataclass(frozen=True)
class Held:
    """A part of a mask as it was read. Equal numbers make equal values, in whatever tensors they came."""

    numbers: tuple[Any, ...]
    """The part's class and plain numbers, and a digest of each tensor."""
    part: Mask = field(compare=False)
    """The part itself, with its tensors on the host."""


Numbers = tuple[Held, ...]
"""A mask as it was read."""
RECENT: deque[tuple[Tensor, str]] = deque(maxlen=8)
"""Copies of the last tensors that were read, each with its digest: to compare takes less than to digest again."""


def fixed(mask: Mask) -> Mask:
    """Read a mask's tensors once, for every call with this mask: all layers of a model, and their backward.

    Plans "ring", "halo" and Grid find from a mask's numbers which keys travel, and read them in each call. plan=None
    counts them where the mask is fixed. The result is the same mask with copies of its tensors, so that what is written
    to the originals later does not reach it. Make it again for the next batch. It may be combined: `fixed(a) & b` is
    not read again where `b` has no tensors.
    """
    return intersect(tuple([_copied(part) if part.captures and part.held is None else part for part in mask.parts]))


def held(mask: Mask) -> Numbers:
    """Return a mask's numbers, read now unless `fixed` has read them. Reading synchronises with a GPU.

    Dense is left out: it holds rows of a rank alone, and says nothing of the whole.
    """
    return tuple([part.held or _read(part) for part in mask.parts if not part.broadcasts])


def checked(mask: Mask, N: int, needed: bool, near: Tensor) -> Numbers | None:
    """Return a mask's numbers where they are needed, once they are those of a mask of N keys; else None.

    Those of a GPU's tensors are read only then, or where TILEWISE_CHECK=1 asks for it. near: a tensor of the call.
    """
    if near.is_cuda and not (needed or CHECK):
        return None
    numbers = held(mask)
    _check(numbers, N)
    return numbers


@lru_cache(8)
def _check(numbers: Numbers, N: int) -> None:
    """Raise ValueError for numbers that are wrong, as the part says."""
    for one in numbers:
        one.part.check_contents(N, N)


def _copied(part: Mask) -> Mask:
    with torch.inference_mode(False):
        own = part.rebuild(part.plain[1:], tuple([t.clone() for t in part.tensors]))
    if not own.broadcasts:
        object.__setattr__(own, "held", _read(own))
    return own


def _read(part: Mask) -> Held:
    read: list[tuple[Tensor, str]] = []
    for n, t in enumerate(part.tensors):  # the ids of queries are often those of keys
        same = next((m for m in range(n) if part.tensors[m] is t), None)
        read.append(_copy_of(t) if same is None else read[same])
    on_host = part.rebuild(part.plain[1:], tuple([t for t, _ in read])) if read else part
    return Held((*part.plain, *[digest for _, digest in read]), on_host)


def _copy_of(t: Tensor) -> tuple[Tensor, str]:
    """Return a copy of a tensor on the host, and its digest: those of an equal one that was read before, if any."""
    now = t.detach().cpu()
    for found in tuple(RECENT):
        copy = found[0]
        if copy.dtype == now.dtype and torch.equal(copy, now):
            return found
    with torch.inference_mode(False):  # whatever mode reads it next
        copy = now.clone(memory_format=torch.contiguous_format)
    digest = sha256(f"{copy.dtype} {tuple(copy.shape)}".encode())
    if copy.numel():
        digest.update((ctypes.c_char * copy.nbytes).from_address(copy.data_ptr()))
    found = copy, digest.hexdigest()[:32]
    RECENT.appendleft(found)
    return found
