"""Is a result right? At most twice the error of plain torch in the same type, plus two units in the last place.

The truth and plain torch are computed for a few heads only, some hundred queries at a time, so that a check stays
affordable at 128K tokens.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import dropout_keep, dropout_rescale
from .peers import SEED, Attention, Peer
from .suites import BACKWARD, BOTH, FORWARD, Case

NAMES = ("o", "dq", "dk", "dv")
ENTRIES = 1 << 27
"""Scores held at once while computing the truth: 1 GB in fp64."""


class Inputs(NamedTuple):
    """q, k, v, which want gradients, and the gradient of o."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    @staticmethod
    def random(case: Case, device: torch.device, seed: int = 0) -> "Inputs":
        """Standard normal entries."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(learned: bool = True) -> Tensor:
            t = torch.randn(case.shape, generator=generator, device=device, dtype=case.type)
            return t.requires_grad_(learned)

        return Inputs(normal(), normal(), normal(), normal(learned=False))


class Verdict(NamedTuple):
    """Largest absolute errors against fp64 by pass, and the tensors that break the rule."""

    error: dict[str, float]
    plain: dict[str, float]
    """Of plain torch in the same type."""
    wrong: tuple[str, ...]


class Truth:
    """Results and tolerances of one case on the first and the last head."""

    def __init__(self, case: Case, x: Inputs) -> None:
        self.heads = sorted({(0, 0), (case.batch - 1, case.heads - 1)})
        self.exact = [_attend(case, x, head, torch.float64) for head in self.heads]
        self.by_torch = [_attend(case, x, head, case.type) for head in self.heads]
        self.plain = _errors(self.by_torch, self.exact)
        self.largest = {name: max(float(r[name].abs().max()) for r in self.exact) for name in NAMES}
        self.limit = {name: 2.0 * self.plain[name] + 2.0 * _ulp(self.largest[name], case.type) for name in NAMES}

    def judge(self, results: dict[str, Tensor], share: float = 0.0) -> Verdict:
        """The verdict on o, or on o, dq, dk and dv, each (batch, length, heads, head size); see `Peer.share`."""
        error = _errors(self.of_heads(results), self.exact)
        limit = {name: max(self.limit[name], share * self.largest[name]) for name in error}
        wrong = tuple(name for name in error if not error[name] <= limit[name])  # a nan is wrong
        return Verdict(_by_pass(error), _by_pass(self.plain), wrong)

    def of_heads(self, results: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The parts of o, dq, dk and dv that the truth is known of."""
        return [{name: t[b, :, h] for name, t in results.items()} for b, h in self.heads]


def run_once(peer: Peer, attend: Attention, x: Inputs, passes: Sequence[str] = (BOTH,)) -> dict[str, Tensor]:
    """o, and dq, dk and dv if a pass needs them."""
    with peer.context():
        o = attend(x.q, x.k, x.v)
    if set(passes) == {FORWARD}:
        return {"o": o.detach()}
    return dict(zip(NAMES, (o.detach(), *torch.autograd.grad(o, x[:3], x.do)), strict=True))


def _attend(case: Case, x: Inputs, head: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Attention of one head and its gradients, by autograd, a block of queries at a time."""
    b, h = head
    q, k, v, do = (t[b, :, h].detach().to(dtype) for t in x)  # (length, head size)
    k, v = k.requires_grad_(), v.requires_grad_()
    o, dq = torch.empty_like(q), torch.empty_like(q)
    total = torch.promote_types(dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=total), torch.zeros_like(v, dtype=total)
    for rows in _blocks(case.length):
        q_rows = q[rows].requires_grad_()
        o_rows = _probabilities(case, q_rows, k, rows.start, b * case.heads + h) @ v
        grads = torch.autograd.grad(o_rows, (q_rows, k, v), do[rows])
        o[rows], dq[rows] = o_rows.detach(), grads[0]
        dk += grads[1]
        dv += grads[2]
    return dict(zip(NAMES, (o, dq, dk.to(dtype), dv.to(dtype)), strict=True))


def _probabilities(case: Case, q: Tensor, k: Tensor, first: int, row: int) -> Tensor:
    """P of the queries from `first` on, after mask and dropout; `row` is b * H + h."""
    S = q @ k.mT * q.shape[-1] ** -0.5  # (rows, length)
    i = torch.arange(first, first + q.shape[0], device=q.device)[:, None]
    j = torch.arange(k.shape[0], device=q.device)[None, :]
    if case.causal:
        S = S.masked_fill(j > i, -math.inf)
    P = torch.softmax(S, -1)
    if case.dropout:
        keep = dropout_keep(SEED, torch.full_like(i, row), i, j, case.dropout)
        P = P * keep.to(P.dtype) * dropout_rescale(case.dropout)
    return P


def _blocks(length: int) -> Iterator[slice]:
    rows = max(1, ENTRIES // length)
    return (slice(start, min(start + rows, length)) for start in range(0, length, rows))


def _errors(results: list[dict[str, Tensor]], exact: list[dict[str, Tensor]]) -> dict[str, float]:
    """The largest absolute error of each tensor; nan if any entry is not finite."""
    return {
        name: max((_distance(r[name], e[name]) for r, e in zip(results, exact, strict=True)), key=_nan_first)
        for name in results[0]
    }


def _nan_first(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _distance(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max())


def _ulp(largest: float, dtype: torch.dtype) -> float:
    """The spacing of a type's numbers at the size of the largest entry."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0.0 else 0.0


def _by_pass(error: dict[str, float]) -> dict[str, float]:
    passes = {FORWARD: NAMES[:1], BACKWARD: NAMES[1:], BOTH: NAMES}
    return {
        pass_: max((error[name] for name in names), key=_nan_first)
        for pass_, names in passes.items()
        if error.keys() >= set(names)
    }
