"""PyTorch's FlexAttention on tilewise: the names of torch.nn.attention.flex_attention, with their arguments.

    from tilewise.compat.flex import create_block_mask, flex_attention

A mask_mod becomes a Mask and a score_mod a Score, see `Mask.of` and `Score.of`. A BlockMask keeps its function and
lists no blocks, so that making one takes no time and memory of queries times keys. No torch.compile is needed.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.functional import pad

from ..attention.api import FULL, attention
from ..values.masks import Mask
from ..values.score import Score

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "FlexKernelOptions", "and_masks", "create_block_mask", "create_mask",
    "flex_attention", "noop_mask", "or_masks",
]  # fmt: skip

Mod = Callable[..., Any]
Size = int | tuple[int, int]


class BlockMask:
    """A mask_mod, and the lengths that it is for.

    Attributes:
        mask: the Mask that attention gets.
        seq_lengths: of queries and of keys; may be set.
        BLOCK_SIZE: rows and keys of a block, for `to_dense`, slices and lists of blocks.
        lists: int32 (B, H, blocks of rows, width), the blocks of keys that rows see, -1 for none: first those that
            mask_mod cuts, then those that are seen whole. Empty where `create_block_mask` made the mask.
    """

    def __init__(
        self, mask_mod: Mod, shape: tuple[int, int, int, int], BLOCK_SIZE: Size, lists: tuple[Tensor, ...] = ()
    ) -> None:
        self.heads, self.seq_lengths, self.lists = shape[:2], shape[2:], lists
        self.BLOCK_SIZE = both(BLOCK_SIZE)
        self.mask_mod = mask_mod

    @classmethod
    def from_kv_blocks(
        cls, kv_num_blocks: Tensor, kv_indices: Tensor, full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None, BLOCK_SIZE: Size = 128, mask_mod: Mod | None = None,
        seq_lengths: tuple[int, int] | None = None, compute_q_blocks: bool = True, *,
        dq_write_order: Tensor | None = None, dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> "BlockMask":  # fmt: skip
        """Return a mask of listed blocks: mask_mod decides within those of the first list, full ones are seen whole.

        compute_q_blocks and dq_* describe schedules of PyTorch's kernels, and are ignored.

        Args:
            kv_num_blocks: whole numbers (B or 1, H or 1, blocks of rows), how many blocks of keys these rows see.
            kv_indices: whole numbers (B or 1, H or 1, blocks of rows, width), which ones, in any order.
            full_kv_num_blocks, full_kv_indices: the same of other blocks, of which every entry is seen.
            BLOCK_SIZE: rows and keys of a block, or one number for both.
            mask_mod: a function of (b, h, q_idx, kv_idx); None shows whole blocks.
            seq_lengths: of queries and keys; None for as many blocks of both as kv_indices has rows and columns.

        Raises TypeError or ValueError for tensors that do not fit.
        """
        rows, keys = both(BLOCK_SIZE)
        lists = [list_of("kv_indices", kv_num_blocks, kv_indices)]
        if full_kv_indices is not None or full_kv_num_blocks is not None:
            lists.append(list_of("full_kv_indices", full_kv_num_blocks, full_kv_indices))
        B, H, R, width = lists[0].shape
        M, N = seq_lengths or (R * rows, width * keys)
        if -(-M // rows) > R:
            raise ValueError(
                f"kv_indices must have a row for each of {-(-M // rows)} blocks of {rows} queries, got {R}; give all"
            )
        return cls(mask_mod or noop_mask, (B, H, M, N), (rows, keys), tuple(lists))

    @classmethod
    def of(cls, theirs: Any) -> "BlockMask":
        """Return PyTorch's BlockMask as one of tilewise, with its lists, which say what its kernels compute.

        `flex_attention` does this in each call. Do it once where a mask serves many.
        """
        if isinstance(theirs, cls):
            return theirs
        if not hasattr(theirs, "kv_indices"):
            raise TypeError(
                f"block_mask must be a BlockMask or a Mask, got {type(theirs).__name__}; write "
                "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
            )
        full = theirs.full_kv_num_blocks, theirs.full_kv_indices
        size, lengths = theirs.BLOCK_SIZE, theirs.seq_lengths
        return cls.from_kv_blocks(theirs.kv_num_blocks, theirs.kv_indices, *full, size, theirs.mask_mod, lengths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (B, H, M, N); B and H are 1 where they were None."""
        return (*self.heads, *self.seq_lengths)

    @property
    def mask_mod(self) -> Mod:
        """Return the function of (b, h, q_idx, kv_idx). It is traced when it is set."""
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, mask_mod: Mod) -> None:
        self._mask_mod, seen = mask_mod, Mask.of(mask_mod)
        for partial in self.lists[:1]:
            seen = listed(partial, self) & seen
        for full in self.lists[1:]:
            seen = seen | listed(full, self)
        self.mask: Mask = seen

    def __getitem__(self, index: Any) -> "BlockMask":
        """Return the mask of some batch entries, heads and blocks of rows, by indices of these three dimensions.

        Batch entries and heads of a mask that has one for all stay as they are. All indices count from 0 anew.
        """
        mod, (rows, _), (B, H, M, N) = self.mask_mod, self.BLOCK_SIZE, self.shape
        index = (*(index if isinstance(index, tuple) else (index,)), slice(None), slice(None), slice(None))
        kept, lists = [], list(self.lists)
        for dim, size in enumerate((B, H, -(-M // rows))):
            one = slice(index[dim], index[dim] + 1 or None) if isinstance(index[dim], int) else index[dim]
            kept.append(torch.arange(size, device=self.device)[one].reshape(-1))
            lists = [own.index_select(dim, kept[dim]) if own.shape[dim] == size else own for own in lists]
        of_b, of_h, of_rows = kept

        def sliced(b: Any, h: Any, i: Any, j: Any) -> Any:
            return mod(of_b[b] if B > 1 else b, of_h[h] if H > 1 else h, of_rows[i // rows] * rows + i % rows, j)

        shape = len(of_b), len(of_h), min(len(of_rows) * rows, M), N
        return BlockMask(sliced, shape, self.BLOCK_SIZE, tuple(lists))

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors that mask_mod captures, the CPU if there are none."""
        return next((t.device for part in self.mask.parts for t in part.tensors), torch.device("cpu"))

    def to(self, device: torch.device | str) -> "BlockMask":
        """Return the mask with its tensors on a device."""
        moved = copy(self)
        moved.mask, moved.lists = self.mask.to(device), tuple([own.to(device) for own in self.lists])
        return moved

    def to_dense(self) -> Tensor:
        """Return int32 (B, H, blocks of rows, blocks of keys), 1 where a query of a block sees a key.

        Every entry of the mask is computed, in memory of queries times keys.
        """
        (rows, keys), (B, H, M, N) = self.BLOCK_SIZE, self.shape
        seen = pad(self.mask.dense(M, N, B, H).expand(B, H, M, N), (0, -N % keys, 0, -M % rows))
        return seen.unflatten(3, (-1, keys)).unflatten(2, (-1, rows)).any(5).any(3).int()

    def sparsity(self) -> float:
        """Return how many of a hundred blocks no query sees, from `to_dense`."""
        return 100.0 * (1.0 - self.to_dense().float().mean().item())

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask={self.mask!r})"


def both(size: Size) -> tuple[int, int]:
    """Return the rows and the keys of a block."""
    rows, keys = (size, size) if isinstance(size, int) else size
    return rows, keys


def list_of(name: str, counts: Any, indices: Any) -> Tensor:
    """Return the blocks of each row as int32 (B, H, blocks of rows, width), -1 for none."""
    if not (isinstance(counts, Tensor) and isinstance(indices, Tensor)):
        got = f"{type(counts).__name__} and {type(indices).__name__}"
        raise TypeError(f"{name} and its num_blocks must be tensors, got {got}; pass both")
    if not 2 <= indices.ndim <= 4 or indices.shape[:-1] != counts.shape:
        raise ValueError(
            f"{name} must have shape (B, H, blocks of rows, width), and its num_blocks the first three of these, got "
            f"{tuple(indices.shape)} and {tuple(counts.shape)}; reshape them"
        )
    counted = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return indices.int().masked_fill(~counted, -1)[(None,) * (4 - indices.ndim)]


def listed(lists: Tensor, of: BlockMask) -> Mask:
    """Return the mask of listed blocks, by a table of all blocks."""
    (B, H, R, _), (rows, keys) = lists.shape, of.BLOCK_SIZE
    columns = -(-of.seq_lengths[1] // keys)
    table = lists.new_zeros(B, H, R, columns + 1, dtype=torch.bool)  # the last column is for -1
    table.scatter_(3, lists.masked_fill(lists < 0, columns).long(), True)
    return Mask.of(lambda b, h, i, j: table[b if B > 1 else 0, h if H > 1 else 0, i // rows, j // keys])


def create_block_mask(
    mask_mod: Mod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None, BLOCK_SIZE: Size = 128,
    _compile: bool = False, separate_full_blocks: bool = True, compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """Return the mask of a function fn(b, h, q_idx, kv_idx), which is traced at once; nothing is computed.

    The function sees every batch entry and head, also where B or H is None or 1. Tensors that it closes over lie on q's
    device. Of the arguments after KV_LEN, which are PyTorch's, only BLOCK_SIZE is used.

    Raises TypeError or ValueError as `Mask.of`.
    """
    return BlockMask(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), BLOCK_SIZE)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | Score | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None, *, return_aux: AuxRequest | None = None,
) -> Any:  # fmt: skip
    """Compute attention with a score_mod and a block_mask, as PyTorch's flex_attention does.

    Args:
        query: (B, H, M, D). Types and head sizes are those of `attention`.
        key: (B or 1, H_k, N, D).
        value: (B or 1, H_k, N, D_v).
        score_mod: a function fn(score, b, h, q_idx, kv_idx), traced in each call, or a Score, which torch.compile with
            fullgraph needs. Floating tensors that it captures get gradients.
        block_mask: a BlockMask, PyTorch's too, for M queries and N keys; or a Mask.
        scale: factor on the logits before score_mod; default D ** -0.5.
        enable_gqa: allow H to be a multiple of H_k.
        return_lse: also return lse (B, H, M), natural log, fp32 or for fp64 fp64; differentiable.
        kernel_options: ignored.
        return_aux: an AuxRequest of lse, for (output, AuxOutput). max_scores is refused.

    Returns:
        The output (B, H, M, D_v) in query's type, a transposed view of (B, M, H, D_v); with lse or an AuxOutput if
        asked for. Rows that see no key have an output of 0 and lse = -inf.

    Raises:
        TypeError, ValueError: as `attention`; a mask for other lengths; return_aux with max_scores or return_lse.
    """
    if return_aux is not None and (return_lse or return_aux.max_scores):
        got = "return_lse=True" if return_lse else "max_scores=True"
        raise ValueError(f"return_aux must ask for lse alone, got {got}; write return_aux=AuxRequest(lse=True)")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (B, H, length, head size), got {tuple(x.shape)}; reshape it")
    (B, H, M, _), (B_k, H_k, N, _) = query.shape, key.shape
    if H != H_k and not enable_gqa:
        raise ValueError(f"key must have {H} heads as query has, got {H_k}; pass enable_gqa=True to share them")
    mask: Mask = FULL if block_mask is None else block_mask
    if not isinstance(mask, Mask):
        block_mask = BlockMask.of(block_mask)
        if tuple(block_mask.seq_lengths) != (M, N):
            raise ValueError(
                f"block_mask must be for {M} queries and {N} keys, got one for {tuple(block_mask.seq_lengths)}; "
                "make another one with create_block_mask, which computes nothing"
            )
        mask = block_mask.mask
    q, k, v = [(x.expand(B, -1, -1, -1) if B_k == 1 else x).transpose(1, 2) for x in (query, key, value)]
    lse = return_lse or (return_aux is not None and return_aux.lse)
    score = () if score_mod is None else score_mod
    found: Any = attention(q, k, v, mask=mask, score=score, scale=scale, return_lse=lse)
    o, L = found if lse else (found, None)
    o = o.transpose(1, 2)
    if return_aux is not None:
        return o, AuxOutput(lse=L)
    return (o, L) if lse else o
