"""Plans: how rows meet keys that other ranks hold. Which ones a call can have, which is chosen, and how each runs."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.api import attention as attend
from ..call.import_hook import when_imported
from ..values.masks import Mask, intersect
from ..values.origin import Origin
from ..values.score import Bias, Score
from ..values.tables import Dense
from .agree import written
from .costs import Cluster, Cost, Sizes, cost
from .graph import in_graph
from .held import Numbers, held
from .pieces import Pieces
from .reach import Reach, reach, reach_of
from .ring import ring
from .shardings import Sharding, positive
from .shards import CUT, joined, rows_of, shards_of
from .ulysses import Swap, of_heads, spread_keys


@dataclass(frozen=True)
class Grid:
    """The plan of Ulysses in groups of `ulysses` ranks, and of a ring of `ring` groups, on a mesh (ring, ulysses)."""

    ulysses: int
    ring: int

    def __post_init__(self) -> None:
        for name in ("ulysses", "ring"):
            object.__setattr__(self, name, positive(f"Grid: {name}", getattr(self, name)))


Plan = str | Grid
NAMES = ("ulysses", "gather", "ring")


class Work(NamedTuple):
    """A checked call: the whole's length, every rank's pieces, and the options of attention but mask and score.

    numbers: the mask's, where they were read.
    """

    sharding: Sharding
    N: int
    pieces: tuple[Pieces, ...]
    mask: Mask
    score: tuple[Score, ...]
    options: dict[str, Any]
    numbers: Numbers | None = None


def refusals(plan: Plan, w: Work, H: int) -> list[str]:
    """Return the reasons against a plan; empty if the call can have it."""
    axes = w.sharding.axes
    sizes = tuple(dist.get_world_size(axis) for axis in axes)
    against = []
    if isinstance(plan, Grid):
        if len(axes) != 2 or sizes != (plan.ring, plan.ulysses):
            against.append(f"it needs a mesh of ({plan.ring}, {plan.ulysses}) ranks, this one has {sizes}")
    elif len(axes) == 2:
        against.append("it needs a group or a mesh of one dimension; a mesh of two is for Grid")
    if plan != "ulysses":
        strange = [part.public_name() for part in w.mask.parts if not isinstance(part, CUT)]
        against += [f"it knows no way to cut {name} to some rows and keys" for name in strange]
    U = plan.ulysses if isinstance(plan, Grid) else w.sharding.ranks
    if plan == "ulysses" or isinstance(plan, Grid):
        if H % U:
            against.append(f"{H} query heads do not divide by {U} ranks")
        against += [why for one in (*w.mask.parts, *w.score) if isinstance(one, (Dense, Bias)) for why in _rows(one, w)]
    return against


def _rows(one: Dense | Bias, w: Work) -> list[str]:
    """Return why a plan that brings all rows to each rank cannot have this mask or score; empty if it has no rows.

    One row is for all rows of the whole where each rank holds several, or there is no other: elsewhere nobody can tell.
    """
    name, shape = type(one).__name__, one.tensors[0].shape
    if len(shape) < 2 or (shape[-2] == 1 and (w.N == 1 or min(rows_of(w.pieces)) > 1)):
        return []
    if shape[-2] == 1:
        return [f"{name} has one row, which is that of a rank or for all, and some rank holds no more than one"]
    return [f"{name} has rows, of which each rank holds its own"]


def needs_numbers(plan: Plan) -> bool:
    """Tell whether a plan reads the mask's tensors, to find what travels."""
    return plan == "ring" or isinstance(plan, Grid)


def candidates(w: Work) -> list[Plan]:
    """Return the plans to ask."""
    sizes = [dist.get_world_size(axis) for axis in w.sharding.axes]
    return list(NAMES) if len(sizes) == 1 else [Grid(sizes[1], sizes[0])]


def even(band: Mask, sharding: Sharding, N: int, inner: int) -> tuple[float, float]:
    """Return the part of P that a mask without tensors shows, and the most work of `inner` ranks, of the mean."""
    return _even(held(band), sharding, N, inner)


@lru_cache(64)
def _even(numbers: Numbers, sharding: Sharding, N: int, inner: int) -> tuple[float, float]:
    each = _works(reach(numbers, len(numbers), N), sharding.pieces(N))
    works = [sum(part) for part in zip(*[iter(each)] * inner, strict=True)]
    total = sum(works)
    return total / max(1, N) ** 2, max(works) * len(works) / total if total else 1.0


