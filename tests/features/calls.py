"""The call that a case of the table describes: its tensors, what the reference gives for them, and how it is run."""

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from conformance import rule
from conformance.cases import STRIDES, Call, Case, make
from torch import Tensor
from torch.utils._pytree import tree_map

import tilewise as tw
from tilewise.values.masks import intersect

from .table import FEATURES, H

D = 24
PAGE, CAPACITY, NO_PAGE = 16, 48, 1 << 30
SEQUENCE = 3 / 5
"""The second packed sequence's length, as a part of the first one's."""
KEEPS_NUMBERS = ("heads_first", "sliced", "every_second", "size_first")
"""Strides under which a tensor holds the numbers that it is given."""
POSITIONAL = ("Prefix", "PaddingLengths", "PaddingRange")
"""Masks that count the whole's rows and keys."""


@dataclass(frozen=True)
class Setting:
    """What a case sets beside the fields of a conformance Case."""

    layout: str = ""
    told: str = ""
    e4m3: bool = False
    seed: str = ""
    out_dtype: torch.dtype | None = None
    origin: tuple[int, int, int, int] | None = None
    """The whole's row and column, and how often the call's heads and batch entries are before it."""
    qkv: bool = False
    sizes: tuple[int, int, int] = (2, 33, 33)
    gradient: str = "no_grad"
    mode: str = "eager"


@dataclass
class Prepared:
    """A call, ready to run."""

    case: Case
    setting: Setting
    call: Call
    """Its numbers as a conformance case has them, padded or packed, for `rule.truth` and `rule.bounds`."""
    scales: tuple[Tensor, Tensor, Tensor] | None = None
    """Those of q, k and v in e4m3."""
    tables: tuple[Tensor, Tensor] | None = None
    """Rotary's cos and sin."""
    leaves: dict[str, Tensor] = field(default_factory=dict)
    """The tensors that have gradients, under the gradients' names, as `attention` gets them."""
    options: dict[str, Any] = field(default_factory=dict)
    """All its other arguments."""
    unpacked: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """How o and lse of packed rows become those of a batch."""


def prepare(chosen: dict[str, str], device: str, backend: str | None) -> Prepared:
    """Draw the tensors of a case."""
    sets: dict[str, Any] = {"H": H, "H_k": H, "D": D}
    for feature, name in chosen.items():
        sets |= FEATURES[feature][name].sets
    own = {one.name for one in fields(Setting)}
    setting = Setting(**{name: value for name, value in sets.items() if name in own})
    (B, M, N), packed = setting.sizes, bool(setting.layout)
    if sets.get("sink") == "q's type":
        sets["sink"] = sets.get("dtype", torch.float32)
    if packed:
        short = 1.0 if setting.layout == "cached" else SEQUENCE
        sets["lengths"] = ((M, N), (int(M * short + 0.5), int(N * SEQUENCE + 0.5)))[:B]
    if setting.layout.endswith("of none"):
        sets["unowned"] = (4, 4)
    given = {name: value for name, value in sets.items() if name not in own}
    case = Case(", ".join(f"{f} {v}" for f, v in chosen.items()), **{"B": B, "M": M, "N": N} | given)
    p = Prepared(case, setting, make(case, device))
    if setting.e4m3:
        p.call, p.scales = in_e4m3(case, p.call)
    if setting.origin:
        p.call = p.call._replace(mask=moved(p.call.mask, setting.origin[1]))
    p.options = options(p, backend)
    as_cached(p) if setting.layout.startswith("cached") else as_stored(p)
    p.leaves |= {f"dbias{n}": change.bias for n, change in enumerate(p.call.score) if isinstance(change, tw.Bias)}
    p.leaves |= {} if p.call.sink is None else {"dsink": p.call.sink}
    return p


def options(p: Prepared, backend: str | None) -> dict[str, Any]:
    """What `attention` is given beside its tensors."""
    found = rule.options(p.case, p.call, backend) | {"score": p.call.score, "out_dtype": p.setting.out_dtype}
    if p.call.seed is not None:
        found["seed"] = p.call.seed if p.setting.seed == "tensor" else int(p.call.seed)
    if p.setting.origin:
        row, column, heads, batch = p.setting.origin
        found["origin"] = tw.Origin(row, column, heads * p.case.H, 2 * p.case.H, batch)
    if p.setting.told:
        found["precision"] = told(p)
    return found


