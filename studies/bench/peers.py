"""Peers: the implementations measured. A peer is a value: a name, reasons against a case, and how to call it.

Every peer takes q, k, v as (batch, length, heads, head size) and gives o in the same layout. A variant may have fewer
heads of keys, or packed sequences.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.call.check import describe
from tilewise.call.operands import Operands, Saved
from tilewise.call.problem import target_of
from tilewise.call.recipe import Recipe
from tilewise.cpu.backend import Cpu
from tilewise.values.products import EIGHT_BITS, PRECISIONS, EightBits, Scaled

from . import of_torch
from .of_torch import Attention
from .suites import Case
from .variants import VARIANTS, Variant


@dataclass(frozen=True)
class Peer:
    """An implementation of attention."""

    name: str
    prepare: Callable[[Case, torch.device], Attention]
    """The call for a case; imports belong here, compilations in the first call."""
    why_not: Callable[[Case, torch.device], str | None] = lambda case, device: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What a forward runs in."""
    seeded: bool = False
    """Whether dropout follows tilewise's rule with seed `SEED`, so that its result can be checked as it is."""
    share: float = 0.0
    """Errors up to this share of a tensor's largest entry are right, too: of peers that promise no more."""
    computes: Callable[[Case], Case] = lambda case: case
    """The case it is given and judged by, where that is a variant of the one at hand."""


SEED = 1234
SHARES = {"bf16x3": 2e-5, "tf32": 2e-3, "int8": 0.03, "fp8": 0.1, "e4m3": 0.1}
"""Of the precisions that promise less than plain torch. Those of 8 bits are far above what they err, but below what a
wrong tile would give."""


def _tilewise(case: Case, device: torch.device, **options: Any) -> Attention:
    varied = case.varied
    seed = torch.full((), SEED, dtype=torch.int64, device=device) if case.dropout else None
    options |= {
        "mask": case.mask & case.padding(device),
        "score": varied.score(case.heads, device),
        "dropout": case.dropout,
        "seed": seed,
    }
    options |= {"deterministic": varied.deterministic, "layout": _packed(case, device) if varied.packed else None}
    return lambda q, k, v, sink=None: tw.attention(q, k, v, sink=sink, **options)


def _packed(case: Case, device: torch.device) -> tw.Varlen:
    cu = torch.tensor((0, *accumulate(case.lengths)), dtype=torch.int32, device=device)
    return tw.Varlen(cu, cu, max(case.lengths), max(case.lengths))


def _portable(case: Case, device: torch.device) -> Attention:
    return _tilewise(case, device, backend="triton")


def _precise(precision: str) -> Peer:
    """Make a peer of tilewise with a named precision of fp32."""

    def why_not(case: Case, device: torch.device) -> str | None:
        if case.dtype != "fp32":
            return f"a precision is for fp32, not {case.dtype}"
        if device.type == "cpu":
            return None if precision == "ieee" else "the CPU computes in plain fp32, which is tilewise ieee"
        q = torch.empty(case.shape, device="meta")
        plan = tw.explain(q, q, q, device=target_of(device), precision=precision)
        against = dict.fromkeys(reason for reasons in plan.refusals.values() for reason in reasons)
        return None if plan.backend else "; ".join(against)

    def prepare(case: Case, device: torch.device) -> Attention:
        return _tilewise(case, device, precision=precision)

    return Peer(f"tilewise {precision}", prepare, why_not, seeded=True, share=SHARES.get(precision, 0.0))


def _eight_bits(precision: str) -> Peer:
    """Make a peer of tilewise with 8-bit products."""
    return Peer(
        f"tilewise {precision}", lambda case, device: _tilewise(case, device, precision=precision),
        _needs_hopper, share=SHARES[precision],
    )  # fmt: skip


