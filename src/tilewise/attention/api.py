"""The public functions for attention: attention(), attention_qkvpacked() and attention_backward()."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from typing_extensions import Never, Unpack  # in typing from Python 3.11 on; PyTorch brings it

from ..call.calls import Call, find, key_of, plain
from ..call.check import autocast_type, cast, check_arguments, check_results
from ..call.operands import Operands, Saved
from ..call.options import Everything, Options, as_mask, as_scores, current_names, spell_out
from ..call.recipe import KINDS, Recipe
from ..values.by_distance import by_distance
from ..values.dropout import Dropout
from ..values.layout import PADDED, Layout
from ..values.masks import Full, Mask
from ..values.origin import Origin
from ..values.products import EightBits
from ..values.quantized import Quantized, refuse_backward
from ..values.score import Score
from . import flops  # noqa: F401, which registers the operators and their formulas
from .eager import attend, attend_backward, attend_plain, learn

FULL = Full()


@overload
def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    mask: Mask | Callable[..., Any] = FULL,
    score: Score | Callable[..., Any] | Sequence[Score | Callable[..., Any]] = (),
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    layout: Layout | None = None,
    precision: str | EightBits | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    out_dtype: torch.dtype | None = None,
    origin: Origin | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * Q K^T) V exactly, in memory linear in the length (Dao et al. 2022, 2023).

    Args:
        q: (B, M, H, D), any strides; fp16, bf16, fp32, or fp64 on the CPU. With `layout`, (T, H, D). q, k and v may all
            be Quantized, without gradients; o is then bf16.
        k: (B, N, H_k, D), H a multiple of H_k: each key head serves H / H_k query heads. With `layout`, (T', H_k, D).
        v: (B, N, H_k, D_v). Head sizes are 1 to 512, in fp32 on a GPU above 256 by name; of q and k in a cache, or on
            the CPU, to 576. With `layout`, (T', H_k, D_v).
        mask: a Mask; combine several with `&`, `|` and `~`. Or a function of (b, h, i, j), see `Mask.of`. A row that
            sees no key has o = 0, lse = -inf and gradients of 0.
        score: a Score, a function of (s, b, h, i, j), see `Score.of`, or a sequence of these, applied left to right to
            the scaled logits, before the mask.
        scale: factor on the logits, >= 0; default D ** -0.5.
        sink: (H,) logits added to the softmax's denominator, fp32 or q's type; differentiable.
        dropout: probability in [0, 1) of dropping an entry of P, rounded to a multiple of 2^-16. Kept entries are
            multiplied by 1 / (1 - the rounded probability). Below 2^-17, nothing is dropped.
        seed: int or scalar int64 tensor on q's device, for dropout; None draws one from torch's generator.
        layout: Varlen(cu_q, cu_k, max_q, max_k) for packed sequences; Cached(lengths, table) for k and v in a cache,
            whose shapes it states, and which may be Quantized.
        precision: the least accuracy of fp32 products: "ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3" or "tf32".
            None follows torch.get_float32_matmul_precision(). For fp16 and bf16 "int8" (int8 Q K^T) and "fp8" (also
            e4m3 P V), which are approximations; see docs/use/numerics.md. An EightBits is one of these names with K's
            mean and the balance, or with rotary's tables.
        deterministic: make gradients bitwise repeatable, as o, dk and dv always are.
            torch.use_deterministic_algorithms(True) has the same effect.
        return_lse: also return lse, natural log: (B, H, M), with `layout` (H, T); fp32, fp64 for fp64; differentiable.
        backend: "hopper", "triton" or "cpu" to require one; None chooses.
        out_dtype: the type of o; None for q's. torch.float32 leaves o of 16-bit inputs as it was summed, for parts
            that are merged. Gradients keep the inputs' types, as autograd wants them.
        origin: an Origin, for a call that is a part of a larger one: it draws the whole's dropout, and Alibi, Prefix,
            Padding and functions count the whole's rows and keys.

    Returns:
        o (B, M, H, D_v) in q's type or out_dtype, contiguous; with return_lse, (o, lse).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is allowed.
        Unsupported: no back end can run the call, or `backend` cannot; or a cache and a gradient are asked for.
        RuntimeError: forward-mode differentiation was used, or a gradient was differentiated.
    """
    if unknown:
        origin = current_names("attention", unknown | ({} if origin is None else {"origin": origin}))["origin"]
    mask = mask if isinstance(mask, Mask) else as_mask(mask)
    score = as_scores(score) if type(score) is not tuple or score else ()
    every = mask, score, scale, sink, dropout, layout, precision, deterministic, backend, out_dtype, origin
    given: list[Any] = [q, k, v]
    key = None
    if not is_compiling():
        key, call = _known(given, return_lse, *every)
        if call is not None:
            drawn = None if seed is None and not dropout else Dropout(dropout).seed(seed, given[0])
            return attend_plain(given, drawn, call, return_lse)
    x, recipe, longest = check_arguments(q, k, v, *every) if key is None else _by_distance(q, k, v, given, *every)
    drawn = Dropout(recipe.dropout).seed(seed, x.q)
    call, tensors = Call(recipe, longest), (*x[:3], *x.extra)
    found = attend(tensors, drawn, call, return_lse)
    if key is not None and len(given) == len(tensors) and all(map(is_, given, tensors)):  # no argument was converted
        learn(key, given, tensors, drawn, call, return_lse)
    return found if return_lse or isinstance(found, Tensor) else found[0]