def told(p: Prepared) -> tw.EightBits:
    """K's mean and the balance of this call, or tables of rotary."""
    name = str(p.case.precision)
    if p.setting.told == "mean":
        rows, keys = (t[: len(t) - count] for t, count in zip(p.call[:2], p.case.unowned, strict=True))
        q, k = (t.reshape(1, -1, *t.shape[-2:]) for t in (rows, keys))
        found = tw.EightBits.of(name, q, k)
        return tw.EightBits(name, found.mean.nan_to_num(0.0), found.balance)
    angles = torch.arange(64, device=p.call.q.device)[:, None] * 0.1 ** torch.arange(8, device=p.call.q.device)
    p.tables = angles.cos(), angles.sin()
    return tw.EightBits(name, cos=p.tables[0], sin=p.tables[1])


def in_e4m3(case: Case, call: Call) -> tuple[Call, tuple[Tensor, Tensor, Tensor]]:
    """The call with numbers that e4m3 times a power of two gives, and these powers, one for each key head."""
    scale = torch.exp2(-torch.arange(case.H_k, device=call.q.device).float())
    of_q = scale.repeat_interleave(case.H // case.H_k)
    rounded = [
        ((t.float() / of[:, None]).to(torch.float8_e4m3fn).float() * of[:, None]).to(case.dtype)
        for t, of in zip(call[:3], (of_q, scale, scale), strict=True)
    ]
    return call._replace(q=rounded[0], k=rounded[1], v=rounded[2]), (scale, scale, scale)


def codes(t: Tensor, scale: Tensor) -> Tensor:
    """What is stored of a tensor (..., heads, size) in e4m3."""
    each = scale.repeat_interleave(t.shape[-2] // len(scale))
    return (t.float() / each[:, None]).to(torch.float8_e4m3fn)


def as_stored(p: Prepared) -> None:
    """q, k and v of a padded batch or of packed sequences, apart or as views of one tensor."""
    x = list(p.call[:3])
    if p.scales:
        x = [codes(t, scale) for t, scale in zip(x, p.scales, strict=True)]
    if p.setting.qkv:
        one = torch.stack(x, -3)
        p.leaves["dqkv"] = STRIDES[p.case.strides](one) if p.case.strides in KEEPS_NUMBERS and not p.scales else one
    else:
        p.leaves |= dict(zip(("dq", "dk", "dv"), x, strict=True))


def as_cached(p: Prepared) -> None:
    """Keys and values in a cache, with NaN in rows that nothing may read, and pages in any order."""
    case, lengths = p.case, torch.tensor([n for _, n in p.case.lengths or ()], dtype=torch.int32)
    device, B = p.call.q.device, len(lengths)
    pages, layout = p.setting.layout == "cached in pages", {}
    cache = [t.new_full((B, CAPACITY, *t.shape[1:]), torch.nan) for t in p.call[1:3]]
    for whole, t in zip(cache, p.call[1:3], strict=True):
        for b, rows in enumerate(t.split(lengths.tolist())):
            whole[b, : len(rows)] = rows
    if pages:
        width = CAPACITY // PAGE
        table = torch.randperm(B * width + 3, generator=torch.Generator().manual_seed(0))[: B * width]
        for n, whole in enumerate(cache):
            paged = whole.new_full((B * width + 3, PAGE, *whole.shape[2:]), torch.nan)
            paged[table] = whole.view(-1, PAGE, *whole.shape[2:])
            cache[n] = paged
        table = table.view(B, width).masked_fill(torch.arange(width) * PAGE >= lengths[:, None], NO_PAGE)
        ends = torch.tensor([0, *(m for m, _ in case.lengths or ())]).cumsum(0)
        layout = {"table": table.to(device), "cu_q": ends.to(device)}
    p.options["layout"] = tw.Cached(lengths.to(device), **layout)
    q, k, v = p.call.q, *cache
    if not pages:
        q = q.unflatten(0, (B, -1)) if B else q.new_empty(0, *p.setting.sizes[1:2], *q.shape[1:])
        p.unpacked = {"o": lambda t: t.reshape(q.shape[:3] + t.shape[-1:]),
                  "lse": lambda t: t.reshape(case.H, *q.shape[:2]).transpose(0, 1)}  # fmt: skip
    if p.scales:
        k, v = (codes(t, scale) for t, scale in zip((k, v), p.scales[1:], strict=True))
    elif case.strides in KEEPS_NUMBERS:
        k, v = (STRIDES[case.strides](t) for t in (k, v))
    if p.setting.qkv:
        p.leaves["dqkv"] = torch.stack([q, q, q], -3)  # that is refused
    else:
        p.leaves |= {"dq": q, "dk": k, "dv": v}


# ---- what the call should give


def expected(p: Prepared) -> tuple[rule.Results, rule.Bounds]:
    """The true results of what the case returns and differentiates, and the errors that they may have."""
    case, call = p.case, p.call
    if p.setting.mode == "autocast":
        case, call = under_autocast(case, call)
    turned, back = in_turn(p, case, call)
    true = back(whole_truth(p, case, turned(torch.float64)))
    same = p.options["precision"] if p.setting.told == "mean" else None
    allowed = rule.bounds(case, placed(p, turned(case.dtype))._replace(told=same), true)
    if p.setting.gradient in ("no_grad", "inference_mode"):
        true = {name: true[name] for name in ("o", "lse")}
    if case.loss == "o":
        del true["lse"]
    return {name: p.unpacked.get(name, lambda t: t)(t) for name, t in true.items()}, allowed


def under_autocast(case: Case, call: Call) -> tuple[Case, Call]:
    """The case in the type to which autocast casts it."""
    if case.dtype == torch.float64:
        return case, call
    cast = {name: getattr(call, name) for name in ("q", "k", "v", "do")}
    if call.sink is not None and call.sink.dtype != torch.float32:
        cast["sink"] = call.sink
    cast = {name: t if t is None else t.to(torch.bfloat16) for name, t in cast.items()}
    return replace(case, dtype=torch.bfloat16), call._replace(**cast)


def in_turn(
    p: Prepared, case: Case, call: Call
) -> tuple[Callable[[torch.dtype], Call], Callable[[rule.Results], rule.Results]]:
    """How rotary turns q and k before the call, in a type, and how it turns their gradients back."""
    if p.tables is None:
        return lambda dtype: call, lambda true: true

    def turn(t: Tensor, sign: float, lengths: Sequence[int]) -> Tensor:
        at = torch.arange(t.shape[-3]) if case.lengths is None else torch.cat([torch.arange(n) for n in lengths])
        at = torch.nn.functional.pad(at, (0, t.shape[-3] - len(at)))
        cos, sin = (table.double()[at.to(t.device)][:, None] for table in p.tables or ())
        one, two, rest = t.double().split((8, 8, t.shape[-1] - 16), -1)
        return torch.cat([one * cos - sign * two * sin, two * cos + sign * one * sin, rest], -1)

    rows, keys = ([pair[n] for pair in case.lengths or ()] + [0] for n in (0, 1))
    rows[-1], keys[-1] = case.unowned

    def turned(dtype: torch.dtype) -> Call:
        return call._replace(q=turn(call.q, 1.0, rows).to(dtype), k=turn(call.k, 1.0, keys).to(dtype))

    def back(true: rule.Results) -> rule.Results:
        return true | {"dq": turn(true["dq"], -1.0, rows), "dk": turn(true["dk"], -1.0, keys)}

    return turned, back


def moved(mask: tw.Mask, column: int) -> tw.Mask:
    """The mask with lengths that reach as far into the call's keys, which begin at a column of the whole."""
    parts = [
        part.rebuild((), tuple(t + column for t in part.tensors)) if type(part).__name__ in POSITIONAL else part
        for part in mask.parts
    ]
    return intersect(tuple(parts))


def placed(p: Prepared, call: Call) -> Call:
    """The call with masks and scores as they are at its place, by which plain torch's errors are measured."""
    if not p.setting.origin or p.setting.layout:
        return call
    origin, M, N = p.options["origin"], p.case.M, p.case.N
    mask = intersect(tuple(part.placed(origin, M, N) for part in call.mask.parts))
    return call._replace(mask=mask, score=tuple(change.placed(origin, M, N) for change in call.score))


def whole_truth(p: Prepared, case: Case, call: Call) -> rule.Results:
    """The truth of a call; at a place, of the whole, in which all other rows, keys, heads and entries are 0."""
    if not p.setting.origin:
        return rule.truth(case, call)
    row, column, heads, batch = p.setting.origin
    of_q, of_k = (slice(heads * count, (heads + 1) * count) for count in (case.H, case.H_k))
    H, H_k, length = 2 * case.H, 2 * case.H_k, max(row + case.M, column + case.N)

    def put(t: Tensor | None, count: int, at: slice, first: int) -> Tensor | None:
        """Rows (..., S, heads, size) of the whole."""
        if t is None:
            return None
        if case.lengths is not None:
            whole = t.new_zeros(t.shape[0], count, t.shape[-1])
            whole[:, at] = t
            return whole
        whole = t.new_zeros(batch + case.B, length, count, t.shape[-1])
        whole[batch:, first : first + t.shape[1], at] = t
        return whole

    dlse = None if call.dlse is None else put(call.dlse.transpose(-1, -2)[..., None], H, of_q, row)[..., 0].mT
    sink = None if call.sink is None else torch.zeros_like(call.sink).repeat(2)
    if sink is not None:
        sink[of_q] = call.sink
    at = slice(batch, None), of_q, slice(row, row + case.M), slice(column, column + case.N)
    whole = call._replace(
        q=put(call.q, H, of_q, row), k=put(call.k, H_k, of_k, column), v=put(call.v, H_k, of_k, column),
        do=put(call.do, H, of_q, row), dlse=dlse, sink=sink,
    )  # fmt: skip
    of_whole = replace(case, H=H, H_k=H_k)
    if case.lengths is None:
        sizes = batch + case.B, H, length, length
        parts = [_with_entries(part, batch) for part in call.mask.parts if type(part).__name__ in POSITIONAL]
        own = [part for part in call.mask.parts if type(part).__name__ not in POSITIONAL]
        seen = torch.zeros(sizes, dtype=torch.bool, device=call.q.device)
        seen[at] = intersect(tuple(own)).dense(case.M, case.N).to(seen.device)
        scores = tuple(_of_whole(change, sizes, at, batch, of_q) for change in call.score)
        whole = whole._replace(mask=intersect((*parts, tw.Dense(seen))), score=scores)
        true = rule.truth(replace(of_whole, B=batch + case.B, M=length, N=length), whole)
    else:
        ends = [torch.nn.functional.pad(cu, (batch, 0)) for cu in (call.layout.cu_q, call.layout.cu_k)]
        layout = tw.Varlen(*ends, call.layout.max_q, call.layout.max_k)
        mask = intersect(tuple(_with_heads(_with_entries(part, batch), H, of_q) for part in call.mask.parts))
        M, N = (max([pair[n] for pair in case.lengths], default=0) for n in (0, 1))
        sizes = batch + len(case.lengths), H, M, N
        scores = tuple(_of_whole(change, sizes, at, batch, of_q) for change in call.score)
        whole = whole._replace(layout=layout, mask=mask, score=scores)
        true = rule.truth(replace(of_whole, lengths=((0, 0),) * batch + case.lengths), whole)
    return _cut(true, call, case, at, (of_q, of_k))


def _with_entries(part: Any, batch: int) -> Any:
    """A mask with entries in front of the batch, if it has a batch."""
    added = [
        t if "H" in shape and t.shape[0] == 1 else torch.cat([t.new_zeros(batch, *t.shape[1:]), t])
        for t, shape in zip(part.tensors, part.shapes, strict=True)
    ]
    return part.rebuild(part.plain[1:], tuple(added)) if added else part


def _with_heads(part: Any, H: int, heads: slice) -> Any:
    """A mask with other heads beside the call's, if it has heads."""
    if not any("H" in shape for shape in part.shapes):
        return part
    whole = [t.new_zeros(t.shape[0], H, *t.shape[2:]) for t in part.tensors]
    for to, t in zip(whole, part.tensors, strict=True):
        to[:, heads] = t
    return part.rebuild(part.plain[1:], tuple(whole))


def _of_whole(change: tw.Score, sizes: Sequence[int], at: Sequence[slice], batch: int, heads: slice) -> tw.Score:
    """A score with tensors of the whole's sizes; an Alibi has them for its heads and batch entries alone."""
    if isinstance(change, tw.Alibi):
        old = change.slopes
        slopes = old.new_zeros(*(batch + n for n in old.shape[:-1]), sizes[1])
        slopes[(*(slice(batch, None) for _ in old.shape[:-1]), heads)] = old
        return tw.Alibi(slopes)
    if isinstance(change, tw.Bias):
        old = change.bias
        kept = [(size, one) if n != 1 else (n, slice(None)) for n, size, one in
                zip(old.shape[::-1], sizes[::-1], at[::-1], strict=False)][::-1]  # fmt: skip
        bias = old.new_zeros([size for size, _ in kept])
        bias[tuple(one for _, one in kept)] = old
        return tw.Bias(bias)
    return change


def _cut(true: rule.Results, call: Call, case: Case, at: Sequence[slice], heads: tuple[slice, slice]) -> rule.Results:
    """The part of the whole's results that is the call's."""
    batch, of_q, rows, keys = at
    if case.lengths is None:
        found = {name: true[name][batch, rows, of_q] for name in ("o", "dq")}
        found |= {"lse": true["lse"][batch, of_q, rows]}
        found |= {name: true[name][batch, keys, heads[1]] for name in ("dk", "dv")}
    else:
        found = {name: true[name][:, of_q] for name in ("o", "dq")} | {"lse": true["lse"][of_q]}
        found |= {name: true[name][:, heads[1]] for name in ("dk", "dv")}
    for n, change in enumerate(call.score):
        if isinstance(change, tw.Bias):
            own = [one if size != 1 else slice(None) for size, one in
                   zip(change.bias.shape[::-1], tuple(at)[::-1], strict=False)][::-1]  # fmt: skip
            found[f"dbias{n}"] = true[f"dbias{n}"][tuple(own)]
    return found | ({"dsink": true["dsink"][of_q]} if "dsink" in true else {})


# ---- how the call is run


def run(p: Prepared) -> rule.Results:
    """What the public functions give: results under the names of `expected`."""
    gradient, wrap, options, leaves = p.setting.gradient, MODES.get(p.setting.mode, as_it_is), p.options, dict(p.leaves)
    if p.setting.mode in COPIES:
        options = options | COPIES[p.setting.mode]({name: options[name] for name in VALUES if name in options})
        leaves |= {f"dbias{n}": one.bias for n, one in enumerate(options["score"]) if isinstance(one, tw.Bias)}
    if gradient == "inference_mode":
        with torch.inference_mode():
            options = copy.deepcopy(options)  # so that masks, too, have tensors from there
            return named(p, wrap(p, partial(forward, p, options))(*(t.clone() for t in leaves.values())))
    x = tuple(t.detach().requires_grad_() for t in leaves.values())
    if p.setting.mode == "listed":
        with torch.set_grad_enabled(gradient != "no_grad"):
            own, given = arguments(p, options, x)
            own = own[0].unbind(-3) if p.setting.qkv else own
            options = options | {"mask": tw.listed(given.pop("mask"), *own, **given)}
    if gradient == "no_grad":
        with torch.no_grad():
            return named(p, wrap(p, partial(forward, p, options))(*x))
    if gradient == "attention_backward":
        return named(p, wrap(p, partial(by_hand, p, options))(*x))
    if gradient == "func.grad":
        of_loss = torch.func.grad(partial(loss, p, options), tuple(range(len(x))), has_aux=True)
        grads, out = wrap(p, of_loss)(*x)
        return named(p, (*out, *grads))
    out = wrap(p, partial(forward, p, options))(*x)
    outs, do = zip(*through(p, out), strict=True)
    return named(p, (*out, *torch.autograd.grad(outs, x, do, allow_unused=True, materialize_grads=True)))


def arguments(p: Prepared, options: dict[str, Any], x: Sequence[Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
    """q, k and v, or qkv alone, and the options, for the leaves x."""
    given = dict(zip(p.leaves, x, strict=True))
    score = [tw.Bias(given[f"dbias{n}"]) if f"dbias{n}" in given else one for n, one in enumerate(options["score"])]
    own = [given[name] for name in OWN if name in given]
    if p.scales:
        own = [tw.Quantized(t, scale) if t.element_size() == 1 else t for t, scale in zip(own, p.scales, strict=False)]
    return own, options | {"score": tuple(score), "sink": given.get("dsink")}


def forward(p: Prepared, options: dict[str, Any], *x: Tensor, return_lse: bool = False) -> tuple[Tensor, ...]:
    """o, and lse if the case returns it."""
    own, given = arguments(p, options, x)
    given["return_lse"] = return_lse or p.case.loss != "o"
    out = tw.attention_qkvpacked(*own, **given) if p.setting.qkv else tw.attention(*own, **given)
    return out if isinstance(out, tuple) else (out,)


def through(p: Prepared, out: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The results through which gradients come, and what these are of them."""
    return [(t, do.to(t.dtype)) for t, do in zip(out, (p.call.do, p.call.dlse), strict=False) if do is not None]


def loss(p: Prepared, options: dict[str, Any], *x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One number with the case's gradients, and the results."""
    out = forward(p, options, *x)
    return torch.stack([(t.double() * do.double()).sum() for t, do in through(p, out)]).sum(), out


def by_hand(p: Prepared, options: dict[str, Any], *x: Tensor) -> tuple[Tensor, ...]:
    """The results, and the gradients that attention_backward gives for them."""
    o, lse = forward(p, options, *x, return_lse=True)
    own, given = arguments(p, options, x)
    own = own[0].unbind(-3) if p.setting.qkv else own
    do = torch.zeros_like(o) if p.call.do is None else p.call.do.to(o.dtype)
    dlse = None if p.call.dlse is None else p.call.dlse.to(lse.dtype)
    grads = tw.attention_backward(do, *own, o.detach(), lse.detach(), dlse=dlse, **given)
    grads = (torch.stack(grads[:3], -3), *grads[3:]) if p.setting.qkv else grads
    return (*(o, lse)[: len(returned(p))], *grads)


def named(p: Prepared, found: Sequence[Tensor]) -> rule.Results:
    """Results in the order of `forward`, then of the leaves' gradients; that of qkv as dq, dk and dv."""
    results = {name: t.detach() for name, t in zip([*returned(p), *p.leaves], found, strict=False)}
    if "dqkv" in results:
        results |= dict(zip(("dq", "dk", "dv"), results.pop("dqkv").unbind(-3), strict=True))
    return results


def returned(p: Prepared) -> tuple[str, ...]:
    """The names of what the case's call returns."""
    return ("o",) if p.case.loss == "o" else ("o", "lse")


def types(p: Prepared) -> dict[str, torch.dtype]:
    """The type of each result."""
    cast = p.setting.mode == "autocast" and p.case.dtype != torch.float64
    of_q = torch.bfloat16 if cast else p.case.dtype
    by_hand = p.setting.gradient == "attention_backward"  # it gives gradients of what autocast has cast
    own = dict.fromkeys(("dq", "dk", "dv"), (p.setting.out_dtype or of_q) if by_hand else p.case.dtype)
    rest = {name: t.dtype for name, t in p.leaves.items() if name not in OWN}
    if by_hand and cast and rest.get("dsink") in (torch.float16, torch.bfloat16):
        rest["dsink"] = of_q
    lse = torch.float64 if of_q == torch.float64 else torch.float32
    return {"o": p.setting.out_dtype or of_q, "lse": lse, **own, **rest}


def as_it_is(p: Prepared, f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def mapped(p: Prepared, f: Callable[..., Any]) -> Callable[..., Any]:
    """Two calls by vmap, the case's the second one; what is no q, k or v is shared."""
    dims = tuple(0 if name in OWN else None for name in p.leaves)

    def run(*x: Tensor) -> Any:
        both = [
            t if dim is None else torch.stack([t if t.element_size() == 1 else -t, t])
            for t, dim in zip(x, dims, strict=True)
        ]
        return tree_map(lambda t: t[1], torch.vmap(f, dims)(*both))

    return run


def compiled(p: Prepared, f: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager")


def autocast(p: Prepared, f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*x: Tensor) -> Any:
        with torch.autocast(x[0].device.type, torch.bfloat16):
            return f(*x)

    return run


def saved_and_loaded(values: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


OWN = ("dqkv", "dq", "dk", "dv")
VALUES = ("mask", "score", "layout", "origin", "precision")
"""Options that users keep, copy and save."""
MODES = {"vmap": mapped, "compile": compiled, "autocast": autocast}
COPIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda values: pickle.loads(pickle.dumps(values)),
    "save and load": saved_and_loaded,
}


def reasons(p: Prepared) -> dict[str, list[str]]:
    """Every back end's reasons against the call."""
    own, given = arguments(p, p.options, tuple(t.detach() for t in p.leaves.values()))
    own = own[0].unbind(-3) if p.setting.qkv and isinstance(own[0], Tensor) else own
    given.pop("seed", None)
    with torch.no_grad():
        return tw.explain(*own, **given).refusals
