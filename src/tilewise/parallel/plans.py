"""Plans: how rows meet keys that other ranks hold. Which ones a call can have, which is chosen, and how each runs."""

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.api import attention as attend
from ..values.function import Function
from ..values.masks import Full, Mask, intersect
from ..values.origin import Origin
from ..values.score import Score
from ..values.value import Value
from .agree import rebuilt, written
from .costs import Cluster, Cost, Sizes, cost
from .graph import in_graph
from .held import Numbers, held
from .pieces import Pieces, joined, length, meet
from .reach import reach
from .ring import EXCHANGES, Ring
from .shardings import Sharding, make_positive
from .shards import CUT, FEW, READING, Shards, shards_of
from .ulysses import Swap, spread_keys


@dataclass(frozen=True)
class Grid:
    """The plan of Ulysses in groups of `ulysses` ranks, and of a ring of `ring` groups, on a mesh (ring, ulysses)."""

    ulysses: int
    ring: int

    def __post_init__(self) -> None:
        make_positive(self, "ulysses", "ring")


Plan = str | Grid
NAMES = ("ulysses", "gather", "ring", "halo")


EVEN = ("visible", "balance", "most", "fetched", "calls")
"""What `Sizes` says of a mask and a sharding."""


class Work(NamedTuple):
    """A checked call: the whole's length, every rank's pieces, and the options of attention."""

    sharding: Sharding
    N: int
    pieces: tuple[Pieces, ...]
    mask: Mask
    score: tuple[Score, ...]
    sink: Tensor | None
    return_lse: bool
    options: dict[str, Any]
    """scale, dropout, seed, precision, deterministic, backend."""
    plan: Plan = ""
    """The one chosen."""
    numbers: Numbers | None = None
    """The mask's, where they were read."""


def refusals(plan: Plan, w: Work, H: int) -> list[str]:
    """Return the reasons against a plan; empty if the call can have it."""
    sizes = tuple(dist.get_world_size(axis) for axis in w.sharding.axes)
    against = []
    if isinstance(plan, Grid):
        if sizes != (plan.ring, plan.ulysses):
            against.append(f"it needs a mesh of ({plan.ring}, {plan.ulysses}) ranks, this one has {sizes}")
    elif len(sizes) == 2:
        against.append("it needs a group or a mesh of one dimension; a mesh of two is for Grid")
    if plan != "ulysses":
        strange = [part.public_name() for part in w.mask.parts if not isinstance(part, CUT)]
        against += [f"it knows no way to cut {name} to some rows and keys" for name in strange]
    if plan == "ulysses" or isinstance(plan, Grid):
        U = plan.ulysses if isinstance(plan, Grid) else w.sharding.ranks
        if H % U:
            against.append(f"{H} query heads do not divide by {U} ranks")
        against += [why for one in (*w.mask.parts, *w.score) if one.broadcasts for why in _against_rows(one, w)]
    return against


def _against_rows(one: Value, w: Work) -> list[str]:
    """Return why a plan that brings all rows to each rank cannot have a Dense or Bias; empty if it has no rows.

    One row is for all rows of the whole where each rank holds several, or there is no other: elsewhere nobody can tell.
    """
    name, shape = one.public_name(), one.tensors[0].shape
    if len(shape) < 2 or (shape[-2] == 1 and (w.N == 1 or min(map(length, w.pieces)) > 1)):
        return []
    if shape[-2] == 1:
        return [f"{name} has one row, which is that of a rank or for all, and some rank holds no more than one"]
    return [f"{name} has rows, of which each rank holds its own"]


def needs_numbers(plan: Plan) -> bool:
    """Tell whether a plan reads the mask's tensors, to find what travels."""
    return plan in READING or isinstance(plan, Grid)


def candidates(w: Work) -> list[Plan]:
    """Return the plans to ask."""
    sizes = [dist.get_world_size(axis) for axis in w.sharding.axes]
    return list(NAMES) if len(sizes) == 1 else [Grid(sizes[1], sizes[0])]


def even(w: Work, inner: int) -> tuple[float, ...]:
    """Return the fields EVEN of `Sizes`, of groups of `inner` ranks, which hold their pieces in common.

    A mask's tensors count where it is `fixed`, and not in a graph.
    """
    if torch.compiler.is_compiling():
        return even_bands(tuple([part.plain for part in w.mask.parts if not part.captures]), w.sharding, w.N, inner)
    known = tuple([part for part in w.mask.parts if not part.captures or part.held])
    return _even(held(intersect(known)), w.sharding, w.N, inner)


def even_bands(bands: tuple[tuple[Any, ...], ...], sharding: Sharding, N: int, inner: int) -> Any:
    """Return the same of parts without tensors, which graphs know by their numbers alone."""
    return _even(held(intersect(rebuilt(bands, iter(())))), sharding, N, inner)


