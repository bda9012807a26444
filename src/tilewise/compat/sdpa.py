"""Run PyTorch's scaled_dot_product_attention on tilewise, in code that stays as it is.

`use` and `install` override `aten::scaled_dot_product_attention` for the devices named, in the whole process. Results,
gradients, shapes and errors are PyTorch's. A call that tilewise has no name for, or would slow down, falls back:
PyTorch then chooses among its own kernels, as if nothing were installed. `tilewise.count_calls` counts both.

Install before the first torch.compile: what is compiled stays as it was compiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..attention.api import FULL
from ..attention.eager import attend, attend_plain, learn
from ..call.backend import FORWARD, ON_TRITON, candidates, load, select
from ..call.calls import Call, find, key_of, problem_of
from ..call.check import check_arguments, describe_fake
from ..call.count import COUNTING, count_fell_back
from ..call.dispatch import PLAIN, transformed
from ..call.operands import Operands
from ..call.problem import Problem, target_of
from ..call.recipe import Recipe
from ..values.dropout import Dropout
from ..values.intervals import Causal
from ..values.layout import PADDED
from ..values.masks import Mask
from ..values.score import Bias, Score
from ..values.tables import Dense
from ..values.value import Unsupported
from .flash_attn.call import wants_gradients

__all__ = ["install", "uninstall", "use"]

SDPA = torch.ops.aten.scaled_dot_product_attention.default
FAST_PATH = torch.ops.aten._native_multi_head_attention.default
"""The operator of nn.MultiheadAttention and nn.TransformerEncoderLayer in evaluation."""
KEYS = {"cuda": "CUDA", "cpu": "CPU"}
LEAST_LENGTH = 256
"""Where nothing is measured, calls of at least this many queries times as many keys are taken."""
MEASURED = {
    "sm_90": {
        (64, False): (256, 512),
        (64, True): (128, 1024),
        (128, False): (512, 512),
        (128, True): (512, 1024),
        (256, False): (512, 512),
        (256, True): (512, 512),
    }
}
"""From which length on, with gradients and without, 16-bit calls are at least as fast as the fastest of PyTorch's.

By chip, greatest head size, and whether the mask is causal; from benchmarks/results/nvidia-h200/bench.json.
"""
FEW_QUERIES = 128
"""The fewest queries of what was measured."""


class Settings(NamedTuple):
    """The arguments of `install`."""

    devices: tuple[str, ...]
    always: bool


_settings: Settings | None = None
"""Those in force; None where nothing is installed."""
_undo = ExitStack()
"""What `uninstall` does."""
CAUSAL = Causal()
COUNTED: set[str] = set()
"""Devices whose calls are counted where `install` leaves them alone; `run` adds all, because it tells at the end."""


def install(devices: Sequence[str] = ("cuda",), always: bool = False) -> None:
    """Run scaled_dot_product_attention on tilewise from now on; the same call again changes nothing.

    Args:
        devices: whose calls to take: "cuda" (also ROCm's) and "cpu".
        always: take every call that a back end takes. By default only calls on a GPU whose length is large enough,
            by measurements on this chip, or else from 256 x 256 entries of the score matrix on.

    Raises TypeError or ValueError for a wrong argument, RuntimeError if it is installed with other arguments.
    """
    settings = _checked(devices, always)
    if _settings not in (None, settings):
        raise RuntimeError(
            f"scaled_dot_product_attention is on tilewise with {_settings} already; call uninstall() first"
        )
    _change(settings)


def uninstall() -> None:
    """Give scaled_dot_product_attention back to PyTorch; nothing stays behind."""
    _change(None)


@contextmanager
def use(devices: Sequence[str] = ("cuda",), always: bool = False) -> Iterator[None]:
    """Run scaled_dot_product_attention on tilewise inside a `with`, in all threads; then restore what was before.

    Arguments are those of `install`; raises TypeError or ValueError if one is wrong.
    """
    before = _settings
    _change(_checked(devices, always))
    try:
        yield
    finally:
        _change(before)


def _checked(devices: Sequence[str], always: bool) -> Settings:
    if not isinstance(always, bool):
        raise TypeError(f"always must be True or False, got {always!r}; leave it out for False")
    return Settings(check_devices(devices), always)


def check_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices named, if they are some of `KEYS`; else raise ValueError."""
    named = () if isinstance(devices, str) else tuple(devices)
    if not named or not KEYS.keys() >= set(named):
        raise ValueError(f'devices must be some of "cuda" and "cpu", got {devices!r}; write devices=("cuda",)')
    return named


def _change(settings: Settings | None) -> None:
    """Replace the override by one with other settings, or by none."""
    global _settings  # noqa: PLW0603, the dispatcher that it describes is global, too
    import torch.compiler.config as compiler

    if settings == _settings:
        return
    _undo.close()
    _settings = settings
    if settings is None:
        return
    library = torch.library.Library("aten", "IMPL")
    _undo.callback(library._destroy)
    for device in {*settings.devices, *COUNTED}:
        key, route = KEYS[device], _route if device in settings.devices else _leave
        library.impl(SDPA, route, f"Autograd{key}")
        library.impl(SDPA, route, key)  # inference mode passes by the other one
    library.impl(FAST_PATH, _fast_path, "BackendSelect", with_keyset=True)  # all devices pass by this key
    # PyTorch keeps compiled code on disk by the graph, in which our operator and its own look alike
    before = compiler.cache_key_tag  # type: ignore[attr-defined]
    _undo.callback(setattr, compiler, "cache_key_tag", before)
    compiler.cache_key_tag = f"{before};{__name__} {settings}"  # type: ignore[attr-defined]


def _fast_path(keyset: Any, query: Tensor, *args: Any, **options: Any) -> Any:
    """Run `FAST_PATH` as PyTorch does, and count it unless it calls scaled_dot_product_attention by itself."""
    counts = next(iter(COUNTING), None)
    before = counts and counts.total()
    result = FAST_PATH.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), query, *args, **options)
    devices = _settings.devices if _settings else ()
    if counts and counts.total() == before and query.device.type in {*devices, *COUNTED}:
        count_fell_back("the C++ fast path of nn.MultiheadAttention")
    return result