def _before_graphs(dynamo: Any) -> None:
    """Have numbers of a mask found while a call is traced."""
    dynamo.assume_constant_result(even)


when_imported("torch._dynamo", _before_graphs)


def costs_of(w: Work, q: Tensor, k: Tensor, cluster: Cluster) -> dict[Plan, Cost]:
    """Return what each plan costs that the call can have. Masks with tensors count as what their other parts show."""
    band = intersect(tuple([part for part in w.mask.parts if not part.captures]))
    sizes = Sizes(w.N, w.sharding.ranks, q.shape[2], k.shape[2], q.shape[3], q.element_size())
    found: dict[Plan, Cost] = {}
    for plan in candidates(w):
        if not refusals(plan, w, q.shape[2]):
            name, inner = ("ring", plan.ulysses) if isinstance(plan, Grid) else (plan, 1)
            seen, balance = even(band, w.sharding, w.N, inner)
            x = sizes._replace(seen=seen, fetched=min(1.0, 1.5 * seen), balance=balance)
            found[plan] = cost(name, inner, x, cluster)
    return found


def choose(costs: dict[Plan, Cost], limit: float) -> Plan | None:
    """Return the fastest plan under a limit of memory, or the smallest if none is; None if there is none."""
    small = {plan: one for plan, one in costs.items() if one.memory <= limit}
    if small:
        return min(small, key=lambda plan: small[plan].seconds)
    return min(costs, key=lambda plan: costs[plan].memory) if costs else None


def memory_limit(device: torch.device) -> float:
    """Return the bytes that a plan may hold by default: a quarter of the device's, the same on every rank."""
    return torch.cuda.get_device_properties(device).total_memory / 4 if device.type == "cuda" else 16e9


def run(
    plan: Plan, w: Work, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return o and lse of this rank's rows; with heads swapped back, lse travels only if it is wanted."""
    if plan in ("ring", "gather"):
        return ring_or_gather(w, str(plan), w.pieces, w.sharding.rank, q, k, v, sink)
    axis = w.sharding.axes[-1]
    U, u = dist.get_world_size(axis), dist.get_rank(axis)
    H = q.shape[2]
    heads = slice(u * (H // U), (u + 1) * (H // U))
    r = dist.get_rank(w.sharding.axes[0]) if isinstance(plan, Grid) else 0
    inside = w.pieces[r * U : (r + 1) * U]
    k, v = spread_keys(k, v, H, U)
    q, k, v = Swap.apply(axis, inside, True, q, k, v)
    mask, score = of_heads(w.mask, w.score, heads)
    sink = None if sink is None else sink[heads]
    if isinstance(plan, Grid):
        own = w._replace(mask=mask, score=score)
        o, lse = ring_or_gather(own, "ring", joined(w.pieces, U), r, q, k, v, sink, (heads.start, H))
    else:
        origin = Origin(head=heads.start, heads=H) if w.options.get("dropout") else None
        o, lse = attend(q, k, v, mask=mask, score=score, sink=sink, origin=origin, return_lse=True, **w.options)
    (o,) = Swap.apply(axis, inside, False, o)
    if not wants_lse:
        return o, None
    (lse,) = Swap.apply(axis, inside, False, lse.transpose(1, 2)[..., None].contiguous())
    return o, lse[..., 0].transpose(1, 2)


def ring_or_gather(
    w: Work, plan: str, pieces: tuple[Pieces, ...], own: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    heads: tuple[int, int | None] = (0, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse of rows to which keys come, by an operator in a graph, else at once."""
    if torch.compiler.is_compiling():
        where = written(w.sharding.axes[:1], plan, w.N, pieces, own, *heads)
        return in_graph(where, w.mask, w.score, w.options, q, k, v, sink)
    s = shards_of(plan, w.N, pieces, own, w.mask, w.score, w.options, *heads, q, w.numbers)
    return ring(s, plan, w.sharding.axes[0], q, k, v, sink)


def works_of(mask: Mask, pieces: tuple[Pieces, ...], N: int) -> list[float]:
    """Return the entries of P that each rank computes, a batch entry and head. A mask's tensors are read."""
    return _works(reach_of(mask, N), pieces)


def _works(found: Reach, pieces: tuple[Pieces, ...]) -> list[float]:
    counts = found.counts()
    return [float(sum(counts[a:b].sum() for a, b in own)) for own in pieces]
