"""Arguments of FlashAttention-2, -3 and -4: as options of `tilewise.attention`, or refused by name."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...values.intervals import Causal, Window
from ...values.layout import PADDED, Layout
from ...values.masks import Full, Mask
from ...values.quantized import Quantized
from ...values.score import Alibi, Score, SoftCap
from ...values.value import INTEGER_TYPES, Unsupported

Sides = Sequence[int | Tensor | None]
Length = int | Tensor
Descales = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_DESCALES = None, None, None

PAGES = "this function takes no keys and values in pages", "call flash_attn_with_kvcache, or a varlen function"
PARTS = "parts of sequences are not supported", "gather the rows in use into sequences of those lengths"
OTHERS = "no kernel here reads it", "use what tilewise.attention takes"
REFUSED = {
    **dict.fromkeys(("block_table", "page_table"), PAGES),
    **dict.fromkeys(("seqused_q", "seqused_k", "leftpad_k"), PARTS),
    "gen": ("dropout is drawn from torch's own generator", "call torch.manual_seed"),
}
"""Why an argument is refused, and what to do instead."""


class Options(NamedTuple):
    """The arguments of a flash_attn function as options of `tilewise.attention`."""

    mask: Mask
    score: list[Score]
    scale: float | None
    deterministic: bool
    sink: Tensor | None
    dropout: float = 0.0
    layout: Layout = PADDED


def options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sides,
    softcap: float,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    layout: Layout = PADDED,
) -> Options:
    """Translate arguments; a side of the window that is None or negative is open."""
    left, right = (None if side is None or side < 0 else number(side) for side in window_size)
    if causal:
        mask = Causal() if left is None else Window(left, 0)
    else:
        mask = Full() if left is None and right is None else Window(left, right)
    score: list[Score] = [] if softcap == 0.0 else [SoftCap(softcap)]
    if alibi_slopes is not None:
        score.append(Alibi(alibi_slopes))
    return Options(mask, score, softmax_scale, deterministic, sink, dropout, layout)


def number(length: Length | None) -> int | None:
    """Return an int, or None; a tensor is read, which synchronises with a GPU."""
    return int(length) if isinstance(length, Tensor) else length


def in_e4m3(q: Tensor) -> bool:
    """Tell whether q, and so k and v, are in e4m3; descales of 16-bit tensors are not read, as in FlashAttention-3."""
    return q.dtype == torch.float8_e4m3fn


def quantized(tensors: tuple[Tensor, ...], descales: Descales) -> tuple[Any, ...]:
    """Return e4m3 tensors with their descales, which are 1 where they are None."""
    pairs = zip(tensors, descales, strict=True)
    return tuple([Quantized(t, torch.ones((), device=t.device) if scale is None else scale) for t, scale in pairs])


def refuse(function: str, **given: Any) -> None:
    """Raise Unsupported if one of the arguments, None by default, is given."""
    for name, value in given.items():
        if value is not None:
            why, instead = REFUSED.get(name, OTHERS)
            raise Unsupported(f"{function}: {name} is not None, but {why}; {instead}, and leave {name} out")


def check_absent(where: str, instead: str = "leave it out", **given: Any) -> None:
    """Raise ValueError if one of the arguments, which have no meaning there, is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None {where}, got a value; {instead}")


def together(**given: Any) -> None:
    """Raise ValueError if some of the arguments are given, and others are not."""
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(f"{' and '.join(given)} must be given together, got no {missing[0]}; pass both, or neither")


def sink_of(q: Tensor, sink: Tensor | None) -> Tensor | None:
    """Return sinks in fp32, unless they have q's type, because kernels read no third one."""
    return sink.float() if isinstance(sink, Tensor) and sink.dtype != q.dtype else sink


def check_used(name: str, used: Any, B: int) -> None:
    """Raise ValueError unless an argument says of each of B sequences how many of its rows count."""
    if not isinstance(used, Tensor) or used.dtype not in INTEGER_TYPES or tuple(used.shape) != (B,):
        got = f"{used.dtype} {tuple(used.shape)}" if isinstance(used, Tensor) else type(used).__name__
        raise ValueError(f"{name} must be int32 or int64 of shape ({B},), got {got}; give each sequence a number")
