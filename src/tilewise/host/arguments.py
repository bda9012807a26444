"""Tensors, layouts and dropout as kernel arguments."""

from typing import Any

import torch
from torch import Tensor

from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem
from ..tile.cache import Batch, Scales
from ..tile.dropout import Counters, Dropout
from ..tile.rows import Output, Packed, Rows, Unused
from ..values.layout import Layout

NARROW = (16, 32)
"""Head sizes whose blocks have fewer than 64 columns in 16-bit types."""
TINY = 2.0**-126
"""Stands for a scale of 0, so that -inf times it is -inf; exp2(TINY) is still 1."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def odd(n: int) -> int:
    """Return a count as a kernel takes it inside a tuple: 2 n + 1. There Triton would make a constant of a 1, note
    multiples of 16, and compile again for each, whatever `do_not_specialize` says. So 0 stays 0, as half of it is."""
    return 2 * n + 1 if n else 0


def odd_counts(shape: Any) -> Any:
    """Return a kernel's `Shape` with every count made `odd`. Factors and functions stay as they are."""
    return type(shape)(*(odd(x) if isinstance(x, int) else x for x in shape))


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def sequences_in_line(B: int) -> int:
    """Return the length of a vector of B sequences: a power of two, the same for all small batches, which so share a
    kernel. A warp holds it."""
    return power_of_2(max(32, B))


def unplanned(saved: Saved, do: Tensor, dlse: Tensor | None) -> Any:
    """Return what a backward's kernels depend on beside its problem. lse and dlse are contiguous."""
    aligned = [None if t is None else t.data_ptr() % 16 == 0 for t in (do, saved.o, saved.lse, dlse)]
    return do.stride(), saved.o.stride(), *aligned


def with_contiguous_lse(saved: Saved, dlse: Tensor | None) -> tuple[Saved, Tensor | None]:
    """Return a forward's results and dlse, with lse and dlse contiguous."""
    dlse = None if dlse is None else dlse.contiguous()
    return saved if saved.lse.is_contiguous() else saved._replace(lse=saved.lse.contiguous()), dlse


def scale_of(p: Problem) -> float:
    """Return the factor that a kernel has yet to apply to its logits: the scale, or 1 where scores need scaled ones."""
    return 1.0 if p.recipe.score else max(p.scale, TINY)


def packed(p: Problem, x: Operands) -> Packed | None:
    """Return the layout's cu_seqlens as a kernel argument; where keys are in a cache, those of queries."""
    return packed_by(p, x.extra)


def packed_by(p: Problem, extra: tuple[Tensor, ...]) -> Packed | None:
    """Return the same, from the extra operands."""
    found = p.recipe.layout_of(extra).packed(p)
    if found is None:
        return None
    cu_q, cu_k, longest_q, longest_k = found
    return Packed(cu_q.contiguous(), cu_k.contiguous(), odd(longest_q), odd(longest_k))


def batch_of(p: Problem, x: Operands, least: int | None = None, most: int | None = None) -> Batch:
    """Return a cache as a kernel argument, for packed sequences of `least` to `most` queries."""
    return batch_from(p.recipe.layout_of(x.extra), p.B, p.M, p.queries, p.N, least, most)


def batch_from(layout: Layout, *sizes: int | None) -> Batch:
    """Return the tensors of a layout, and its sizes and bounds."""
    tensors = (layout.cu_q, layout.lengths, layout.starts, layout.index)
    cu_q, lengths, starts, index = (None if t is None else t.contiguous() for t in tensors)
    table = layout.table
    if table is not None and table.stride(-1) != 1:
        table = table.contiguous()
    width = 0 if table is None else odd(table.stride(0))
    given = [None if n is None else odd(n) for n in sizes]
    return Batch(cu_q, lengths, starts, index, table, width, *given)  # type: ignore[call-arg]


def scales_of(layout: Layout, B: int, H_k: int) -> Scales | None:
    """Return the scales of 8-bit keys and values of a cache's layout as a kernel argument."""
    k, v = layout.k_scale, layout.v_scale
    if k is None:
        return None
    (k_batch, k_head), (v_batch, v_head) = (t.expand(B, H_k).stride() for t in (k, v))
    return Scales(k, k_batch, k_head, v, v_batch, v_head)


def unused(p: Problem, saved: Saved | None = None, grads: Grads | None = None) -> Unused | None:
    """Return the tensors of which a kernel fills the rows outside all packed sequences: o and lse, or dq, dk and dv."""
    if p.layout.cu_q is None:
        return None
    of_queries, of_keys, lse = (), (), None
    if saved:
        of_queries, lse = (output(saved.o, p.H),), saved.lse
    elif grads:
        of_queries = (output(grads.q, p.H),)
        of_keys = output(grads.k, p.H_k), output(grads.v, p.H_k)
    return Unused(of_queries, of_keys, lse, *map(odd, (p.B, *lengths(p))))


def output(t: Tensor, heads: int) -> Output:
    """Return an output of packed sequences, whose unused rows are filled."""
    return Output(rows(t), odd(heads), odd(t.shape[-1]))


def dropout(p: Problem, seed: Tensor | None) -> Dropout | None:
    if seed is None:
        return None
    counters = Counters(*map(odd, p.origin.counters(p.H))) if p.recipe.origin else ()
    return Dropout(seed, p.dropout.threshold, p.dropout.rescale, counters)


def lengths(p: Problem) -> tuple[int, int]:
    """Return M and N as the kernels take them: for packed sequences, the total numbers of rows."""
    return p.q.shape[-3], p.sizes.keys


def rows(t: Tensor) -> Rows:
    """Return an operand (B, M, H, D), or packed (T, H, D), with its strides. The last must be 1 (see `adjacent`)."""
    *batch, row, head, _ = t.stride()
    return Rows(t, batch[0] if batch else 0, row, head)


def rows_of_lse(lse: Tensor) -> Rows:
    """Return lse (B, H, M) or (H, M) with its strides, as rows of one number that lie side by side."""
    lse = lse if lse.stride(-1) == 1 else lse.contiguous()
    return Rows(lse, lse.stride(0) if lse.ndim == 3 else 0, 1, lse.stride(-2))


def with_adjacent_rows(x: Operands) -> Operands:
    """Return the operands with q, k and v as the kernels can read them (see `adjacent`)."""
    return Operands(adjacent(x.q), adjacent(x.k), adjacent(x.v), x.extra)


def adjacent(t: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy where Triton 3.6 would miscompile the kernel (docs/internals/adr/0004).

    That happens if the last stride is not 1, or if narrow rows start off 16-byte boundaries. Triton then loads the
    tensor in a layout whose products read outside shared memory.
    """
    side_by_side = t.stride(-1) == 1 or t.shape[-1] == 1
    return t if side_by_side and not narrow_and_unaligned(t) else t.clone(memory_format=torch.contiguous_format)


def narrow_and_unaligned(t: Tensor) -> bool:
    """Tell whether rows may start off 16-byte boundaries, in blocks of fewer than 64 columns (`blocks.width`).

    The compiler knows of a stride only whether it is a multiple of 16.
    """
    if t.itemsize != 2 or t.shape[-1] not in NARROW:
        return False
    return t.data_ptr() % 16 != 0 or any([stride % 16 for stride in t.stride()[:-1]])
