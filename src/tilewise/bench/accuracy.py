"""Is a result right? At most twice the error of plain torch in the same type, plus two units in the last place.

The truth and plain torch are computed for a few heads only, some hundred queries at a time, so that a check stays
affordable at 128K tokens.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import dropout_keep, dropout_rescale
from .peers import SEED, Attention, Peer
from .suites import BACKWARD, BOTH, FORWARD, Case

NAMES = ("o", "dq", "dk", "dv")
SINK = "dsink"
ENTRIES = 1 << 27
"""Scores held at once while computing the truth: 1 GB in fp64."""


class Inputs(NamedTuple):
    """q, k, v, which want gradients, and the gradient of o; a sink, if the case has one."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    sink: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What a peer is called with, and what a backward differentiates by."""
        return self[:3] if self.sink is None else (*self[:3], self.sink)

    @staticmethod
    def random(case: Case, device: torch.device, seed: int = 0) -> "Inputs":
        """Standard normal entries."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(shape: tuple[int, ...], learned: bool = True) -> Tensor:
            t = torch.randn(shape, generator=generator, device=device, dtype=case.type)
            return t.requires_grad_(learned)

        q, k, v = normal(case.shape), normal(case.key_shape), normal(case.key_shape)
        do = normal(case.shape, learned=False)
        return Inputs(q, k, v, do, normal((case.heads,)) if case.varied.sink else None)


class Verdict(NamedTuple):
    """Largest absolute errors against fp64 by pass, and the tensors that break the rule."""

    error: dict[str, float]
    plain: dict[str, float]
    """Of plain torch in the same type."""
    wrong: tuple[str, ...]


class Truth:
    """Results and tolerances of one case: of the first sequence's first head of keys and the last one's last, of a
    variant in every sequence the first and the last head of keys, with all the queries that they serve."""

    def __init__(self, case: Case, x: Inputs) -> None:
        sequences, last = len(case.lengths), case.key_shape[-2] - 1
        everywhere = set(product(range(sequences), (0, last)))
        self.case = case
        self.heads = sorted(everywhere if case.variant else {(0, 0), (sequences - 1, last)})
        self.exact = self._of(x, torch.float64)
        self.by_torch = self._of(x, case.type)
        self.plain = _errors(self.by_torch, self.exact)
        self.largest = {name: max(float(r[name].abs().max()) for r in self.exact) for name in self.exact[0]}
        self.limit = {name: 2.0 * self.plain[name] + 2.0 * _ulp(self.largest[name], case.type) for name in self.plain}

    def judge(self, results: dict[str, Tensor], share: float = 0.0) -> Verdict:
        """The verdict on o, or on o and every gradient, each as its tensor lies; see `Peer.share`."""
        error = _errors(self.of_heads(results), self.exact)
        limit = {name: max(self.limit[name], share * self.largest[name]) for name in error}
        wrong = tuple(name for name in error if not error[name] <= limit[name])  # a nan is wrong
        return Verdict(_by_pass(error), _by_pass(self.plain), wrong)

    def of_heads(self, results: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The parts of o, dq, dk, dv and dsink that the truth is known of."""
        return [{name: _part(self.case, t, head) for name, t in results.items()} for head in self.heads]

    def _of(self, x: Inputs, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        results = [_attend(self.case, x, head, dtype) for head in self.heads]
        if x.sink is not None:  # one sink serves all sequences
            of = list(zip(results, (h for _, h in self.heads), strict=True))
            sums = {h: torch.stack([r[SINK] for r, other in of if other == h]).sum(0) for _, h in of}
            for result, h in of:
                result[SINK] = sums[h]
        return results


def run_once(peer: Peer, attend: Attention, x: Inputs, passes: Sequence[str] = (BOTH,)) -> dict[str, Tensor]:
    """o, and dq, dk, dv and dsink if a pass needs them."""
    with peer.context():
        o = attend(*x.leaves)
    if set(passes) == {FORWARD}:
        return {"o": o.detach()}
    names = NAMES if x.sink is None else (*NAMES, SINK)
    return dict(zip(names, (o.detach(), *torch.autograd.grad(o, x.leaves, x.do)), strict=True))


def _part(case: Case, t: Tensor, head: tuple[int, int]) -> Tensor:
    """What of a tensor belongs to a sequence and a head of keys: (heads, length, head size), of a sink (heads,)."""
    b, h = head
    count = t.shape[0] if t.ndim == 1 else t.shape[-2]
    served = count // case.key_shape[-2]
    heads = slice(h * served, (h + 1) * served)
    if t.ndim == 1:
        return t[heads]
    rows = t[b] if t.ndim == 4 else t[sum(case.lengths[:b]) : sum(case.lengths[: b + 1])]
    return rows[:, heads].transpose(0, 1)


def _attend(case: Case, x: Inputs, head: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Attention of one sequence, one head of keys and the queries that it serves, and its gradients, by autograd, a
    block of queries at a time."""
    q, k, v, do = (_part(case, t, head).detach().to(dtype) for t in x[:4])  # (heads, length, head size)
    shared = [k, v] if x.sink is None else [k, v, _part(case, x.sink, head).detach().to(dtype)]
    for t in shared:
        t.requires_grad_()
    o, dq = torch.empty_like(q), torch.empty_like(q)
    total = torch.promote_types(dtype, torch.float32)
    sums = [torch.zeros_like(t, dtype=total) for t in shared]
    for rows in _blocks(q.shape[1], q.shape[0]):
        q_rows = q[:, rows].requires_grad_()
        o_rows = _probabilities(case, q_rows, k, rows.start, head, *shared[2:]) @ v
        dq_rows, *grads = torch.autograd.grad(o_rows, (q_rows, *shared), do[:, rows])
        o[:, rows], dq[:, rows] = o_rows.detach(), dq_rows
        for t, grad in zip(sums, grads, strict=True):
            t.add_(grad)
    names = NAMES if x.sink is None else (*NAMES, SINK)
    return dict(zip(names, (o, dq, *(t.to(dtype) for t in sums)), strict=True))


def _probabilities(
    case: Case, q: Tensor, k: Tensor, first: int, head: tuple[int, int], sink: Tensor | None = None
) -> Tensor:
    """P of the queries from `first` on, after scores, mask, sink and dropout: (heads, rows, length)."""
    S = q @ k.mT * q.shape[-1] ** -0.5
    i = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)[None, :]
    for score in case.varied.score(case.heads, q.device):
        mine: Any = score.rebuild(score.plain[1:], tuple(_part(case, t, head) for t in score.tensors))
        S = mine.apply(S, i, j, 0)
    for mask in case.mask.parts:
        S = S.masked_fill(~mask.keep(i, j, 0), -math.inf)
    if sink is not None:
        S = torch.cat([S, sink[:, None, None].expand(*S.shape[:2], 1)], -1)
    P = torch.softmax(S, -1)[..., : k.shape[1]]
    if case.dropout:
        b, h = head
        served = torch.arange(h * len(q), (h + 1) * len(q), device=q.device)[:, None, None]
        keep = dropout_keep(SEED, b * case.heads + served, i, j, case.dropout)
        P = P * keep.to(P.dtype) * dropout_rescale(case.dropout)
    return P


def _blocks(length: int, heads: int) -> Iterator[slice]:
    rows = max(1, ENTRIES // (length * heads))
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
