"""Attention of DTensors sharded by batch or by heads: each rank computes its part, and its gradients.

Torch's own rules (`register_sharding`) take no operator that returns a list, as the gradient does, and know nothing of
dropout. So a call with DTensors becomes one of local tensors here, before any operator is called.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import operator
from ..import_hook import when_imported
from ..problem import KINDS, Recipe

ROWS_OF_LSE = {0: 0, 2: 1}
"""The dimension of lse (B, H, M) that goes with one of o (B, M, H, D)."""


def attend(x: Sequence[Any], seed: Any, recipe: Recipe, longest: tuple[int, int]) -> tuple[Any, Any]:
    """Return o and lse as DTensors, differentiable. Where q is sharded by batch or by whole groups of heads, all is.

    Other placements are replicated first. So are calls with a layout or with listed tiles. Plain tensors beside
    DTensors count as whole on every rank.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = next(t for t in x if isinstance(t, DTensor)).device_mesh
    q, k = x[0], x[0] if x[1] is None else x[1]
    heads = q.ndim - 2
    letters = {0: "B", heads: "H"}
    left, along, placements = {"B": q.shape[0], "H": k.shape[-2]}, [], []
    for n, placement in enumerate(q.placements if isinstance(q, DTensor) else ()):
        letter = letters.get(placement.dim % q.ndim) if isinstance(placement, Shard) else None
        if letter is None or not _divides(recipe) or left[letter] % mesh.size(n):
            letter = None
        else:
            left[letter] //= mesh.size(n)
        along.append(letter)
        placements.append(Replicate() if letter is None else Shard(0 if letter == "B" else heads))
    along = along or [None] * mesh.ndim

    def local(t: Any, dims: str) -> Any:
        """Return this rank's part of a tensor whose last dimensions are `dims`. Ranks that share it sum its gradient."""
        if t is None:
            return None
        dims = dims[len(dims) - t.ndim :]
        whole = [None if c is None or c not in dims or t.shape[dims.index(c)] == 1 else dims.index(c) for c in along]
        t = t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
        at = [Replicate() if dim is None else Shard(dim) for dim in whole]
        shared = [Partial() if c and dim is None else own for c, dim, own in zip(along, whole, at, strict=True)]
        return t.redistribute(mesh, at).to_local(grad_placements=shared)

    names = [shape for name, *_ in (*recipe.mask, *recipe.score) for shape in KINDS[name].shapes]
    names += ["H"] * recipe.sink + [""] * recipe.of_layout
    rows = "BM3HD" if x[1] is None else "BMHD"
    if recipe.layout:
        rows = rows[1:]
    own = [*(local(t, rows) for t in x[:3]), *(local(t, dims or "?" * t.ndim) for t, dims in zip(x[3:], names, strict=True))]
    seed = seed.to_local() if isinstance(seed, DTensor) else seed
    o, lse = operator.attend(own, seed, _placed(recipe, mesh, along, q.shape[0], q.shape[heads]), longest)
    of_o = [Shard(0 if p.dim == 0 else 2) if isinstance(p, Shard) else p for p in placements] or [Replicate()] * mesh.ndim
    of_lse = [Shard(ROWS_OF_LSE[p.dim]) if isinstance(p, Shard) else p for p in of_o]
    return tuple(DTensor.from_local(t, mesh, at, run_check=False) for t, at in ((o, of_o), (lse, of_lse)))  # type: ignore[return-value]


def _divides(recipe: Recipe) -> bool:
    """Tell whether parts of a call are calls: not those of packed sequences, nor with tiles listed for the whole."""
    return not recipe.layout and not any(name == "TileList" for name, *_ in recipe.mask)


def _placed(recipe: Recipe, mesh: Any, along: Sequence[str | None], B: int, H: int) -> Recipe:
    """Return the recipe of this rank's part: its dropout counts from the part's first batch entry and head."""
    if not recipe.dropout or not any(along):
        return recipe
    row, column, head, heads, batch = recipe.place or (0, 0, 0, H, 0)
    parts = {"B": B, "H": H}
    for n, letter in enumerate(along):
        if letter is not None:
            parts[letter] //= mesh.size(n)
            batch += parts["B"] * mesh.get_local_rank(n) if letter == "B" else 0
            head += parts["H"] * mesh.get_local_rank(n) if letter == "H" else 0
    return recipe._replace(place=(row, column, head, heads, batch))


def _register(module: Any) -> None:
    operator.BY_RANK[module.DTensor] = attend


when_imported("torch.distributed.tensor", _register)
