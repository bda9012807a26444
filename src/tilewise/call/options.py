"""Options of attention(): their types, for editors and type checkers, and hints for other libraries' names."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypedDict

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..values import function
from ..values.layout import Layout
from ..values.masks import Full, Mask, mask_of
from ..values.origin import Origin
from ..values.products import EightBits
from ..values.score import Score, score_of
from .import_hook import when_imported


class Unmasked(TypedDict, total=False):
    """The keyword arguments of `attention` without mask and return_lse."""

    score: Score | Callable[..., Any] | Sequence[Score | Callable[..., Any]]
    scale: float | None
    sink: Tensor | None
    dropout: float
    seed: int | Tensor | None
    layout: Layout | None
    precision: str | EightBits | None
    deterministic: bool
    backend: str | None
    out_dtype: torch.dtype | None
    origin: Origin | None


class Options(Unmasked, total=False):
    """The keyword arguments of `attention`, except return_lse, which changes the type of the result."""

    mask: Mask | Callable[..., Any]


class Everything(Options, total=False):
    """All keyword arguments of `attention`."""

    return_lse: bool


INSTEAD = {
    "causal": "did you mean mask=tilewise.Causal()?",
    "is_causal": "did you mean mask=tilewise.Causal()? It aligns the last query and key; torch aligns the first ones",
    "attn_mask": "write mask=tilewise.Dense(attn_mask) if it is bool, score=tilewise.Bias(attn_mask) if it is added",
    "key_padding_mask": "write mask=tilewise.Padding(...), of lengths or of a bool tensor, true where a key is real",
    "dropout_p": "write dropout=..., and 0.0 in evaluation",
    "enable_gqa": "leave it out: k and v may have fewer heads than q",
    "softmax_scale": "did you mean scale=...?",
    "softcap": "did you mean score=tilewise.SoftCap(...)?",
    "alibi_slopes": "did you mean score=tilewise.Alibi(...)?",
    "window_size": "write mask=tilewise.Window(left, right), with None for an open side",
    "block_table": "write layout=tilewise.Cached(lengths, table)",
    "cache_seqlens": "write layout=tilewise.Cached(lengths)",
    "seqused_k": "write layout=tilewise.Cached(lengths, cu_q=...)",
    "cu_seqlens": "write layout=tilewise.Varlen(cu_seqlens, cu_seqlens)",
    "return_attn_probs": "write return_lse=True, for the logarithm of the softmax's denominator",
}
"""Remedies for the argument names of other attention libraries."""


RENAMED = {"place": "origin"}
"""Earlier names of options, which work for one release."""


def current_names(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by today's names, with a FutureWarning for an earlier one; raise TypeError for what is none."""
    found = {RENAMED.get(name, name): value for name, value in given.items()}
    if unknown := found.keys() - Everything.__annotations__.keys():
        refuse_unknown(function, unknown)
    for old in given.keys() & RENAMED.keys():
        new = RENAMED[old]
        if new in given:
            raise TypeError(f"{function}: {new} must be given once, got {old}, its earlier name, too; leave out {old}")
        if not is_compiling():
            text = f"{function}: {old} is called {new}, and will not work in the next release; write {new}=..."
            warnings.warn(text, FutureWarning, stacklevel=4)
    return found


def refuse_unknown(function: str, unknown: Iterable[str]) -> NoReturn:
    """Raise TypeError for unknown arguments, with tilewise's spelling if another library uses the name."""
    known = tuple(Everything.__annotations__)
    name = min(unknown, key=lambda name: (name not in INSTEAD, name))
    close = get_close_matches(name, known, 1)
    remedy = INSTEAD.get(name) or (f"did you mean {close[0]}?" if close else "leave it out")
    raise TypeError(f"{function}: options must be among {', '.join(known)}, got {name}; {remedy}")


def as_mask(given: Any) -> Mask:
    """Return what `mask=` says: a Mask, or a function of (b, h, i, j); raise TypeError for anything else."""
    found = mask_of(given)
    return refuse_mask(given) if found is None else found


def as_scores(given: Any) -> tuple[Score, ...]:
    """Return what `score=` says, one or several, functions as Scores; raise TypeError for anything else."""
    if isinstance(given, Score) or callable(given):
        given = (given,)
    elif isinstance(given, str) or not isinstance(given, (tuple, list, Sequence)):  # the last check is slow
        refuse_score(given)
    return tuple([refuse_score(one) if found is None else found for one in given for found in (score_of(one),)])


def _leave_graphs(dynamo: Any) -> None:
    """Break graphs where a function is traced, which Dynamo would trace, too."""
    reason = "make masks and scores of functions outside of it, and bind tensors by .with_"
    module: Any = function
    module.trace = dynamo.disable(module.trace, reason=reason)


when_imported("torch._dynamo", _leave_graphs)


def refuse_mask(mask: Any) -> NoReturn:
    """Raise TypeError for a mask that is no Mask, and say what to write instead."""
    got, instead = repr(mask), _meant("mask", mask, Mask)
    if isinstance(mask, Tensor):
        got = _shown(mask)
        instead = "write mask=tilewise.Dense(...) if it is bool, score=tilewise.Bias(...) if it is added to the logits"
    elif mask is None:
        instead = "leave it out for none"
    elif not instead:
        instead = "use tilewise's masks, combined with &, or mask=tilewise.Dense(...) for any bool tensor"
    raise TypeError(f"mask must be a Mask such as tilewise.Causal(), got {got}; {instead}")


def refuse_score(score: Any) -> NoReturn:
    """Raise TypeError for a score that is no Score, and say what to write instead."""
    got, instead = repr(score), _meant("score", score, Score) or "leave it out for none"
    if isinstance(score, Tensor):
        got, instead = _shown(score), "did you mean score=tilewise.Bias(...)?"
    raise TypeError(f"score must be a Score such as tilewise.SoftCap(50.0), or several, got {got}; {instead}")


def _meant(option: str, given: Any, base: type) -> str:
    """Return the remedy for a class, or the name of one, in place of its instance; else an empty string."""
    for kind in (each for each in (*base.__subclasses__(), Full) if issubclass(each, base)):
        if given is kind or str(given).lower() == kind.__name__.lower():
            numbers = "" if getattr(kind, "__match_args__", None) == () else "..."
            return f"did you mean {option}=tilewise.{kind.__name__}({numbers})?"
    return ""


def _shown(tensor: Tensor) -> str:
    return f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}"


def spell_out(function: Callable[..., Any], options: inspect.Signature, without: Sequence[str] = ()) -> None:
    """List in a function's signature the options that it takes as `**`, for help() and notebooks."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {*without, *(p.name for p in own)}
    more = [p for p in options.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in taken]
    function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
