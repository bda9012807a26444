"""What a parallel call may be: errors that one rank can see, and what it says to the others."""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from hashlib import sha256
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..attention.api import with_defaults
from ..call.backend import select
from ..call.check import check_arguments, describe, describe_fake
from ..call.dispatch import BY_RANK, CHECK, intercepted
from ..call.operands import Operands
from ..call.options import as_mask, as_scores
from ..call.problem import TensorSpec
from ..call.recipe import KINDS
from ..values.dropout import Dropout
from ..values.function import Function
from ..values.masks import Full, intersect
from ..values.score import Alibi, Score
from ..values.value import Value
from .agree import Facts, of_numbers
from .exchange import gather
from .pieces import spelt
from .plans import Work
from .shardings import Sharding

Sizes = namedtuple("Sizes", "B H M N")
"""Of a whole, or of a rank's rows with the whole's keys."""
LEFT_OUT = {
    "layout": "pass the documents of packed rows as mask=tilewise.Documents(ids, ids) or tilewise.Spans(lo, hi)",
    "origin": "leave it out: the sharding says where rows are",
    "out_dtype": "leave it out, and convert o",
}


def check_call(function: str, q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, given: Mapping[str, Any]) -> Work:
    """Return the call; raise TypeError or ValueError for what this rank can see."""
    options = with_defaults(function, given)
    for name, remedy in LEFT_OUT.items():
        if options[name] is not None:
            raise ValueError(f"{name} must be None in a parallel call, got {options[name]!r}; {remedy}")
    mask, score, precision = (options[name] for name in ("mask", "score", "precision"))
    if precision is not None and not isinstance(precision, str):
        raise ValueError(
            f"precision must be None or a name in a parallel call, got {type(precision).__name__}; write its name, and "
            "rotate q and k by tilewise.rotary at the sharding's positions"
        )
    mask, scores = as_mask(mask), as_scores(score)
    _refuse_learned(scores)
    own_options = {name: options[name] for name in ("scale", "dropout", "precision", "deterministic", "backend")}
    x, recipe, longest = check_arguments(
        q, k, v, mask=Full(), score=scores, sink=options["sink"], layout=None, **own_options
    )
    if options["seed"] is not None:
        Dropout(0.0).seed(options["seed"], q)  # raises for no seed
    for name, t in (("k", k), ("v", v)):
        if t.ndim != 4 or q.ndim != 4 or t.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have q's batch and rows, {tuple(q.shape[:2])}, got shape {tuple(t.shape)}; "
                "pass all three sharded alike, and no caches of keys"
            )
    N, pieces = sharding.cut_for("q", q.shape[1])
    parts = tuple([part.of_whole(N) for part in mask.parts])
    if any([new is not old for new, old in zip(parts, mask.parts, strict=True)]):
        mask = intersect(parts)
    values = *mask.parts, *scores
    functions = [[one for one in some if isinstance(one, Function)] for some in (mask.parts, scores)]
    captured = [
        _plain(one, name, t)
        for some in functions
        for one in some
        for name, t in zip(one.captures, one.tensors, strict=True)
    ]
    own = Operands(*x[:3], (*captured, *x.extra[len(x.extra) - recipe.sink :]))
    of_mask, of_score = (tuple([one.plain for one in some]) for some in functions)
    recipe = recipe._replace(mask=of_mask, score=of_score)  # the others' tensors are the whole's, or rows of it
    if torch.compiler.is_compiling():
        pass  # the operators' fake kernels do it
    elif q.numel() == 0 or intercepted(own[:3]):
        describe_fake(own, recipe, longest)
    else:
        p = describe(own, recipe, longest)
        select(p._replace(q=_whole(p.q, N), k=_whole(p.k, N), v=_whole(p.v, N)))  # no part is refused amid messages
    for value in values:
        _check_tensors(value, q, N)
    rest = own_options | {"seed": options["seed"]}
    return Work(sharding, N, pieces, mask, scores, options["sink"], bool(options["return_lse"]), rest)


def _refuse_learned(scores: Sequence[Score]) -> None:
    """Raise ValueError for a captured tensor that requires a gradient, of a score whose gradient ranks do not sum."""
    for change in scores:
        if isinstance(change, Alibi) and torch.is_grad_enabled() and any([t.requires_grad for t in change.tensors]):
            name, tensors = change.public_name(), " and ".join(change.captures)
            raise ValueError(
                f"{name}: {tensors} must have no gradient in a parallel call, got requires_grad=True; detach it, or "
                "write it as a Bias, which has one"
            )


