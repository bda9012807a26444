"""How DTensors of q, k and v may be sharded, so that attention runs on each rank's part: by batch or by heads.

It is for the forward. Torch's `register_sharding` takes no operator that returns a list, as the gradient does. So
trainings give attention the local tensors (`to_local`, or `local_map`).
"""

from typing import Any

from ..import_hook import when_imported
from ..operator import OPERATORS

ROWS_OF_LSE = {0: 0, 2: 1}
"""The dimension of lse (B, H, M) that goes with one of q (B, M, H, D)."""


def placements(q: Any, k: Any, alone: bool) -> list[tuple[Any, Any]]:
    """Return how q and lse may lie: alike on every rank; and, with no other tensors, by batch, or by whole groups of
    heads."""
    from torch.distributed.tensor import Replicate, Shard

    found: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
    if not alone or len(q.shape) != 4:
        return found
    ranks = q.mesh.size()
    fits = {0: q.shape[0] % ranks == 0, 2: q.shape[2] % ranks == 0 and k.shape[2] % ranks == 0}
    return found + [(Shard(dim), Shard(ROWS_OF_LSE[dim])) for dim, even in fits.items() if even]


def forward(q: Any, k: Any, v: Any, extra: Any, seed: Any, *options: Any) -> list[Any]:
    """Return the shardings of outputs and inputs of attention. Masks with tensors, and dropout, are replicated."""
    if k is None:  # q, k and v in one tensor
        (row, values), *_ = placements(q, q, False)
        return [([row, values], [row, *[row] * len(extra)])]
    rows = placements(q, k, not extra and seed is None)
    of_seed = [] if seed is None else [rows[0][0]]
    return [([row, values], [row, row, row, *[row] * len(extra), *of_seed]) for row, values in rows]


def _register(module: Any) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(OPERATORS.attention.default)(forward)


when_imported("torch.distributed.tensor", _register)
