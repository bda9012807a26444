"""The one rule: as accurate as plain torch.

The truth is `tilewise.reference` in fp64. Plain torch is attention written out, in the inputs' own type, with
autograd's gradients. For o, lse, dq, dk, dv, dbias and dsink alike, the largest error may be a factor times that of
plain torch, plus two units in the last place of the tensor's largest entry. Where the truth is not finite, neither is
the result.

Two things make "that of plain torch" a measure rather than luck on tensors of a few hundred numbers. Plain torch sums
in several orders (rows, keys and head size shuffled, q or the logits scaled, which leaves the truth as it is), and the
worst counts. And its gradients are taken in both forms, whichever errs more: through the softmax, which keeps P; and
the paper's, which like every back end computes S again, summing in another order, P = 2^(S log2 e - L log2 e) from it,
and subtracts delta = rowsum(dO * O). Where L = m + log l is so large that log l is lost in it, they leave S one by one.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.attention import reference
from tilewise.program import Entries
from tilewise.values.dropout import dropout_keep, dropout_rescale
from tilewise.values.masks import intersect
from tilewise.values.products import EIGHT_BITS

from .approximate import TURNS, emulated
from .cases import Call, Case

Results = dict[str, Tensor]
"""o, lse, dq, dk, dv, and where there are any dbias0, dbias1, … and dsink."""

LOG2E = math.log2(math.e)
UNITS = 2
"""In the last place."""

ORDERS = {"tiny": 32, "large": 4}
"""In which plain torch sums; among many numbers the worst is less a matter of luck."""

APPROXIMATE = 1.1
"""Times the error of 8-bit products in plain torch (`approximate.py`)."""

OF_LARGEST = {"bf16x3": 2e-5, "tf32": 2e-3}
"""On a GPU these precisions are measured by the tensor's largest entry."""


def run(case: Case, call: Call, backend: str | None) -> Results:
    """What a back end gives, through the public functions."""
    leaves, score, sink = _leaves(call)
    given = options(case, call, backend) | {"score": score, "sink": sink, "seed": call.seed, "return_lse": True}
    own = [leaves.pop(name) for name in ("dq", "dk", "dv")]
    if case.strides != "qkvpacked":
        o, lse = tw.attention(*own, **given)
        return _differentiate(call, dict(zip(("dq", "dk", "dv"), own, strict=True)) | leaves, o, lse)
    qkv = torch.stack(own, -3).detach().requires_grad_()
    o, lse = tw.attention_qkvpacked(qkv, **given)
    found = _differentiate(call, {"dqkv": qkv} | leaves, o, lse)
    return found | dict(zip(("dq", "dk", "dv"), found.pop("dqkv").unbind(-3), strict=True))


def options(case: Case, call: Call, backend: str | None) -> dict[str, Any]:
    """The arguments of `attention` and `explain` that have no gradient."""
    return {
        "mask": call.mask,
        "scale": case.scale,
        "dropout": case.dropout,
        "layout": call.layout,
        "precision": case.precision,
        "deterministic": case.deterministic,
        "backend": backend,
    }


def truth(case: Case, call: Call) -> Results:
    """The reference in fp64."""
    return _of_sequences(call, lambda dense: _true_results(case, dense))


def _of_sequences(call: Call, results: Callable[[Call], Results]) -> Results:
    """The results of a padded call, or of each packed sequence, joined."""
    if call.layout is None:
        return results(call)
    biases = {f"dbias{n}": one.bias for n, one in enumerate(call.score) if isinstance(one, tw.Bias)}
    sums = {name: torch.zeros_like(bias, dtype=torch.float64) for name, bias in biases.items()}
    parts = []
    for b, c in _sequences(call):
        found = results(c)
        for name, total in sums.items():
            own = total[_own(total, "BHMN", b, c.q.shape[1], c.k.shape[1])]
            own += found[name].sum_to_size(own.shape)
        parts.append({n: t if n == "dsink" else t[b] for n, t in found.items() if n not in sums})
    behind = {name: t.double() for name, t in _unowned(call).items()}
    joined = {n: torch.cat([*(part[n] for part in parts), t], -1 if n == "lse" else 0) for n, t in behind.items()}
    if call.sink is None:
        return joined | sums
    nothing = torch.zeros_like(call.sink, dtype=torch.float64)
    return joined | sums | {"dsink": sum((part["dsink"] for part in parts), nothing)}


