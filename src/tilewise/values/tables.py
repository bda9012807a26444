"""Masks that are read from tables: documents, and any bool tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .function import read
from .masks import Mask
from .value import AS_WIDE, INTEGER_TYPES, check_ranks, check_type


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Show a query the keys with its document id; tiles without a match are skipped.

    q_ids: (B, M) and k_ids: (B, N), int32 or int64. Raises TypeError or ValueError for other types or shapes.
    """

    q_ids: Tensor
    k_ids: Tensor
    captures = ("q_ids", "k_ids")
    shapes = ("BM", "BN")
    interval = False
    varlen = False
    not_cached = "its key ids would need an entry for every row of the cache's capacity"
    align = "first"

    @staticmethod
    def rule(b, h, i, j, q_ids, k_ids):
        return q_ids[b, i] == k_ids[b, j]

    def __post_init__(self) -> None:
        for name in self.captures:
            ids = getattr(self, name)
            check_type(f"Documents: {name}", ids, INTEGER_TYPES, "int32 or int64")
            check_ranks(f"Documents: {name}", ids, (2,), "have shape (B, length)", "give each batch entry a row of ids")


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Apply any boolean mask, true where the query sees the key; tiles without a true entry are skipped.

    seen: bool, broadcast to (B, H, M, N). Raises TypeError or ValueError for other types or more dimensions.
    """

    seen: Tensor
    captures = ("seen",)
    shapes = ("BHMN",)
    broadcasts = True
    interval = False
    varlen = False
    not_cached = AS_WIDE
    align = "first"

    @staticmethod
    def rule(b, h, i, j, seen):
        return read(seen, b, h, i, j)

    def __post_init__(self) -> None:
        check_type("Dense: seen", self.seen, (torch.bool,), "bool")
        check_ranks(
            "Dense: seen", self.seen, range(5), "broadcast to (B, H, M, N)", "reshape it to 4 dimensions or fewer"
        )
