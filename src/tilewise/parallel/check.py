"""What a parallel call may be: errors that one rank can see, and what it says to the others."""

from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.backend import select
from ..call.check import check_arguments, describe, describe_fake, fits
from ..call.dispatch import CHECK, intercepted
from ..call.operands import Operands
from ..call.options import refuse_mask
from ..call.problem import TensorSpec
from ..call.recipe import KINDS
from ..values.dropout import Dropout
from ..values.masks import Full, Mask
from ..values.products import EightBits
from ..values.score import Bias
from ..values.tables import Dense
from .agree import Facts, of_numbers
from .exchange import gather
from .pieces import Pieces, spelt
from .plans import Plan, Work
from .shardings import Sharding

LEFT_OUT = {
    "layout": "pass the documents of packed rows as mask=tilewise.Documents(ids, ids) or tilewise.Spans(lo, hi)",
    "origin": "leave it out: the sharding says where rows are",
    "out_dtype": "leave it out, and convert o",
}


class Sizes(NamedTuple):
    """Of a whole, or of a rank's rows with the whole's keys."""

    B: int
    H: int
    M: int
    N: int


def check_call(
    q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, options: dict[str, Any]
) -> tuple[int, tuple[Pieces, ...]]:
    """Return the whole's length and all pieces; raise TypeError or ValueError for what this rank can see."""
    for name, remedy in LEFT_OUT.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} must be None in a parallel call, got {options[name]!r}; {remedy}")
    if isinstance(options["precision"], EightBits):
        raise ValueError(
            "precision must be None or a name in a parallel call, got an EightBits; write its name, and turn q and k "
            "by tilewise.rotary at the sharding's positions"
        )
    if not isinstance(options["mask"], Mask):
        refuse_mask(options["mask"])
    given = {name: options[name] for name in ("scale", "sink", "dropout", "precision", "deterministic", "backend")}
    x, recipe, longest = check_arguments(q, k, v, mask=Full(), score=options["score"], layout=None, **given)
    if options["seed"] is not None:
        Dropout(0.0).seed(options["seed"], q)  # raises for no seed
    for name, t in (("k", k), ("v", v)):
        if t.ndim != 4 or q.ndim != 4 or t.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have q's batch and rows, {tuple(q.shape[:2])}, got shape {tuple(t.shape)}; "
                "pass all three sharded alike, and no caches of keys"
            )
    N, pieces = sharding.cut_for("q", q.shape[1])
    own, recipe = Operands(*x[:3], x.extra[len(x.extra) - recipe.sink :]), recipe._replace(score=())
    if torch.compiler.is_compiling():
        pass  # the operators' fake kernels do it
    elif q.numel() == 0 or intercepted(own[:3]):
        describe_fake(own, recipe, longest)
    else:
        p = describe(own, recipe, longest)
        select(p._replace(q=_whole(p.q, N), k=_whole(p.k, N), v=_whole(p.v, N)))  # no part is refused amid messages
    _check_values(options["mask"], options["score"], q, N)
    return N, pieces


def _whole(spec: TensorSpec, N: int) -> TensorSpec:
    """Return the spec of N rows, contiguous."""
    B, _, H, D = spec.shape
    return spec._replace(shape=(B, N, H, D), stride=(N * H * D, H * D, D, 1), aligned=True)


def _check_values(mask: Mask, score: Any, q: Tensor, N: int) -> None:
    """Check that tensors of masks and scores are the whole's, and those of Dense and Bias the rank's rows."""
    B, own, H = map(index, q.shape[:3])  # numbers, in a graph too: it is of one size
    for value in (*mask.parts, *(score if isinstance(score, (tuple, list)) else (score,))):
        kind = type(value)
        if KINDS.get(kind.__name__) is not kind:
            continue
        local = isinstance(value, (Dense, Bias))
        shapes = kind.whole_shapes(Sizes(B, H, own if local else N, N))
        for name, t, shape in zip(kind.captures, value.tensors, shapes, strict=True):
            what = f"{kind.public_name()}: {name}"
            if t.device != q.device:
                raise ValueError(f"{what} must be on q's device {q.device}, got {t.device}; move it with .to(...)")
            if fits(kind, t.shape, shape):
                continue
            if local:
                raise ValueError(
                    f"{what} must broadcast to {shape}, the rank's {own} rows and the whole's {N} keys, "
                    f"got {tuple(t.shape)}; pass what sharding.shard(..., -2) returns"
                )
            raise ValueError(
                f"{what} must have the whole's shape {shape}, got {tuple(t.shape)}; pass it unsharded, of q's batch"
            )


def facts_of(w: Work, plan: Plan, x: tuple[Tensor, Tensor, Tensor], sink: Tensor | None, wants_lse: bool) -> Facts:
    """Return a call as text, of q, k and v as they are sent: all that messages depend on, and the options."""
    q, k, v = x
    B, _, H, D = q.shape
    biases = [one.bias for one in w.score if isinstance(one, Bias)]
    learned = {"q": q, "k": k, "v": v, "the sink": sink} | {f"bias {n}": bias for n, bias in enumerate(biases)}
    graded = torch.is_grad_enabled()
    wanted = [name for name, t in learned.items() if graded and t is not None and t.requires_grad]
    options = w.options | {"sink": sink is not None, "return_lse": wants_lse, "seed": _told(w.options["seed"])}
    rows = [tuple(one.tensors[0].shape) for one in (*w.mask.parts, *w.score) if isinstance(one, (Dense, Bias))]
    sizes = tuple(map(index, (B, H, k.shape[2], D, v.shape[3])))
    return {
        "a call": "attention",
        "q, k and v": f"of sizes {sizes} in {q.dtype} on {q.device.type}",
        "the length": str(w.N),
        "the sharding": spelt(w.pieces),
        "the plan": str(plan),
        "mask and score": str([part.plain for part in (*w.mask.parts, *w.score)]),
        "the sizes of Dense and Bias": str([(*shape[:-2], *shape[-1:], len(shape) > 1) for shape in rows]),
        "the options": str(options),
        "what requires a gradient": ", ".join(wanted) or "nothing",
        **of_numbers(w.numbers),
    }


def _told(seed: Any) -> Any:
    """Return what ranks say of a seed: a tensor's number only where reading it waits for nothing."""
    if not isinstance(seed, Tensor):
        return seed
    return "a tensor" if torch.compiler.is_compiling() or (seed.is_cuda and not CHECK) else int(seed)


def same_seed(seed: Any, device: torch.device, sharding: Sharding) -> Any:
    """Return dropout's seed, drawn by the first rank if it is None."""
    if seed is not None:
        return seed
    return gather(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device), sharding.axes)[0]