def _by_distance(
    q: Any, k: Any, v: Any, given: Sequence[Any], mask: Mask, score: Any, *options: Any
) -> tuple[Operands, Recipe, tuple[int, int]]:
    """Check arguments; where it is quicker and nothing but a back end sees the call, let scores read tables."""
    x, recipe, longest = check_arguments(q, k, v, mask, score, *options)
    *_, origin = options
    if recipe.score and origin is None and plain(given):
        B, M, N, _ = recipe.layout_of(x.extra).sizes(x.q.shape, x.k.shape, longest)
        quick = by_distance(score, (B, x.q.shape[-2], M, N), x.q)
        if not all(map(is_, quick, score)):
            return check_arguments(q, k, v, mask, quick, *options)
    return x, recipe, longest


def _known(
    given: list[Any], return_lse: bool, mask: Any, score: Any, scale: Any, sink: Any, dropout: Any, layout: Any,
    precision: Any, deterministic: Any, *options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Return a call's key, or None for arguments that are wrong, and the Call that was like it, or None. Append the
    tensors of all options to `given`."""
    try:
        lies = PADDED if layout is None else layout
        options = type(scale), scale, type(dropout), dropout, return_lse, *options
        key = key_of(given, mask, score, sink, lies, precision, deterministic, *options)
        return key, find(key, given)
    except (AttributeError, TypeError):
        return None, None


DEFAULTS: dict[str, Any] = attention.__kwdefaults__ or {}
"""It holds every option of `attention` with its default."""
SIGNATURE = inspect.signature(attention)
spell_out(attention, SIGNATURE)


@overload
def attention_qkvpacked(qkv: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...
@overload
def attention_qkvpacked(
    qkv: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_qkvpacked(
    qkv: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_qkvpacked(qkv: Tensor, **options: Unpack[Everything]) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` of q, k and v stored in one tensor, as a joint projection writes them.

    The inputs are read in place. The gradient is one tensor of qkv's shape, and the back ends write dq, dk and dv
    directly into it. PyTorch's fused CPU kernel is the exception: its three gradients are copied there. The options
    are those of `attention`.

    Args:
        qkv: (B, N, 3, H, D), any strides. With `layout`, (T, 3, H, D), and cu_q equal to cu_k.

    Returns:
        o (B, N, H, D), contiguous; with return_lse, (o, lse).

    Raises:
        TypeError, ValueError, Unsupported, RuntimeError: as `attention`.
    """
    chosen = with_defaults("attention_qkvpacked", options)
    seed, return_lse = chosen.pop("seed"), chosen.pop("return_lse")
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv must be a torch.Tensor, got {type(qkv).__name__}; convert it with torch.as_tensor(...)")
    Layout.of(chosen["layout"]).check_qkv(qkv)
    if (kind := autocast_type(qkv)) is not None:
        qkv = cast(qkv, kind)
    q, k, v = qkv.unbind(-3)
    x, recipe, longest = check_arguments(q, k, v, **chosen)
    drawn = Dropout(recipe.dropout).seed(seed, qkv)
    o, lse = attend((qkv, None, None, *x.extra), drawn, Call(recipe._replace(packed=True), longest))
    return (o, lse) if return_lse else o


spell_out(attention_qkvpacked, SIGNATURE)


def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    delta: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, ...]:
    """Compute the gradients of sum(o * do) + sum(lse * dlse), without autograd.

    It is for those who call the forward themselves: rings over devices, operators of other packages, recomputation.
    o and lse may belong to more keys than k and v, as merged results do. Then dk and dv are those of the whole, and
    the parts' dq add up. Pass the sink to one part only.

    Args:
        do: (B, M, H, D_v), the gradient of o, in q's type or out_dtype; with `layout`, (T, H, D_v). Products round it
            to q's type.
        q, k, v, options: as for `attention`, as they were in the forward; with dropout, its seed. With
            out_dtype=torch.float32, dq, dk and dv are in fp32.
        o: (B, M, H, D_v), the forward's output, in q's type or out_dtype; with `layout`, (T, H, D_v). It is not read if
            delta is given.
        lse: (B, H, M), the forward's, fp32 or for fp64 fp64; with `layout`, (H, T).
        dlse: the gradient of lse, of its shape and type; None for 0.
        delta: rowsum(do * o) - dlse, of lse's shape and type, in place of dlse; None has it computed.

    Returns:
        dq, dk and dv, contiguous, of the shapes of q, k and v, in their type or out_dtype; then the gradient of each
        tensor that scores capture, in order, and of the sink, if they require one. They cannot be differentiated again.

    Raises:
        TypeError, ValueError, Unsupported, RuntimeError: as `attention`; and if dropout has no seed, or both dlse and
            delta are given.
    """
    if "return_lse" in options:
        raise TypeError("attention_backward: options must not have return_lse, got one; leave it out")
    chosen = with_defaults("attention_backward", options)
    seed, _ = chosen.pop("seed"), chosen.pop("return_lse")
    Layout.of(chosen["layout"]).refuse_backward()
    refuse_backward(q)
    x, recipe, longest = check_arguments(q, k, v, **chosen)
    if recipe.dropout and seed is None:
        raise ValueError("attention_backward: seed must be the forward's where there is dropout, got None; pass it")
    check_results(x, recipe, do=do, o=o, lse=lse, dlse=dlse, delta=delta)
    if delta is not None:  # back ends compute rowsum(do * o) - dlse
        o, dlse = o.new_zeros(o.shape[-1]).expand(o.shape), -delta
    learns = [KINDS[name].learns for name, *_ in recipe.mask + recipe.score for _ in KINDS[name].captures]
    learns += [recipe.sink] * recipe.sink + [False] * recipe.own
    wanted = [learned and t.requires_grad for learned, t in zip(learns, x.extra, strict=True)]
    saved = Saved(o.contiguous() if delta is None else o, lse, Dropout(recipe.dropout).seed(seed, x.q))
    grads = attend_backward((*x[:3], *x.extra), saved, do, dlse, recipe, longest, wanted)
    return (*grads[:3], *[grad for grad, want in zip(grads[3:], wanted, strict=True) if want])


spell_out(attention_backward, SIGNATURE, without=("return_lse",))


def with_defaults(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of `attention`, as given or by default."""
    return {**DEFAULTS, **current_names(function, given)}