def _of_e4m3() -> Peer:
    """Make a peer of tilewise on tensors that are e4m3 already: those it is first called with, converted once."""

    def prepare(case: Case, device: torch.device) -> Attention:
        run, one, made = _tilewise(case, device, precision="fp8"), torch.ones((), device=device), {}

        def call(*tensors: Tensor) -> Tensor:
            at = tuple([t.data_ptr() for t in tensors])
            if at not in made:
                made[at] = [tw.Quantized(t.detach().to(torch.float8_e4m3fn), one) for t in tensors]
            return run(*made[at])

        return call

    return Peer("tilewise e4m3", prepare, _needs_hopper, share=SHARES["e4m3"])


def _in_eight_bits(precision: str) -> Peer:
    """Make a peer of that forward alone, on codes of the first tensors that it is called with; "e4m3" are these."""

    def prepare(case: Case, device: torch.device) -> Attention:
        from tilewise.hopper import launch
        from tilewise.hopper.plan import plan
        from tilewise.host.launch import current_stream
        from tilewise.host.outputs import empty_saved, quantized

        as_they_are, made = precision == "e4m3", {}
        scales = (torch.ones(case.batch, case.heads, device=device),) * 3 if as_they_are else ()
        products = Scaled(*scales) if as_they_are else EightBits(precision)
        recipe = Recipe(mask=(("Causal",),) if case.causal else (), products=products.plain)

        def call(*tensors: Tensor) -> Tensor:
            at = tuple([t.data_ptr() for t in tensors])
            if at not in made:
                q, k, v = (t.detach().to(torch.float8_e4m3fn if as_they_are else t.dtype) for t in tensors)
                x = Operands(q, k, v, scales)
                p = describe(x, recipe, (0, 0))
                made[at] = p, x, quantized(p, x, {})
            p, x, codes = made[at]
            saved, where = empty_saved(p, x, None)._replace(extra=codes), x.q.device
            stream = current_stream(where)
            for one in launch.forward_launches(p, plan(p), x, saved, launch.counter(where, stream)):
                one.run(stream)
            return saved.o

        return call

    return Peer(f"tilewise {precision} kernel", prepare, _needs_hopper, share=SHARES[precision])


def _needs_hopper(case: Case, device: torch.device) -> str | None:
    return None if device.type == "cuda" and target_of(device) == "sm_90" else "needs an H100 or H200"


class _Tiled(torch.autograd.Function):
    """The CPU back end without PyTorch's fused kernel."""

    backend = Cpu(fuse=False)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, seed: Tensor | None) -> Tensor:
        x = Operands(q, k, v, ())
        ctx.recipe = recipe
        saved = _Tiled.backend.forward(describe(x, recipe, (0, 0)), x, seed)
        ctx.save_for_backward(q, k, v, saved.o, saved.lse, saved.seed)
        return saved.o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        q, k, v, o, lse, seed = ctx.saved_tensors
        operands = Operands(q, k, v, ())
        problem = describe(operands, ctx.recipe, (0, 0))
        grads = _Tiled.backend.backward(problem, operands, Saved(o, lse, seed), do, None)
        return grads.q, grads.k, grads.v, None, None


def _tiled(case: Case, device: torch.device) -> Attention:
    recipe = Recipe(mask=tuple(part.plain for part in case.mask.parts), dropout=case.dropout)
    seed = torch.full((), SEED, dtype=torch.int64) if case.dropout else None
    return lambda q, k, v: _Tiled.apply(q, k, v, recipe, seed)


def standard_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, dropout: float = 0.0) -> Tensor:
    """Compute attention as a textbook writes it in torch, with every score in memory."""
    S = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5  # (B, H, M, N)
    if causal:
        hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu_(1)
        S = S.masked_fill(hidden, -math.inf)
    P = torch.softmax(S, -1)
    if dropout:
        P = torch.dropout(P, dropout, True)
    return (P @ v.transpose(1, 2)).transpose(1, 2)


def _standard(case: Case, device: torch.device) -> Attention:
    return lambda q, k, v: standard_attention(q, k, v, case.causal, case.dropout)