def written_out(case: Case, call: Call, order: int = 0) -> list[Results]:
    """Plain torch: attention written out in the type of the inputs, with both forms of its gradients."""
    leaves, score, sink = _leaves(call)
    live = call._replace(q=leaves["dq"], k=leaves["dk"], v=leaves["dv"], score=score, sink=sink)
    if call.layout is None:
        o, lse, paper = _attention_written_out(case, live, order)
    else:
        parts = []
        for b, c in _sequences(live):
            o, lse, paper = _attention_written_out(case, c, order)
            parts.append((o[b], lse[b], paper))
        behind, nothing = _unowned(live), live.q[:0].sum()  # a zero with gradients, where there is no sequence
        parts.append((behind["o"] + nothing, behind["lse"] + nothing, nothing))
        o, lse = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], -1)
        paper = torch.stack([part[2] for part in parts]).sum()
    wanted = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
    by_paper = torch.autograd.grad(paper, list(leaves.values()), **wanted)
    by_autograd = _differentiate(call, leaves, o, lse)
    return [by_autograd, by_autograd | dict(zip(leaves, by_paper, strict=True))]


def plain_errors(case: Case, call: Call, true: Results) -> Iterator[dict[str, float]]:
    """The errors of plain torch, for each order it sums in and each form of its gradients."""
    for order in range(ORDERS[case.size]):
        yield from (errors(form, true) for form in written_out(case, call, order))


def rival(case: Case, call: Call, kernel: SDPBackend = SDPBackend.EFFICIENT_ATTENTION) -> Results:
    """Torch's memory-efficient kernel, which is for GPUs, where it covers the case; else nothing. It gives no lse that
    could be compared, and no gradient through one. It gets copies of all tensors: it refuses many strides."""
    covered = not (case.lengths or call.score or case.sink or case.dropout or 0 in call.q.shape)
    sizes = all(t.shape[-1] % 8 == 0 for t in (call.q, call.v))
    if not (covered and sizes and case.H_k == case.H and case.values == "normal" and case.N > 0):
        return {}
    leaves, *_ = _leaves(call)
    seen = call.mask.dense(case.M, case.N).to(call.q.device)
    seen = seen.expand(case.B, case.H, case.M, case.N)
    if not bool(seen.any(-1).all()):
        return {}
    q, k, v = (leaves[name].transpose(1, 2).clone(memory_format=torch.contiguous_format) for name in ("dq", "dk", "dv"))
    with sdpa_kernel(kernel):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=case.scale).transpose(1, 2)
    if case.loss != "o":
        return {"o": o.detach()}
    grads = torch.autograd.grad(o, list(leaves.values()), call.do.clone(memory_format=torch.contiguous_format))
    return {"o": o.detach(), **dict(zip(leaves, grads, strict=True))}


def errors(got: Results, true: Results, precision: str | None = None) -> dict[str, float]:
    """The largest error of each result where the truth is finite; in 8 bits the root mean square."""
    size = _root_mean_square if precision in EIGHT_BITS else _largest
    return {name: size((got[name].double() - t)[t.isfinite()]) for name, t in true.items() if name in got}


class Bounds:
    """The error that the rule allows in each result: a factor times the worst of several. The worst only grows, so that
    what one of them already allows needs no more of them."""

    def __init__(self, factor: float, worst_of: Iterator[dict[str, float]], units: dict[str, float]):
        self.factor, self.worst_of, self.units = factor, worst_of, units
        self.worst = dict.fromkeys(units, 0.0)

    def misses(self, found: dict[str, float]) -> dict[str, tuple[float, float]]:
        """The errors that are larger than allowed, each with what is allowed."""
        while True:
            allowed = {name: self.factor * error + self.units[name] for name, error in self.worst.items()}
            misses = {name: (error, allowed[name]) for name, error in found.items() if not error <= allowed[name]}
            if not misses or (more := next(self.worst_of, None)) is None:
                return misses
            self.worst |= {name: max(self.worst[name], error) for name, error in more.items()}