even_bands._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result: the numbers are found while a call is traced."""


@lru_cache(16)
def _even(numbers: Numbers, sharding: Sharding, N: int, inner: int) -> tuple[float, ...]:
    found, pieces = reach(numbers, len(numbers), N), joined(sharding.pieces(N), inner)
    work, s = found.work(pieces), Shards(pieces, 0, found, Full(), (), {})
    total, seen = sum(work), [(own, s.seen(r)) for r, own in enumerate(pieces)]
    needed = [(length(keys) - length(meet(own, keys))) / max(1, N - length(own)) for own, keys in seen]
    calls = max(map(len, pieces))
    balance = max(work) * len(work) / total if total else 1.0
    return total / max(1, N) ** 2, balance, max(needed), fmean(needed), calls if 0 < calls <= FEW else 1


def costs_of(w: Work, q: Tensor, k: Tensor, cluster: Cluster) -> dict[Plan, Cost]:
    """Return what each plan costs that the call can have."""
    sizes = Sizes(w.N, w.sharding.ranks, q.shape[2], k.shape[2], q.shape[3], q.element_size())
    found: dict[Plan, Cost] = {}
    for plan in candidates(w):
        if not refusals(plan, w, q.shape[2]):
            name, inner = ("ring", plan.ulysses) if isinstance(plan, Grid) else (plan, 1)
            known = dict(zip(EVEN, even(w, inner), strict=True))
            found[plan] = cost(name, inner, sizes._replace(**known), cluster)  # type: ignore[arg-type]
    return found


def choose(costs: dict[Plan, Cost], limit: float) -> Plan | None:
    """Return the fastest plan under a limit of memory in bytes, or the smallest if none is; None if there is none."""
    small = {plan: one for plan, one in costs.items() if one.memory <= limit}
    if small:
        return min(small, key=lambda plan: small[plan].seconds)
    return min(costs, key=lambda plan: costs[plan].memory) if costs else None


def memory_limit(device: torch.device) -> float:
    """Return the bytes that a plan may hold by default: a quarter of the device's, the same on every rank."""
    return torch.cuda.get_device_properties(device).total_memory / 4 if device.type == "cuda" else 16e9


def run(w: Work, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return o and lse of this rank's rows; with heads swapped back, lse travels only if it is wanted."""
    if w.plan in EXCHANGES:
        return with_keys(w, w.pieces, w.sharding.rank, (0, None), q, k, v)
    axis = w.sharding.axes[-1]
    U, u = dist.get_world_size(axis), dist.get_rank(axis)
    H = q.shape[2]
    heads = slice(u * (H // U), (u + 1) * (H // U))
    r = dist.get_rank(w.sharding.axes[0]) if isinstance(w.plan, Grid) else 0
    inside = w.pieces[r * U : (r + 1) * U]
    k, v = spread_keys(k, v, H, U)
    q, k, v = Swap.apply(axis, inside, True, q, k, v)
    mask = w.mask if isinstance(w.plan, Grid) else in_spans(w, q, H)
    mask = intersect(tuple([part.of_heads(heads) for part in mask.parts]))
    score = tuple([one.of_heads(heads) for one in w.score])
    sink = None if w.sink is None else w.sink[heads]
    if isinstance(w.plan, Grid):
        own = w._replace(mask=mask, score=score, sink=sink)
        o, lse = with_keys(own, joined(w.pieces, U), r, (heads.start, H), q, k, v)
    else:
        counts = w.options["dropout"] or any([isinstance(one, Function) for one in (*mask.parts, *score)])
        origin = Origin(head=heads.start, heads=H) if counts else None
        o, lse = attend(q, k, v, mask=mask, score=score, sink=sink, origin=origin, return_lse=True, **w.options)
    (o,) = Swap.apply(axis, inside, False, o)
    if not w.return_lse:
        return o, None
    (lse,) = Swap.apply(axis, inside, False, lse.transpose(1, 2)[..., None])
    return o, lse[..., 0].transpose(1, 2)


def in_spans(w: Work, q: Tensor, H: int) -> Mask:
    """Return the whole's mask as Spans where its tensors are `fixed` and each row sees one interval of keys.

    GPUs list the tiles of Documents in every call, and none of Spans. q: (B, N, ..., D), all rows; H: all heads.
    """
    captured, whole = [part for part in w.mask.parts if part.captures], ((0, w.N),)
    if torch.compiler.is_compiling() or not captured or not all([part.held for part in captured]):
        return w.mask
    s = shards_of(None, "halo", w.N, (whole,), 0, 0, H, w.mask, (), {}, q, held(w.mask))
    keys, blocks = s.pair(0, 0)
    fits = keys == whole and len(blocks) == 1 and blocks[0].rows == slice(0, w.N)
    return blocks[0].mask or w.mask if fits else w.mask


def with_keys(
    w: Work, pieces: tuple[Pieces, ...], own: int, heads: tuple[int, int | None], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return o and lse of rows to which keys come, by an operator in a graph, else at once."""
    axis, at = w.sharding.axes[0], ("ring" if isinstance(w.plan, Grid) else w.plan, w.N, pieces, own, *heads)
    if torch.compiler.is_compiling():
        return in_graph(written((axis,), *at), w.mask, w.score, w.options, q, k, v, w.sink)
    s = shards_of(axis, *at, w.mask, w.score, w.options, q, w.numbers)
    return Ring.apply(s, q, k, v, w.sink, *[t for t, _ in s.learned])
