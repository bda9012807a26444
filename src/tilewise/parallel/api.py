"""The public functions of tilewise.parallel: attention() of sharded rows, explain(), and using() for whole models."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..attention.api import FULL, SIGNATURE
from ..call.check import autocast_type, cast
from ..call.options import Everything, spell_out
from ..compat.transformers.view import SHARDED
from ..values.masks import Mask
from ..values.value import Unsupported
from .agree import Facts, agreed, together
from .check import check_call, facts_of, same_seed
from .costs import DEFAULT_SOURCE, VARIABLE, Cluster, Cost, current
from .held import checked
from .plans import NAMES, Grid, Plan, Work, candidates, choose, costs_of, memory_limit, needs_numbers, refusals, run
from .reach import reach_of
from .shardings import Sharding, refuse_sharding


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, sharding: Sharding, plan: Plan | None = None, **options: Unpack[Everything]
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of a sequence whose rows are sharded over the ranks of a group (Liu et al. 2023; Jacobs 2023).

    Every rank of the group calls it, with the same options.

    Args:
        q, k, v: this rank's rows, (B, m, H, D), (B, m, H_k, D) and (B, m, H_k, D_v), as `sharding.shard` cuts them.
        sharding: Contiguous, Zigzag, Striped or Balanced.
        plan: "ulysses" swaps rows for heads; "gather" brings all keys to every rank; "ring" brings each rank, from
            their owners, the keys that its rows see, while it computes; "halo" brings them all before it computes, in
            one call; Grid(ulysses, ring) does the first inside the third. None has the fastest chosen, by a model of
            costs; on GPUs never "halo", which has not run on several yet.
        options: those of `tilewise.attention`, but layout, origin and out_dtype. The mask is the whole's: Documents,
            Spans, Padding and Prefix hold the whole's numbers, on every rank. Dense and Bias hold this rank's rows,
            (..., m, N). Functions, and masks joined by `|` or `~`, get the whole's b, h, i and j; what they capture is
            the whole's. A seed that is None is drawn by the first rank. "ring", "halo" and Grid read a mask's tensors
            in each call, unless it is `fixed`.

    Returns:
        o (B, m, H, D_v) of this rank's rows, as if one device had computed the whole; with return_lse, (o, lse).
        Gradients of q, k and v are those of the whole. What every rank holds, a sink, a bias that is alike for all
        rows, or what a function captures, gets a share of its gradient: the shares add up over the group.

    Raises:
        TypeError, ValueError, Unsupported: as `tilewise.attention`, before anything is sent. If only some ranks see
            what is wrong, ValueError on the others; if ranks disagree, ValueError on every rank.
        RuntimeError: a rank does not answer within the group's time-out.
    """
    refuse_sharding(sharding)
    prepare = partial(_prepared, q, k, v, sharding, plan, options)
    if torch.compiler.is_compiling():
        facts, (w, q, k, v) = prepare()
        k = agreed(k, sharding.axes, facts, w.mask, w.N, needs_numbers(w.plan))
    else:
        w, q, k, v = together(sharding.axes, q, prepare)
    if w.options["dropout"]:
        w.options["seed"] = same_seed(w.options["seed"], q.device, sharding)
    o, lse = run(w, q, k, v)
    return (o, lse) if w.return_lse else o  # type: ignore[return-value]


spell_out(attention, SIGNATURE, without=("layout", "origin", "out_dtype"))