def _leave(query: Tensor, *operands: Any, **options: Any) -> Tensor:
    """Leave a call to PyTorch on a device that is not taken, and count it."""
    if COUNTING:
        count_fell_back(f"it is on a {query.device.type.upper()}")
    return SDPA.decompose(query, *operands, **options)  # type: ignore[return-value]


def _route(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run one call on tilewise, or on PyTorch."""
    of_call, at, extra = (query, key, value), None, () if attn_mask is None else (attn_mask,)
    given = [*of_call, *extra]
    if torch._C._get_overrideable_sdp_enabled() and not is_compiling():  # type: ignore[attr-defined]
        # else sdpa_kernel(...) names other back ends
        mask, options = CAUSAL if is_causal else FULL, (_settings, dropout_p, scale, enable_gqa, len(extra))
        at = key_of(given, mask, (), None, PADDED, None, False, *options)
    if at is not None and (found := find(at, given)) is not None:
        x = _operands(of_call, is_causal)
        o = attend_plain((*x, *extra), Dropout(dropout_p).seed(None, query), found, both=False)
        return _as_given(of_call, attn_mask, dropout_p, enable_gqa, o)
    against = _against_call(of_call, attn_mask, is_causal, enable_gqa)
    if against is None:
        of_heads = attn_mask
        if attn_mask is not None and attn_mask.ndim == query.ndim == 3:
            of_heads = attn_mask.unsqueeze(1)
        mask, score = mask_and_score(of_heads, is_causal)
        q, k, v = _operands(of_call, is_causal)
        try:
            x, recipe, longest = check_arguments(q, k, v, mask, score, scale, None, dropout_p, None, None, False, None)
            problem, name = _described(x, recipe)
            against = _against_running(x, problem, name)
        except (TypeError, ValueError) as error:
            against = str(error).partition(";")[0]
        else:
            if against is None:
                seed = Dropout(recipe.dropout).seed(None, x.q)
                call = Call(recipe, longest)
                o = attend((*x[:3], *x.extra), seed, call)[0]
                if at is not None and all(map(is_, (*x[:3], *x.extra), (q, k, v, *extra))):  # nothing was converted
                    learn(at, given, (*x[:3], *x.extra), seed, call, both=False)
                return _as_given(of_call, attn_mask, dropout_p, enable_gqa, o)
    if COUNTING:
        count_fell_back(against)
    return SDPA.decompose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[return-value]


def _against_call(x: Sequence[Tensor], attn_mask: Tensor | None, causal: bool, grouped: bool) -> str | None:
    """Return why a call has no counterpart in tilewise; None if it has one."""
    q, k, v = x
    tensors = x if attn_mask is None else (*x, attn_mask)
    if not torch._C._get_overrideable_sdp_enabled():  # type: ignore[attr-defined]
        return "sdpa_kernel(...) names other kernels"
    if transformed():
        return "a transform of torch.func"
    if not _plain(tensors):
        return "a tensor subclass"
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return "forward-mode differentiation"
    if not 2 <= q.ndim == k.ndim == v.ndim <= 4 or (grouped and q.ndim < 4):
        return "tensors of more than 4 dimensions, or of several ranks"
    if causal and (attn_mask is not None or q.shape[-2] > k.shape[-2]):
        return "is_causal with a mask, or with more queries than keys"
    if attn_mask is not None and not 2 <= attn_mask.ndim <= q.ndim:
        return "a mask of another rank"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return "a mask of another type"
    heads = [t.shape[-3] if t.ndim == 4 else 1 for t in x]
    shared = heads[1] == heads[2] and (grouped or heads[1] in (1, heads[0]))
    if not shared and (grouped or any(h not in (1, max(heads)) for h in heads)):
        return "heads that do not fit"
    return None


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors hold their data themselves, or stand for such tensors where code is traced."""
    if PLAIN.issuperset(map(type, tensors)):
        return True
    if tensors[0].is_cuda and not torch.cuda.is_available():  # traced for a GPU that nobody can ask
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return {*PLAIN, FakeTensor, FunctionalTensor}.issuperset(map(type, tensors))


def _operands(of_call: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """Return q, k and v as views (batch, length, heads, head size), of one batch size.

    Key heads may be fewer, as everywhere in tilewise; what else PyTorch broadcasts is expanded.
    """
    x = [t if t.ndim == 4 else t.unsqueeze(1) if t.ndim == 3 else t[None, None] for t in of_call]
    (H, H_k, H_v), batch = (t.shape[1] for t in x), max(t.shape[0] for t in x)
    heads = max(H, H_k, H_v) if H_k != H_v or H < H_k else -1
    whole = all(t.shape[0] == batch for t in x) and heads == -1
    q, k, v = ((t if whole else t.expand(batch, heads, -1, -1)).transpose(1, 2) for t in x)
    if causal:  # PyTorch aligns the first query with the first key, so that no query sees the other keys
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    return [q, k, v]


def _as_given(x: Sequence[Tensor], attn_mask: Tensor | None, dropout: float, grouped: bool, o: Tensor) -> Tensor:
    """Return o with the dimensions of the query, in their order; on a CPU with the strides of PyTorch's own result.

    There PyTorch's fused kernel keeps the query's order, so that views of one are views of the other, and what that
    kernel does not take is contiguous. On a GPU o is as PyTorch's kernels write it.
    """
    q, k, v = x
    o = o.transpose(1, 2) if q.ndim == 4 else o[:, :, 0] if q.ndim == 3 else o[0, :, 0]
    if not q.is_cpu:
        return o
    fused = (
        q.shape == o.shape
        and q.ndim == 4
        and k.shape == v.shape
        and k.shape[0] == q.shape[0]
        and (grouped or k.shape[1] == q.shape[1])
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and not dropout
        and (attn_mask is None or (attn_mask.ndim != 3 and not attn_mask.requires_grad))
    )
    if not fused:
        return o.contiguous()
    ordered = torch.empty_like(q)
    return o if o.stride() == ordered.stride() else ordered.copy_(o)


def mask_and_score(attn_mask: Tensor | None, causal: bool) -> tuple[Mask, tuple[Score, ...]]:
    """Translate attn_mask, which broadcasts to (B, H, M, N), or is_causal."""
    if attn_mask is None:
        return CAUSAL if causal else FULL, ()
    return (Dense(attn_mask), ()) if attn_mask.dtype == torch.bool else (FULL, (Bias(attn_mask),))


def _against_running(x: Operands, problem: Problem, name: str | None) -> str | None:
    """Return why a call is left to PyTorch although tilewise can express it: no back end, or it would not be faster."""
    if name is None:
        return f"no back end takes it on {problem.target}"
    if _settings is None or _settings.always:
        return None
    if name not in ON_TRITON:
        return "it is on a CPU, and always=False"
    least = _least_length(problem, wants_gradients(*x[:3], *x.extra))
    if problem.M * problem.N < (least or LEAST_LENGTH) ** 2:
        return "it is too short to be faster"
    return "it has too few queries to be faster" if least and problem.M < FEW_QUERIES else None


def _described(x: Operands, recipe: Recipe) -> tuple[Problem, str | None]:
    """Return a call's Problem, and the name of the back end that would run it; None if there is none."""
    if PLAIN.issuperset(map(type, x[:3])):
        problem = problem_of(x, recipe, (0, 0))
        try:
            return problem, select(problem, FORWARD).name
        except Unsupported:
            return problem, None
    problem = describe_fake(x, recipe, (0, 0), target_of(x.q.device))  # sizes may be symbolic, so nothing is cached
    return problem, next((name for name in candidates(problem) if not load(name).why_not(problem, FORWARD)), None)


def _least_length(p: Problem, gradients: bool) -> int | None:
    """Return the length from which on such calls are measured to be as fast as PyTorch's; None if there is no row."""
    if p.dtype not in (torch.float16, torch.bfloat16) or p.extra:
        return None
    D = next((D for D in (64, 128, 256) if max(p.D, p.D_v) <= D), 0)
    row = MEASURED.get(p.target, {}).get((D, bool(p.recipe.mask)))
    return row and row[not gradients]
