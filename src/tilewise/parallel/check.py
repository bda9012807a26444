"""What a parallel call may be: errors that one rank can see, and those that only all ranks see together."""

from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..check import check_arguments, describe_fake
from ..import_hook import when_imported
from ..mask import Dense, Full, Mask
from ..options import refuse_mask
from ..problem import KINDS, Operands
from ..quantized import EightBits
from ..score import Bias
from .exchange import alike, gather, told
from .pieces import length
from .shardings import Sharding

LEFT_OUT = {
    "layout": "pass the documents of packed rows as mask=tilewise.Documents(ids, ids) or tilewise.Spans(lo, hi)",
    "place": "leave it out: the sharding says where rows are",
    "out_dtype": "leave it out, and convert o",
}
AGREED: WeakKeyDictionary = WeakKeyDictionary()
"""What the ranks of a group have agreed on already, by its first process group."""


def check_call(q: Tensor, k: Tensor, v: Tensor, sharding: Sharding, options: dict[str, Any]) -> int:
    """Return the whole's length; raise TypeError or ValueError for what this rank can see."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding must be a sharding such as Contiguous(group), got {sharding!r}; write one of tilewise.parallel"
        )
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
    for name, t in (("k", k), ("v", v)):
        if t.ndim != 4 or q.ndim != 4 or t.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} must have q's batch and rows, {tuple(q.shape[:2])}, got shape {tuple(t.shape)}; "
                "pass all three sharded alike, and no caches of keys"
            )
    if not torch.compiler.is_compiling():  # in a graph the operators' fake kernels do it
        describe_fake(Operands(*x[:3], x.extra[len(x.extra) - recipe.sink :]), recipe._replace(score=()), longest)
    N = index(sharding.whole(q.shape[1]))
    own = length(sharding.pieces(N)[sharding.rank])
    if q.shape[1] != own:
        raise ValueError(
            f"q must have the {own} rows that rank {sharding.rank} holds of {N}, got {q.shape[1]}; "
            "pass what sharding.shard(...) returns"
        )
    _check_values(options["mask"], options["score"], own, N)
    return N


def _check_values(mask: Mask, score: Any, own: int, N: int) -> None:
    """Check that tensors of masks and scores are the whole's, and those of Dense and Bias the rank's rows."""
    for value in (*mask.parts, *(score if isinstance(score, (tuple, list)) else (score,))):
        kind = type(value)
        if KINDS.get(kind.__name__) is not kind:
            continue
        for name, shape, t in zip(kind.captures, kind.shapes, value.tensors, strict=True):
            if isinstance(value, (Dense, Bias)):
                sizes = [size for size in t.shape[-2:] if size != 1]
                fits = t.ndim < 2 or (t.shape[-2] in (1, own) and t.shape[-1] in (1, N))
                wanted = f"the rank's {own} rows and the whole's {N} keys"
                got = f"{sizes} in shape {tuple(t.shape)}"
            else:
                fits = shape[-1] not in "MN" or t.shape[-1] == N
                wanted, got = f"the whole's length {N}", f"shape {tuple(t.shape)}"
            if not fits:
                raise ValueError(f"{kind.public_name()}: {name} must be of {wanted}, got {got}; pass it unsharded")


def agree(sharding: Sharding, device: torch.device, fact: dict[str, Any]) -> None:
    """Compare what must be alike on every rank, once for each new fact. Raise ValueError on every rank if it is not."""
    first = sharding.axes[0]
    known = AGREED.setdefault(first, set()) if first is not None else _DEFAULT
    key = sharding, tuple(fact.items())
    if key in known:
        return
    words = {name: str(value) for name, value in fact.items()}
    if not alike(str(words), device, sharding.axes):
        heard = told(words, sharding.axes)
        name = next(name for name in words if len({one[name] for one in heard}) > 1)
        each = " and ".join(dict.fromkeys(one[name] for one in heard))
        raise ValueError(f"{name} must be alike on every rank, got {each}; pass the same to all")
    known.add(key)


_DEFAULT: set[Any] = set()


def _before_graphs(dynamo: Any) -> None:
    """Have ranks compare what must be alike while a call is traced: its graph then holds no such message."""
    dynamo.assume_constant_result(agree)


when_imported("torch._dynamo", _before_graphs)


def same_seed(seed: Any, device: torch.device, sharding: Sharding) -> Any:
    """Return dropout's seed, drawn by the first rank if it is None."""
    if seed is not None:
        return seed
    return gather(torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device), sharding.axes)[0]
