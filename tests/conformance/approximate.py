"""What 8-bit products should give: the approximation in plain torch, beside which a back end's errors are held.

`tilewise.quantize.codes` has the codes. Here they are multiplied in fp64, and what every kernel rounds is rounded: P,
dS, and the results. The row maximum by which P is lowered is another in every loop over keys, and so are the
entries of P that round up. So P is rounded for several maxima (`turn`), and the worst counts; on a GPU, where Hopper's
kernel takes lines, with them and without.
"""

import torch
from torch import Tensor

from tilewise.call.check import check_arguments, describe
from tilewise.program import Entries
from tilewise.quantize import codes as quantize
from tilewise.quantize import dequantize
from tilewise.values.dropout import dropout_keep, dropout_rescale

from .cases import Call, Case

TURNS = (0.0, 0.17, 0.41, 0.69)
"""Powers of two by which the row maximum is larger than the logits'."""
LIFT = 0.058
"""By how much the line is lower, so that its errors are centred."""


def on_a_line(P: Tensor) -> Tensor:
    """P in e4m3 as Hopper computes it for half of the keys: 8 (x + 15) are the bits of about 256 2^x."""
    bits = (8 * (torch.log2(P) + 15 - LIFT)).clamp(min=0).round()
    return bits.to(torch.uint8).view(torch.float8_e4m3fn).double() / 256


def emulated(case: Case, call: Call, turn: float, lines: bool) -> dict[str, Tensor]:
    """o, lse and all gradients of a padded call with 8-bit products; with `lines`, half of P is `on_a_line`."""
    precision = call.told or case.precision
    given = call.mask, call.score, case.scale, call.sink, case.dropout, None, precision, False, None
    x, recipe, longest = check_arguments(call.q, call.k, call.v, *given)
    p = describe(x, recipe, longest)
    codes = quantize.quantize(p, x)
    q, k, v = (t.double() for t in dequantize.multiplied(p, x, codes)[:3])

    def rounded(t: Tensor) -> Tensor:
        return t.to(p.dtype).double()

    def repeat(t: Tensor) -> Tensor:
        return t.repeat_interleave(p.H // p.H_k, 2)

    at = Entries.of(p.B, p.H, p.M, p.N, q.device)
    stages = [torch.einsum("bmhd,bnhd->bhmn", q, repeat(k)) * p.scale]
    for change in call.score:
        stages.append(change.apply(stages[-1], at))
    S = stages[-1].masked_fill(~call.mask.dense(p.M, p.N).to(q.device), -torch.inf)
    sink = S.new_full((p.H,), -torch.inf) if call.sink is None else call.sink.double()
    top = torch.cat([S, sink[:, None, None].expand(*S.shape[:3], 1)], -1).amax(-1, keepdim=True)
    m = top.masked_fill(top.isneginf(), 0.0) + turn * torch.log(torch.tensor(2.0))
    P = torch.exp(S - m)
    of_product = dequantize.probabilities(p, P) if p.recipe.precision == "fp8" else rounded(P)
    if lines and p.recipe.precision == "fp8" and not call.score:
        of_product = torch.where((at.j & 8) > 0, on_a_line(P), of_product)
    summed = of_product if p.recipe.precision == "fp8" and not call.score else P
    l = summed.sum(-1, keepdim=True) + torch.exp(sink[:, None, None] - m)
    Z: Tensor | float = 1.0
    if call.seed is not None:
        heads = torch.arange(p.B * p.H, device=q.device).view(p.B, p.H, 1, 1)
        Z = dropout_keep(int(call.seed), heads, at.i, at.j, case.dropout) * dropout_rescale(case.dropout)
    o = rounded(torch.einsum("bhmn,bnhd->bmhd", of_product * Z / l.masked_fill(l == 0.0, 1.0), repeat(v)))
    L = m + torch.log(l)  # of the codes' logits
    results = {"o": o, "lse": L[..., 0] + dequantize.shift_of(p, x, codes)}

    q, k, v = (t.double() for t in dequantize.dequantized(p, x, codes)[:3])
    do = torch.zeros_like(o) if call.do is None else call.do.double()
    dlse = torch.zeros_like(results["lse"]) if call.dlse is None else call.dlse.double()
    P = torch.exp(S - L.masked_fill(L.isneginf(), 0.0))
    delta = (do * o).sum(-1).transpose(1, 2) - dlse
    dS = rounded(P * (torch.einsum("bmhd,bnhd->bhmn", do, repeat(v)) * Z - delta[..., None]))
    gradients = {"dv": torch.einsum("bhmn,bmhd->bnhd", rounded(P * Z), do)}
    for n, change in reversed(list(enumerate(call.score))):
        sums = [torch.zeros_like(t, dtype=dS.dtype) if change.learns else None for t in change.tensors]
        dS = change.pull(dS, stages[n], at, sums)
        gradients |= {f"dbias{n}": total for total in sums if total is not None}
    gradients["dq"] = torch.einsum("bhmn,bnhd->bmhd", dS, repeat(k)) * p.scale
    if quantize.smooths(p):  # rows of dS sum to dlse, and K lost its mean
        missing = dlse.transpose(1, 2)[..., None] * dequantize.mean_of_keys(p, x, codes) * p.scale
        gradients["dq"] = gradients["dq"] + missing.masked_fill(L.transpose(1, 2).isneginf(), 0.0)
    gradients["dk"] = torch.einsum("bhmn,bmhd->bnhd", dS, q) * p.scale
    for name in ("dk", "dv"):
        gradients[name] = gradients[name].unflatten(2, (p.H_k, -1)).sum(3)
    if call.sink is not None:
        of_sink = torch.exp(sink[:, None] - L[..., 0]).masked_fill(L[..., 0].isneginf(), 0.0)
        gradients["dsink"] = (of_sink * -delta).sum((0, 2))
    # sums over sequences and heads are rounded by the call, once
    return results | {name: rounded(t) if name in ("dq", "dk", "dv") else t for name, t in gradients.items()}