@dataclass(frozen=True)
class Explanation:
    """Which plan a call would have, what each costs by the model, and why others refuse. It prints as a table.

    `work` is the entries of P that each rank computes, a batch entry and head.
    """

    plan: Plan | None
    costs: dict[Plan, Cost]
    refusals: dict[Plan, list[str]]
    work: list[float]
    source: str = DEFAULT_SOURCE
    """Where the model's numbers come from."""

    def __str__(self) -> str:
        head = f"{'plan':<28}{'seconds':>10}{'exposed':>10}{'GB received':>13}{'GB held':>9}"
        lines = [f"{head}   (a model, by {self.source})"]
        for plan, one in self.costs.items():
            chosen = "  chosen" if plan == self.plan else ""
            numbers = f"{one.seconds:>10.2e}{one.exposed:>10.1e}{one.received / 1e9:>13.3f}{one.memory / 1e9:>9.3f}"
            lines.append(f"{plan!s:<28}{numbers}{chosen}")
        lines += [f"{plan!s:<28}refuses: {'; '.join(why)}" for plan, why in self.refusals.items() if why]
        mean = sum(self.work) / max(1, len(self.work))
        most = max(self.work, default=0.0) / mean if mean else 1.0
        return "\n".join([*lines, f"work of a rank: at most {most:.2f} of the mean"])


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sharding: Sharding,
    cluster: Cluster | None = None,
    **options: Unpack[Everything],
) -> Explanation:
    """Explain which plan `attention` would choose for these arguments. Nothing is computed or sent.

    Args:
        q, k, v, sharding, options: as for `attention`.
        cluster: what the model assumes of GPUs and links; None for what TILEWISE_CLUSTER names, or the default.

    Returns:
        An Explanation with .plan, .costs, .refusals and .work. Print it to see a table.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    refuse_sharding(sharding)
    w = check_call("tilewise.parallel.explain", q, k, v, sharding, options)
    source = "cluster=" if cluster else os.environ.get(VARIABLE) or DEFAULT_SOURCE
    costs = costs_of(w, q, k, cluster or current())
    against = {plan: refusals(plan, w, q.shape[2]) for plan in candidates(w)}
    work = reach_of(w.mask, w.N, *q.shape[::2]).work(w.pieces)
    return Explanation(choose(costs, memory_limit(q.device)), costs, against, work, source)


@contextmanager
def using(sharding: Sharding, plan: Plan | None = None, mask: Mask = FULL) -> Iterator[None]:
    """Have the layers of a model of transformers compute attention of sharded rows, inside the context.

    The model is made with attn_implementation="tilewise". It gets this rank's tokens, and position_ids from
    `sharding.positions(length)`. Labels are shifted before they are sharded, since a rank's next row is not its next
    token. Layers keep their windows, sinks and caps. Leave attention_mask out, and pass use_cache=False.

    Args:
        sharding, plan: as for `tilewise.parallel.attention`.
        mask: the whole's, beside that of each layer: Documents or Spans of packed rows.

    Raises:
        TypeError: sharding is none. Unsupported, in a layer: padding, chunks, caches and drawn masks.
    """
    refuse_sharding(sharding)

    def layer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        options["mask"] = options["mask"] & mask
        return attention(q, k, v, sharding=sharding, plan=plan, **options)

    SHARDED.append(layer)
    try:
        yield
    finally:
        SHARDED.pop()


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, plan: Plan | None, options: Any
) -> tuple[Facts, tuple[Work, Tensor, Tensor, Tensor]]:
    """Do all that may fail on one rank alone; return what it says to others, and the call with q, k and v to send."""
    w = check_call("tilewise.parallel.attention", q, k, v, sharding, options)
    kind = autocast_type(q)
    if kind is not None:
        q, k, v = (cast(t, kind) for t in (q, k, v))
    if plan is None:
        plan = choose(costs_of(w, q, k, current()), memory_limit(q.device))
    elif not isinstance(plan, Grid) and plan not in NAMES:
        raise ValueError(
            f"plan must be None, Grid(...) or one of {', '.join(NAMES)}, got {plan!r}; leave it out to have one chosen"
        )
    against = ["no plan takes it"] if plan is None else refusals(plan, w, q.shape[2])
    if plan is None or against:
        raise Unsupported(f"plan {plan!r} cannot run this call: {'; '.join(against)}; choose another plan or sharding")
    reads = not torch.compiler.is_compiling()  # a graph reads when it runs
    w = w._replace(plan=plan, numbers=checked(w.mask, w.N, needs_numbers(plan), q) if reads else None)
    return facts_of(w, q, k, v), (w, q, k, v)