def bounds(case: Case, call: Call, true: Results) -> Bounds:
    """The error that the rule allows in each result."""
    types = result_types(call)
    units = {name: UNITS * unit(t, types[name]) for name, t in true.items()}
    if case.precision in EIGHT_BITS:
        ways = product(TURNS, (False, True) if call.q.is_cuda else (False,))
        found = (_of_sequences(call, lambda dense, way=way: emulated(case, dense, *way)) for way in ways)
        return Bounds(APPROXIMATE, (errors(each, true, case.precision) for each in found), units)
    if call.q.is_cuda and case.precision in OF_LARGEST:
        largest = {name: _largest(t[t.isfinite()]) for name, t in true.items()}
        return Bounds(OF_LARGEST[case.precision], iter([largest]), dict.fromkeys(true, 0.0))
    if case.dtype == torch.float64:  # the truth is as rounded as the result: scale what fp32 does to the same numbers
        return Bounds(2.0 * 2.0**-29, plain_errors(case, _narrowed(call), true), units)
    if case.precision in ("fp16x3", "tf32x3") and call.q.is_cuda:
        return Bounds(2.0, chain([errors(rival(case, call), true)], plain_errors(case, call, true)), units)
    return Bounds(1.5 if case.dtype == torch.float32 else 2.0, plain_errors(case, call, true), units)


def assert_as_accurate_as_torch(got: Results, true: Results, allowed: Bounds, precision: str | None = None) -> None:
    """Every result has the truth's shape and non-finite entries, and no error above what is allowed."""
    assert got.keys() == true.keys()
    for name, t in true.items():
        x = got[name]
        assert x.shape == t.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(t.shape)}"
        wrong = _kind(x) != _kind(t)
        assert not wrong.any(), (
            f"{name} is {x[wrong][:4].tolist()} where the truth is {t[wrong][:4].tolist()}, {int(wrong.sum())} entries"
        )
    misses = allowed.misses(errors(got, true, precision))
    told = "; ".join(f"{name} is off by {error:.3g}, allowed {bound:.3g}" for name, (error, bound) in misses.items())
    assert not misses, told


def result_types(call: Call) -> dict[str, torch.dtype]:
    """The type that each result must have."""
    exact = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    of_gradients = {name: t.dtype for name, t in _leaves(call)[0].items()}
    return {"o": call.q.dtype, "lse": exact, **of_gradients}


def unit(t: Tensor, dtype: torch.dtype) -> float:
    """One unit in the last place of the largest finite entry, in a type."""
    largest = _largest(t[t.isfinite()])
    return math.ldexp(torch.finfo(dtype).eps, math.frexp(largest)[1] - 1) if largest else 0.0


def _leaves(call: Call) -> tuple[Results, tuple[tw.Score, ...], Tensor | None]:
    """Tensors to differentiate by, under their gradients' names; the scores and the sink made of them."""
    leaves = {f"d{name}": getattr(call, name).detach().requires_grad_() for name in ("q", "k", "v")}
    score = list(call.score)
    for index, change in enumerate(score):
        if isinstance(change, tw.Bias):
            leaves[f"dbias{index}"] = change.bias.detach().requires_grad_()
            score[index] = tw.Bias(leaves[f"dbias{index}"])
    if call.sink is not None:
        leaves["dsink"] = call.sink.detach().requires_grad_()
    return leaves, tuple(score), leaves.get("dsink")


def _differentiate(call: Call, leaves: Results, o: Tensor, lse: Tensor) -> Results:
    """The results, with the gradients of o * do + lse * dlse."""
    through = [(out, grad) for out, grad in ((o, call.do), (lse, call.dlse)) if grad is not None]
    grads = torch.autograd.grad(
        [out for out, _ in through],
        list(leaves.values()),
        [grad.to(out.dtype) for out, grad in through],
        allow_unused=True,
        materialize_grads=True,
    )
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def _true_results(case: Case, call: Call) -> Results:
    q, k, v = (t.double() for t in (call.q, call.k, call.v))
    sink = None if call.sink is None else call.sink.double()
    given = {"mask": call.mask, "score": call.score, "scale": case.scale, "sink": sink, "dropout": case.dropout}
    seed = 0 if call.seed is None else int(call.seed)
    o, lse = reference.attention(q, k, v, **given, seed=seed)
    do = torch.zeros_like(o) if call.do is None else call.do.double()
    dlse = None if call.dlse is None else call.dlse.double()
    grads = reference.gradients(q, k, v, do, dlse, **given, seed=seed)
    of_scores = {f"dbias{n}": g for n, g in enumerate(grads.scores) if isinstance(call.score[n], tw.Bias)}
    of_sink = {} if grads.sink is None else {"dsink": grads.sink}
    return {"o": o, "lse": lse, "dq": grads.q, "dk": grads.k, "dv": grads.v, **of_scores, **of_sink}


