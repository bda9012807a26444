"""Attention of DTensors sharded by batch or by heads: each rank computes its part, and its gradients.

Torch's own rules (`register_sharding`) take no operator that returns a list, as the gradient does, and know nothing of
dropout. So a call with DTensors becomes one of local tensors here, before any operator is called.
"""

from collections.abc import Sequence
from typing import Any

from ..attention import eager
from ..call.calls import Call
from ..call.dispatch import BY_RANK
from ..call.import_hook import when_imported
from ..call.recipe import KINDS, Recipe
from ..values.function import Function
from ..values.origin import Origin

Along = list[str | None]
"""What each dimension of a mesh divides: "B", the batch, "H", whole groups of heads, or nothing."""


def attend(x: Sequence[Any], seed: Any, recipe: Recipe, longest: tuple[int, int]) -> tuple[Any, Any]:
    """Return o and lse as DTensors, differentiable. Where q is sharded by batch or by whole groups of heads, all is.

    Other placements are replicated first. So are calls with a layout or with listed tiles. Plain tensors beside
    DTensors count as whole on every rank. So do all that functions capture: they get b and h of the whole.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = next(t for t in x if isinstance(t, DTensor)).device_mesh
    q, k = x[0], x[0] if x[1] is None else x[1]
    along = _along(q, k, mesh, recipe)
    rows = "BM3HD" if x[1] is None else "BMHD"
    sizes = [shape for name, *_ in (*recipe.mask, *recipe.score) for shape in _shapes(KINDS[name])]
    sizes += ["H"] * recipe.sink + ["?"] * recipe.own
    own = [_local(t, size, along, mesh) for t, size in zip(x, [rows] * 3 + sizes, strict=True)]
    seed = seed.to_local() if isinstance(seed, DTensor) else seed
    outputs = eager.attend(own, seed, Call(_placed(recipe, mesh, along, q.shape[0], q.shape[-2]), longest))
    places = [[Shard(size.index(c)) if c else Replicate() for c in along] for size in ("BMHD", "BHM")]
    o, lse = (DTensor.from_local(t, mesh, at, run_check=False) for t, at in zip(outputs, places, strict=True))
    return o, lse


def _shapes(kind: Any) -> Sequence[str]:
    """Return the sizes of a mask's or score's tensors, which are cut; what a function captures is not."""
    return ["?"] * len(kind.captures) if isinstance(kind, Function) else kind.shapes


def _along(q: Any, k: Any, mesh: Any, recipe: Recipe) -> Along:
    """Return what each dimension of the mesh divides, as q's placements say: nothing of packed sequences, or of a call
    with tiles listed for the whole."""
    found: Along = []
    parts_are_calls = recipe.uniform and not any(name == "TileList" for name, *_ in recipe.mask)
    left = {"B": q.shape[0], "H": k.shape[-2]}
    for n, placement in enumerate(getattr(q, "placements", [None] * mesh.ndim)):
        dim = getattr(placement, "dim", None)
        letter = None if dim is None else {0: "B", q.ndim - 2: "H"}.get(dim % q.ndim)
        if letter is None or not parts_are_calls or left[letter] % mesh.size(n):
            found.append(None)
        else:
            found.append(letter)
            left[letter] //= mesh.size(n)
    return found


def _local(t: Any, sizes: str, along: Along, mesh: Any) -> Any:
    """Return this rank's part of a tensor, whose last dimensions are `sizes`. Ranks that share it sum its gradient."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if t is None:
        return None
    sizes = sizes.rjust(t.ndim, "?")[-t.ndim :] if t.ndim else ""
    dims = [sizes.index(c) if c and c in sizes and t.shape[sizes.index(c)] > 1 else None for c in along]
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    places = [Replicate() if dim is None else Shard(dim) for dim in dims]
    shared = [Partial() if c and dim is None else at for c, dim, at in zip(along, dims, places, strict=True)]
    return t.redistribute(mesh, places).to_local(grad_placements=shared)


def _placed(recipe: Recipe, mesh: Any, along: Along, B: int, H: int) -> Recipe:
    """Return the recipe of this rank's part: dropout and functions count from the part's first batch entry and head."""
    if not any(along):
        return recipe
    parts, first = {"B": B, "H": H}, {"B": 0, "H": 0}
    for n, letter in enumerate(along):
        if letter is not None:
            parts[letter] //= mesh.size(n)
            first[letter] += parts[letter] * mesh.get_local_rank(n)
    place = Origin(head=first["H"], heads=H, batch=first["B"])
    mask, score = (tuple([_of_part(plain, place) for plain in some]) for some in (recipe.mask, recipe.score))
    recipe = recipe._replace(mask=mask, score=score)
    if not recipe.dropout:
        return recipe
    row, column, head, heads, batch = recipe.origin or (0, 0, 0, H, 0)
    return recipe._replace(origin=(row, column, (head or 0) + place.head, heads, (batch or 0) + place.batch))


def _of_part(plain: tuple[Any, ...], place: Origin) -> tuple[Any, ...]:
    """Return a mask or score of a recipe as it is in a part."""
    kind, numbers = KINDS[plain[0]], plain[1:]
    return kind.rebuild(numbers, [None] * len(kind.captures)).of_part(place).plain


when_imported("torch.distributed.tensor", lambda module: BY_RANK.update({module.DTensor: attend}))
