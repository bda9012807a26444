"""Copy pages of a cache, in place: copy_pages_."""

import torch
from torch import Tensor

from ..call.check import check_pair, refuse_operands
from ..call.dispatch import CHECK, intercepted
from ..values.quantized import Quantized, without_scale
from ..values.value import INTEGER_TYPES, check_type


def copy_pages_(k: Tensor | Quantized, v: Tensor | Quantized, source: Tensor, target: Tensor) -> None:
    """Copy pages of a cache, in place: k[target] = k[source], and so v. All are read before any is written.

    Args:
        k, v: (pages, P, H_k, size), changed in place; they may share memory. Scales of Quantized stay as they are.
        source, target: int32 or int64 (n,), pages; no target may occur twice.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    k, v = without_scale(k), without_scale(v)
    refuse_operands(k=k, v=v)
    check_pair(k.shape, v.shape)
    for name, t in (("source", source), ("target", target)):
        check_type(f"copy_pages_: {name}", t, INTEGER_TYPES, "int32 or int64")
    if source.ndim != 1 or source.shape != target.shape:
        raise ValueError(
            f"copy_pages_: source and target must have one shape (n,), got {tuple(source.shape)} and "
            f"{tuple(target.shape)}; give each page one place"
        )
    if (CHECK or not k.is_cuda) and not intercepted((k, v, source, target)):
        _check_numbers(len(k), source, target)
    with torch.no_grad():
        caches = [t.view(torch.uint8) if t.itemsize == 1 else t for t in (k, v)]  # torch copies no 8-bit floats
        pages = [t.index_select(0, source) for t in caches]
        for t, copied in zip(caches, pages, strict=True):
            t.index_copy_(0, target.long(), copied)


def _check_numbers(pages: int, source: Tensor, target: Tensor) -> None:
    """Raise ValueError for pages that are not there, or a target that occurs twice."""
    for name, t in (("source", source), ("target", target)):
        if bool(((t < 0) | (t >= pages)).any()):
            raise ValueError(f"copy_pages_: {name} must hold pages in [0, {pages}), got {t.tolist()}; leave others out")
    if len(target.unique()) < len(target):
        raise ValueError(
            f"copy_pages_: target must hold each page once, got {target.tolist()}; leave out all copies but one"
        )