@contextmanager
def tf32() -> Iterator[None]:
    """Run torch's own fp32 products in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _needs_gpu(case: Case, device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"needs a GPU, this is a {device.type}"


def _needs_cpu(case: Case, device: torch.device) -> str | None:
    return None if device.type == "cpu" else "is a CPU path, this is a GPU"


def _on_cpu_only_flash_and_math(backend: SDPBackend) -> Callable[[Case, torch.device], str | None]:
    lacking = backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    return lambda case, device: of_torch.against_sdpa(case) or (_needs_gpu(case, device) if lacking else None)


def _varlen_why_not(case: Case, device: torch.device) -> str | None:
    return _needs_gpu(case, device) or of_torch.against_varlen(case)


def _flex_why_not(case: Case, device: torch.device) -> str | None:
    return "flex_attention has no dropout" if case.dropout else _needs_gpu(case, device)


def _package(name: str, module: str, dropout: bool) -> Peer:
    """Make a peer of a published FlashAttention: `flash_attn_func(q, k, v, causal=...)` in some module."""

    def why_not(case: Case, device: torch.device) -> str | None:
        if reason := _needs_gpu(case, device) or _not_installed(module):
            return reason
        return f"{module} has no dropout" if case.dropout and not dropout else None

    def prepare(case: Case, device: torch.device) -> Attention:
        attend = importlib.import_module(module).flash_attn_func
        options = {"causal": case.causal} | ({"dropout_p": case.dropout} if dropout else {})

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = attend(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result

        return call

    return Peer(name, prepare, why_not)


def _not_installed(module: str) -> str | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"the package {module} is not installed"


def _sdpa_peer(name: str, backend: SDPBackend) -> Peer:
    return Peer(f"sdpa {name}", of_torch.sdpa, _on_cpu_only_flash_and_math(backend), lambda: sdpa_kernel(backend))


def _varied(name: str, variant: Variant) -> Peer:
    """Make a peer of tilewise with one further option."""

    def computes(case: Case) -> Case:
        return case if case.variant else replace(case, variant=name, dropout=variant.dropout or case.dropout)

    def why_not(case: Case, device: torch.device) -> str | None:
        if case.variant not in ("", name):
            return "only measured beside the plain call"
        return None if case.causal or variant.full else "only measured with the causal mask"

    return Peer(name, _tilewise, why_not, seeded=True, computes=computes)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("tilewise", _tilewise, seeded=True),
        Peer("tilewise triton", _portable, _needs_gpu, seeded=True),
        Peer("tilewise tiled", _tiled, _needs_cpu, seeded=True),
        *(_precise(name) for name in PRECISIONS),
        *(_eight_bits(name) for name in EIGHT_BITS),
        _of_e4m3(),
        *(_in_eight_bits(name) for name in (*EIGHT_BITS, "e4m3")),
        Peer("standard", _standard),
        Peer("standard tf32", _standard, _needs_gpu, tf32, share=SHARES["tf32"]),
        Peer("sdpa", of_torch.sdpa, lambda case, device: of_torch.against_sdpa(case)),
        _sdpa_peer("cudnn", SDPBackend.CUDNN_ATTENTION),
        _sdpa_peer("flash", SDPBackend.FLASH_ATTENTION),
        _sdpa_peer("efficient", SDPBackend.EFFICIENT_ATTENTION),
        _sdpa_peer("math", SDPBackend.MATH),
        Peer("flex", of_torch.flex, _flex_why_not),
        Peer("varlen_attn", of_torch.varlen, _varlen_why_not),
        _package("flash-attn 2", "flash_attn", dropout=True),
        _package("flash-attn 3", "flash_attn_interface", dropout=False),
        _package("flash-attn 4", "flash_attn.cute", dropout=False),
        *(_varied(name, variant) for name, variant in VARIANTS.items()),
    )
}
"""Every peer, by name; studies add theirs."""
CHANGED: dict[str, str] = {}
"""Peers that are a kernel of tilewise with one thing changed, and the peer that has it unchanged: studies add them."""