def _plain(value: Value, name: str, t: Tensor) -> Tensor:
    """Return a tensor that a function captures; raise TypeError for one that has ranks of its own."""
    if isinstance(t, tuple(BY_RANK)):
        raise TypeError(
            f"{value.public_name()}: {name} must be a plain tensor in a parallel call, got a {type(t).__name__}; "
            "pass .full_tensor() of it"
        )
    return t


def _whole(spec: TensorSpec, N: int) -> TensorSpec:
    """Return the spec of N rows, contiguous."""
    B, _, H, D = spec.shape
    return spec._replace(shape=(B, N, H, D), stride=(N * H * D, H * D, D, 1), aligned=True)


def _check_tensors(value: Value, q: Tensor, N: int) -> None:
    """Check that the tensors of a mask or score are the whole's, and those of Dense and Bias the rank's rows."""
    kind = type(value)
    if isinstance(value, Function) or KINDS.get(kind.__name__) is not kind:
        return
    B, own, H = map(index, q.shape[:3])  # numbers, in a graph too: it is of one size
    shapes = kind.whole_shapes(Sizes(B, H, own if kind.broadcasts else N, N))
    for name, t, shape in zip(kind.captures, value.tensors, shapes, strict=True):
        what = f"{kind.public_name()}: {name}"
        if t.device != q.device:
            raise ValueError(f"{what} must be on q's device {q.device}, got {t.device}; move it with .to(...)")
        if kind.fits(t.shape, shape):
            continue
        if kind.broadcasts:
            raise ValueError(
                f"{what} must broadcast to {shape}, the rank's {own} rows and the whole's {N} keys, "
                f"got {tuple(t.shape)}; pass what sharding.shard(..., -2) returns"
            )
        raise ValueError(
            f"{what} must have the whole's shape {shape}, got {tuple(t.shape)}; pass it unsharded, of q's batch"
        )


def facts_of(w: Work, q: Tensor, k: Tensor, v: Tensor) -> Facts:
    """Return a call as text, of q, k and v as they are sent: all that messages depend on, and the options."""
    values = *w.mask.parts, *w.score
    captured = {
        f"{one.public_name()}: {name}, score {n}": t
        for n, one in enumerate(w.score)
        if one.learns
        for name, t in zip(one.captures, one.tensors, strict=True)
    }
    learned = {"q": q, "k": k, "v": v, "the sink": w.sink} | captured
    graded = torch.is_grad_enabled()
    wanted = [name for name, t in learned.items() if graded and t is not None and t.requires_grad]
    options = w.options | {"sink": w.sink is not None, "return_lse": w.return_lse, "seed": _shown(w.options["seed"])}
    rows = [tuple(one.tensors[0].shape) for one in values if one.broadcasts]
    sizes = tuple(map(index, (q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3])))
    return {
        "a call": "attention",
        "q, k and v": f"of sizes {sizes} in {q.dtype} on {q.device.type}",
        "the length": str(w.N),
        "the sharding": spelt(w.pieces),
        "the plan": str(w.plan),
        "mask and score": str([(_shortened(one.plain[0]), *one.plain[1:]) for one in values]),
        "the sizes of Dense and Bias": str([(*shape[:-2], *shape[-1:], len(shape) > 1) for shape in rows]),
        "the options": str(options),
        "what requires a gradient": ", ".join(wanted) or "nothing",
        **of_numbers(w.numbers),
    }


def _shortened(name: str) -> str:
    """Return a value's name; of a function, with a digest in place of its text."""
    kind, _, rest = name.partition(" ")
    return f"{kind} {sha256(rest.encode()).hexdigest()[:12]}" if rest else kind


_shortened._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result."""


def _shown(seed: Any) -> Any:
    """Return what ranks say of a seed: a tensor's number only where reading it waits for nothing."""
    if not isinstance(seed, Tensor):
        return seed
    return "a tensor" if torch.compiler.is_compiling() or (seed.is_cuda and not CHECK) else int(seed)


def same_seed(seed: Any, device: torch.device, sharding: Sharding) -> Any:
    """Return dropout's seed, drawn by the first rank if it is None."""
    if seed is not None:
        return seed
    return gather(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device), sharding.axes)[0]