def _attention_written_out(case: Case, call: Call, order: int) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse, and a number whose gradients are the paper's formula for those of o * do + lse * dlse."""
    M, N = call.q.shape[1], call.k.shape[1]
    rows, keys, size_v = (_shuffled(n, order, call.q.device) for n in (M, N, call.v.shape[-1]))
    q, k, v = (t.transpose(1, 2) for t in (call.q, call.k, call.v))  # (B, H, S, D)
    k, v = (t.repeat_interleave(case.H // case.H_k, 1) for t in (k, v))
    q, k, v = q[:, :, rows], k[:, :, keys], v[:, :, keys][..., size_v]
    i, j = rows[:, None], keys[None, :]
    seen = call.mask.dense(M, N).to(q.device).expand(*q.shape[:2], M, N)[:, :, i, j]

    def logits(order: int) -> Tensor:
        size = _shuffled(case.D, order, q.device)
        scale = case.D**-0.5 if case.scale is None else case.scale
        S = (q[..., size] * scale) @ k[..., size].mT if order % 2 else q[..., size] @ k[..., size].mT * scale
        for change in call.score:
            S = change.apply(S, Entries.of(q.shape[0], case.H, M, N, q.device)._replace(i=i, j=j))
        S = S.masked_fill(~seen, -torch.inf)
        if call.sink is not None:
            S = torch.cat([S, call.sink.to(S.dtype)[:, None, None].expand(*S.shape[:3], 1)], -1)
        return S

    S = logits(order)
    blind = S.isneginf().all(-1, keepdim=True)
    P = torch.softmax(S.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    wide = S.to(torch.promote_types(S.dtype, torch.float32))
    lse = torch.logsumexp(wide.masked_fill(blind, 0.0), -1, keepdim=True) if S.shape[-1] else wide.sum(-1, keepdim=True)
    lost = lse.isfinite() & (lse.abs() * torch.finfo(lse.dtype).eps > 0.1)
    shifted = logits(order + 1).to(wide.dtype) - torch.where(lost, lse, 0.0).detach()
    L = torch.where(lost, torch.logsumexp(shifted, -1, keepdim=True), lse).detach() if S.shape[-1] else lse.detach()
    again = torch.exp2(shifted * LOG2E - L * LOG2E).to(S.dtype)
    kept: Tensor | float = 1.0
    if call.seed is not None:
        row = torch.arange(q.shape[0] * case.H, device=q.device).view(q.shape[0], case.H, 1, 1)
        kept = dropout_keep(int(call.seed), row, i, j, case.dropout).to(S.dtype)
        kept = kept * dropout_rescale(case.dropout)
    o = P[..., :N] * kept @ v
    do = torch.zeros_like(o) if call.do is None else call.do.transpose(1, 2)[:, :, rows][..., size_v]
    delta = (o * do).detach().sum(-1, keepdim=True)
    if call.dlse is not None:
        delta = delta - call.dlse[:, :, rows, None].to(delta.dtype)
    paper = ((again[..., :N] * kept @ v) * do).sum() - (again * delta).sum()
    lse = lse.masked_fill(blind, -torch.inf).squeeze(-1)
    back = torch.argsort(rows)
    return o[:, :, back][..., torch.argsort(size_v)].transpose(1, 2), lse[:, :, back], paper


def _shuffled(size: int, order: int, device: torch.device) -> Tensor:
    """0 to size - 1; in order for order 0."""
    generator = torch.Generator().manual_seed(order)
    return (torch.randperm(size, generator=generator) if order else torch.arange(size)).to(device)


def _sequences(call: Call) -> Iterator[tuple[int, Call]]:
    """Each packed sequence b as a dense call, with b entries before it, so that dropout counts it as entry b."""
    ends_q, ends_k = call.layout.cu_q.tolist(), call.layout.cu_k.tolist()  # type: ignore[union-attr]
    for b in range(len(ends_q) - 1):
        rows, columns = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        do, dlse = None, None
        if call.do is not None:
            do = call.do.new_zeros(b + 1, *call.do[rows].shape)
            do[b] = call.do[rows]
        if call.dlse is not None:
            dlse = call.dlse.new_zeros(b + 1, *call.dlse[:, rows].shape)
            dlse[b] = call.dlse[:, rows]
        yield (
            b,
            call._replace(
                q=call.q[rows].expand(b + 1, -1, -1, -1),
                k=call.k[columns].expand(b + 1, -1, -1, -1),
                v=call.v[columns].expand(b + 1, -1, -1, -1),
                mask=intersect(tuple(_repeated(part, b, rows, columns) for part in call.mask.parts)),
                score=tuple(_repeated(change, b, rows, columns) for change in call.score),
                do=do,
                dlse=dlse,
                layout=None,
            ),
        )


def of_sequence(value: Any, b: int, m: int | None = None, n: int | None = None) -> Any:
    """A mask or score of sequence b alone, and of its m rows and n keys."""
    blocks = -(-m // value.size[0]) if m is not None and isinstance(value, tw.Blocks) else None
    pairs = zip(value.tensors, value.shapes, strict=True)
    cut = [t[_own(t, whole, b, m, n, blocks)] for t, whole in pairs]
    return value.rebuild(value.plain[1:], tuple(cut)) if cut else value


def _own(
    t: Tensor, whole: str, b: int, m: int | None = None, n: int | None = None, blocks: int | None = None
) -> tuple[slice, ...]:
    """Where a tensor has what is sequence b's."""
    sizes = {"B": slice(b, b + 1), "M": slice(m), "N": slice(n), "R": slice(blocks)}
    every = zip(whole[len(whole) - t.ndim :], t.shape, strict=True)
    return tuple([slice(None) if size == 1 or c not in sizes else sizes[c] for c, size in every])


def _repeated(value: Any, b: int, rows: slice, columns: slice) -> Any:
    """A mask or score of sequence b, for b entries before it, too."""
    value = of_sequence(value, b, rows.stop - rows.start, columns.stop - columns.start)
    pairs = zip(value.tensors, value.shapes, strict=True)
    tensors = [t.expand(b + 1, *t.shape[1:]) if t.ndim == len(whole) else t for t, whole in pairs]
    return value.rebuild(value.plain[1:], tuple(tensors)) if tensors else value


def _unowned(call: Call) -> Results:
    """Rows of the results that no packed sequence owns."""
    (q, k, v), ends = call[:3], (call.layout.cu_q, call.layout.cu_k)  # type: ignore[union-attr]
    rows, keys = (t.shape[0] - int(cu[-1]) for t, cu in zip((q, k), ends, strict=True))
    dq, dk, dv = q.new_zeros(rows, *q.shape[1:]), k.new_zeros(keys, *k.shape[1:]), v.new_zeros(keys, *v.shape[1:])
    o, lse = q.new_zeros(rows, q.shape[1], v.shape[-1]), q.new_full((q.shape[1], rows), -torch.inf)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _narrowed(call: Call) -> Call:
    """An fp64 call in fp32."""
    score = tuple(tw.Bias(c.bias.float()) if isinstance(c, tw.Bias) else c for c in call.score)
    fields = ("q", "k", "v", "do", "dlse", "sink")
    given = {name: t.float() for name in fields if (t := getattr(call, name)) is not None}
    return call._replace(score=score, **given)


def _largest(t: Tensor) -> float:
    return t.double().abs().max().item() if t.numel() else 0.0


def _root_mean_square(t: Tensor) -> float:
    return t.double().square().mean().sqrt().item() if t.numel() else 0.0


def _kind(t: Tensor) -> Tensor:
    """0 for finite numbers, 1 for inf, -1 for -inf, 2 for NaN."""
    return t.isposinf().int() - t.isneginf().int() + 2 * t.isnan().int()
