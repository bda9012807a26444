"""Options of attention(): their types, for editors and type checkers, and hints for other libraries' names."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypedDict

from torch import Tensor

from .layout import Varlen
from .mask import Mask
from .score import Score


class Options(TypedDict, total=False):
    """The keyword arguments of `attention`, except return_lse, which changes the type of the result."""

    mask: Mask
    score: Score | Sequence[Score]
    scale: float | None
    sink: Tensor | None
    dropout: float
    seed: int | Tensor | None
    layout: Varlen | None
    precision: str | None
    deterministic: bool
    backend: str | None


class Everything(Options, total=False):
    """All keyword arguments of `attention`."""

    return_lse: bool


INSTEAD = {
    "causal": "mask=tilewise.Causal()",
    "is_causal": "mask=tilewise.Causal(), which aligns the last query with the last key, where torch aligns the first",
    "attn_mask": "mask=tilewise.Dense(attn_mask) if it is bool, score=tilewise.Bias(attn_mask) if it is added",
    "key_padding_mask": "mask=tilewise.Padding(...), of lengths, or of a bool tensor that is true where a key is real",
    "dropout_p": "dropout=..., and 0.0 in evaluation",
    "enable_gqa": "nothing: k and v may have fewer heads than q",
    "softmax_scale": "scale=...",
    "softcap": "score=tilewise.SoftCap(...)",
    "alibi_slopes": "score=tilewise.Alibi(...)",
    "window_size": "mask=tilewise.Window(left, right), None for an open side",
    "cu_seqlens": "layout=tilewise.Varlen(cu_seqlens, cu_seqlens)",
    "return_attn_probs": "return_lse=True, for the logarithm of the softmax's denominator",
}
"""Argument names of other attention libraries, each with the spelling that tilewise uses."""


def refuse_unknown(function: str, unknown: Iterable[str]) -> NoReturn:
    """Raise TypeError for unknown arguments, with tilewise's spelling if another library uses the name."""
    for name in unknown:
        if name in INSTEAD:
            raise TypeError(f"{function}: unknown argument {name}; write {INSTEAD[name]}")
    names = ", ".join(sorted(unknown))
    raise TypeError(f"{function}: unknown argument {names}; it takes {', '.join(Everything.__annotations__)}")


def refuse_mask(mask: Any) -> NoReturn:
    """Raise TypeError for a mask that is no Mask, and say what to write instead."""
    got, instead = repr(mask), "leave it out for none"
    if isinstance(mask, Tensor):
        got = _told(mask)
        instead = "write mask=tilewise.Dense(...) if it is bool, score=tilewise.Bias(...) if it is added to the logits"
    elif isinstance(mask, type) and issubclass(mask, Mask):
        instead = f"write mask=tilewise.{mask.__name__}(...)"
    raise TypeError(f"mask must be a Mask such as tilewise.Causal(), got {got}; {instead}")


def refuse_score(score: Any) -> NoReturn:
    """Raise TypeError for a score that is no Score, and say what to write instead."""
    got, instead = repr(score), "leave it out for none"
    if isinstance(score, Tensor):
        got, instead = _told(score), "write score=tilewise.Bias(...)"
    raise TypeError(f"score must be a Score such as tilewise.SoftCap(50.0), or several, got {got}; {instead}")


def _told(tensor: Tensor) -> str:
    return f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}"


def spell_out(function: Callable[..., Any], options: inspect.Signature) -> None:
    """List in a function's signature the options that it takes as `**`, for help() and notebooks."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {p.name for p in own}
    more = [p for p in options.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in taken]
    function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
