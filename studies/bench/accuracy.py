"""Is a result right? At most twice the error of plain torch in the same type, plus two units in the last place.

The truth and plain torch are computed for a few heads only, some hundred queries at a time, so that a check stays
affordable at 128K tokens. In fp32 that alone would be luck, twice: a GPU's library splits the long sums of a single
head, not those of a batch; and where a row sees few keys, the softmax's own gradient errs less than any that computes P
again. So in fp32 plain torch sums in several orders, which make a batch, and takes its gradients in both forms, as
tests/conformance/rule.py does, and its worst error counts.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.program import Entries
from tilewise.values.dropout import dropout_keep, dropout_rescale

from .peers import SEED, Attention, Peer
from .suites import BACKWARD, BOTH, FORWARD, Case

NAMES = ("o", "dq", "dk", "dv")
SINK = "dsink"
ENTRIES = 1 << 27
"""Scores held at once while computing the truth: 1 GB in fp64."""
SHUFFLED = {"cuda": ENTRIES, "cpu": ENTRIES >> 4}
"""Scores of all the orders in which plain torch sums in fp32, 2 to 16: more leave less to luck, but a CPU is slow."""
LOG2E = math.log2(math.e)


class Inputs(NamedTuple):
    """q, k, v, which want gradients, and the gradient of o; a sink, if the case has one."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    sink: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Return the tensors that a peer is called with and a backward differentiates by."""
        return self[:3] if self.sink is None else (*self[:3], self.sink)

    @staticmethod
    def random(case: Case, device: torch.device, seed: int = 0) -> "Inputs":
        """Draw standard normal entries."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(shape: tuple[int, ...], learned: bool = True) -> Tensor:
            t = torch.randn(shape, generator=generator, device=device, dtype=case.type)
            return t.requires_grad_(learned)

        q, k, v = normal(case.shape), normal(case.key_shape), normal(case.value_shape)
        do = normal(case.result_shape, learned=False)
        if case.varied.padded:  # nobody reads what a padded query gets
            do *= case.real(device)[..., None, None]
        return Inputs(q, k, v, do, normal((case.heads,)) if case.varied.sink else None)


class Verdict(NamedTuple):
    """Largest absolute errors against fp64 by pass, and the tensors that break the rule."""

    error: dict[str, float]
    plain: dict[str, float]
    """Of plain torch in the same type; see `Truth.plain`."""
    wrong: tuple[str, ...]


class Truth:
    """Results and tolerances of one case: of the first sequence's first head of keys and the last one's last, of a
    variant the first and the last head of keys in both, or in every packed sequence, with all the queries that they
    serve."""

    def __init__(self, case: Case, x: Inputs) -> None:
        sequences, last = range(len(case.lengths)), case.key_shape[-2] - 1
        of_variant = set(product(sequences if case.varied.packed else (0, sequences[-1]), (0, last)))
        self.case, self.x = case, x
        self.heads = sorted(of_variant if case.variant else {(0, 0), (sequences[-1], last)})
        self.exact = self.by_head(torch.float64)
        self.by_torch = self.by_head(case.type)
        self.largest = {name: max(float(r[name].abs().max()) for r in self.exact) for name in self.exact[0]}

    @cached_property
    def plain(self) -> dict[str, float]:
        """The largest errors of plain torch; in fp32 of the worst order of summation and form of the gradients."""
        found = [self.by_torch]
        if self.case.type == torch.float32:
            longest = max(self.case.lengths)
            scores = (self.case.varied.queries or longest) * longest
            orders = max(2, min(16, SHUFFLED[self.x.q.device.type] // scores))
            found += [self.by_head(torch.float32, orders, paper) for paper in (False, True)]
        errors = [_errors(results, self.exact) for results in found]
        return {name: max((error[name] for error in errors), key=_nan_first) for name in errors[0]}

    @cached_property
    def limit(self) -> dict[str, float]:
        """Return the largest error allowed for each tensor."""
        return {name: 2.0 * self.plain[name] + 2.0 * _ulp(self.largest[name], self.case.type) for name in self.plain}

    def judge(self, results: dict[str, Tensor], share: float = 0.0) -> Verdict:
        """Judge o, or o and every gradient, each in its tensor's layout; see `Peer.share`."""
        error = _errors(self.of_heads(results), self.exact)
        limit = {name: max(self.limit[name], share * self.largest[name]) for name in error}
        wrong = tuple(name for name in error if not error[name] <= limit[name])  # a nan is wrong
        return Verdict(_by_pass(error), _by_pass(self.plain), wrong)

    def of_heads(self, results: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the parts of o, dq, dk, dv and dsink for which the truth is known."""
        return [{name: _part(self.case, t, head) for name, t in results.items()} for head in self.heads]

    def by_head(self, dtype: torch.dtype, orders: int = 0, paper: bool = False) -> list[dict[str, Tensor]]:
        """Compute in plain torch in a type: in one order or in several, by autograd or by the paper's formulas."""
        results = [_attend(self.case, self.x, head, dtype, orders, paper) for head in self.heads]
        if self.x.sink is not None:  # one sink serves all sequences
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
    """Return the part of a tensor that belongs to a sequence and a head of keys: (heads, length, head size); (heads,)
    of a sink."""
    b, h = head
    count = t.shape[0] if t.ndim == 1 else t.shape[-2]
    served = count // case.key_shape[-2]
    heads = slice(h * served, (h + 1) * served)
    if t.ndim == 1:
        return t[heads]
    rows = t[b, : case.lengths[b]] if t.ndim == 4 else t[sum(case.lengths[:b]) : sum(case.lengths[: b + 1])]
    return rows[:, heads].transpose(0, 1)


def _attend(
    case: Case, x: Inputs, head: tuple[int, int], dtype: torch.dtype, orders: int, paper: bool
) -> dict[str, Tensor]:
    """Compute attention of one sequence, one head of keys and the queries that it serves, and the gradients.

    With `orders`, compute each result once per order, along a new first axis.
    """
    parts = [_part(case, t, head).detach().to(dtype) for t in (*x.leaves, x.do)]
    length, queries = parts[1].shape[1], parts[0].shape[1]
    names = NAMES if x.sink is None else (*NAMES, SINK)
    if not orders:
        rows, tokens = (torch.arange(n, device=x.q.device) for n in (queries, length))
        return dict(zip(names, _differentiate(case, head, rows, tokens, parts, paper), strict=True))
    moves = {n: _orders(n, orders, x.q.device) for n in (queries, length)}
    entries = {t.shape[-1]: _orders(t.shape[-1], orders, x.q.device) for t in parts[:3]}
    batch = [_moved(t.expand(orders, *t.shape), moves, entries) for t in parts]
    found = _differentiate(case, head, moves[queries], moves[length], batch, paper)
    back = [{n: order.argsort() for n, order in orders_of.items()} for orders_of in (moves, entries)]
    return {n: _moved(t, *back) for n, t in zip(names, found, strict=True)}


def _differentiate(
    case: Case, head: tuple[int, int], queries: Tensor, tokens: Tensor, parts: Sequence[Tensor], paper: bool
) -> list[Tensor]:
    """Return o, dq, dk, dv and dsink from q, k, v, sink and do, a block of queries at a time.

    `tokens` holds each key's position in its sequence, `queries` each query's position among the last ones.
    """
    q, k, v, *sink, do = parts
    queries = queries + (k.shape[-2] - q.shape[-2])
    shared = [t.requires_grad_() for t in (k, v, *sink)]
    o, dq = torch.empty_like(do), torch.empty_like(q)
    total = torch.promote_types(q.dtype, torch.float32)
    sums = [torch.zeros_like(t, dtype=total) for t in shared]
    for rows in _blocks(q.shape[-2], k.shape[-2] * q.shape[:-2].numel()):
        block = _Block(case, head, queries[..., None, rows, None], tokens[..., None, None, :])
        through = block.by_paper if paper else block.by_autograd
        q_rows = q[..., rows, :].requires_grad_()
        o[..., rows, :], (dq[..., rows, :], *grads) = through(do[..., rows, :], q_rows, *shared)
        for t, grad in zip(sums, grads, strict=True):
            t.add_(grad)
    return [o, dq, *(t.to(q.dtype) for t in sums)]


class _Block(NamedTuple):
    """Some of the queries that a head of keys serves, in one order of summation or in several."""

    case: Case
    head: tuple[int, int]
    i: Tensor
    """Where the queries are in their sequence: (..., 1, rows, 1)."""
    j: Tensor
    """Where the keys are: (..., 1, 1, length)."""

    def by_autograd(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *sink: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """o, and the gradients through the softmax."""
        o = self._dropped(torch.softmax(self._logits(q, k, *sink), -1)) @ v
        return o.detach(), torch.autograd.grad(o, (q, k, v, *sink), do)

    def by_paper(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return o, and the gradients as kernels compute them.

        P comes from S, summed again in the other order, and from the rows' log-sum-exp; dS = P * (dP - delta).
        """
        with torch.no_grad():
            S = self._logits(q, k, *sink)
            o = self._dropped(torch.softmax(S, -1)) @ v
            lse, delta = torch.logsumexp(S, -1, keepdim=True), (o * do).sum(-1, keepdim=True)
        P = torch.exp2(self._logits(q.flip(-1), k.flip(-1), *sink) * LOG2E - lse * LOG2E)
        again = self._dropped(P) @ v
        return o, torch.autograd.grad((again, P), (q, k, v, *sink), (do, -delta.expand_as(P)))

    def _logits(self, q: Tensor, k: Tensor, sink: Tensor | None = None) -> Tensor:
        """Return S after scores and mask: (..., heads, rows, length). A sink counts as one more key."""
        S, none = q @ k.mT * q.shape[-1] ** -0.5, torch.zeros_like(self.i)
        at = Entries(none, none, self.i, self.j)
        for score in self.case.varied.score(self.case.heads, q.device):
            mine: Any = score.rebuild(score.plain[1:], tuple(_part(self.case, t, self.head) for t in score.tensors))
            S = mine.apply(S, at)
        for mask in self.case.mask.parts:
            S = S.masked_fill(~mask.keep(at), -math.inf)
        return S if sink is None else torch.cat([S, sink[..., None, None].expand(*S.shape[:-1], 1)], -1)

    def _dropped(self, P: Tensor) -> Tensor:
        """P after dropout, without the sink."""
        P = P[..., : self.j.shape[-1]]
        if not self.case.dropout:
            return P
        b, h = self.head
        served = torch.arange(h * P.shape[-3], (h + 1) * P.shape[-3], device=P.device)[:, None, None]
        keep = dropout_keep(SEED, b * self.case.heads + served, self.i, self.j, self.case.dropout)
        return P * keep.to(P.dtype) * dropout_rescale(self.case.dropout)


def _orders(count: int, orders: int, device: torch.device) -> Tensor:
    """Return 0 to count - 1, in order and shuffled: (orders, count)."""
    generator = torch.Generator().manual_seed(count)
    shuffled = [torch.randperm(count, generator=generator) for _ in range(orders - 1)]
    return torch.stack([torch.arange(count), *shuffled]).to(device)


def _moved(t: Tensor, moves: dict[int, Tensor], entries: dict[int, Tensor]) -> Tensor:
    """Permute tokens, and entries, by the order for their number, in (orders, heads, length, head size).

    A sink (orders, heads) has neither, but becomes a separate tensor.
    """
    if t.ndim == 2:
        return t.clone()
    return t.take_along_dim(moves[t.shape[2]][:, None, :, None], 2).take_along_dim(
        entries[t.shape[3]][:, None, None, :], 3
    )


def _blocks(length: int, scores: int) -> Iterator[slice]:
    """Split queries so that a part has at most ENTRIES scores; a query has `scores`."""
    rows = max(1, ENTRIES // scores)
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
    """Return the spacing of a type's numbers at the size of the largest entry."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0.0 else 0.0


def _by_pass(error: dict[str, float]) -> dict[str, float]:
    passes = {FORWARD: NAMES[:1], BACKWARD: NAMES[1:], BOTH: NAMES}
    return {
        pass_: max((error[name] for name in names), key=_nan_first)
        for pass_, names in passes.items()
        if error.keys() >= set(names)
    }
