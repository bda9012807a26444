"""A call of attention as options of a command: shapes and numbers, no tensors. Several commands share them."""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_
from typing import Any

import torch

from ..values.intervals import Causal, Padding, Prefix, Window
from ..values.layout import Varlen
from ..values.masks import Full, Mask
from ..values.score import Alibi, Bias, Score, SoftCap
from ..values.tables import Dense, Documents
from .parser import Option

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
MASKS: dict[str, Callable[[int, int, int], Mask]] = {
    "full": lambda B, M, N: Full(),
    "causal": lambda B, M, N: Causal(),
    "prefix": lambda B, M, N: Prefix(_meta((B,), torch.int32)),
    "padding": lambda B, M, N: Padding(_meta((B,), torch.int32)),
    "documents": lambda B, M, N: Documents(_meta((B, M), torch.int32), _meta((B, N), torch.int32)),
    "dense": lambda B, M, N: Dense(_meta((M, N), torch.bool)),
}
"""Masks by name, for sizes B, M and N."""
CALL = (
    Option("--q", "Shape of q: batch,length,heads,head size.", "B,M,H,D", default="2,1024,16,64"),
    Option("--keys", "Keys; as many as queries if left out.", "N", int, least=0),
    Option("--kv-heads", "Heads of k and v; as many as q's if left out.", "H", int, least=1),
    Option("--v-size", "Head size of v; q's if left out.", "D", int, least=1),
    Option("--dtype", ", ".join(DTYPES), "TYPE", default="bf16"),
    Option("--mask", f"{', '.join(MASKS)}; several are combined.", "MASK", many=True),
    Option("--window", "left,right; - is open: 1023,0 or 128,-.", "LEFT,RIGHT"),
    Option("--softcap", "Cap of the logits.", "CAP", float),
    Option("--alibi", "With a slope for each head."),
    Option("--bias", "Shape of an additive bias, such as 1,16,1024,1024.", "SHAPE"),
    Option("--sink", "With a sink logit for each head."),
    Option("--scale", "What the logits are multiplied by.", "SCALE", float),
    Option("--dropout", "Probability in [0, 1).", "P", float, default=0.0),
    Option("--varlen", "Packed: q's batch is the number of sequences."),
    Option("--precision", "For fp32: ieee, bf16x6, fp16x3, ...", "NAME"),
    Option("--deterministic", "Repeatable gradients."),
    Option("--backend", "Ask for this one only.", "NAME"),
)
"""Options that describe a call."""


def arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `attention` on the meta device, from the values of these options."""
    B, M, H, D = numbers("q", call["q"], 4)
    N, H_k, D_v = (M if call["keys"] is None else call["keys"], call["kv_heads"] or H, call["v_size"] or D)
    if call["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {call['dtype']!r}; leave it out for bf16")
    shapes = (B, M, H, D), (B, N, H_k, D), (B, N, H_k, D_v)
    layout = None
    if call["varlen"]:
        shapes = tuple((shape[0] * shape[1], *shape[2:]) for shape in shapes)
        layout = Varlen(_meta((B + 1,), torch.int32), _meta((B + 1,), torch.int32), M, N)
    return dict(
        zip("qkv", (_meta(shape, DTYPES[call["dtype"]]) for shape in shapes), strict=True),
        mask=_masks(call["mask"] or [], call["window"], (B, M, N)),
        score=_scores(call["softcap"], call["alibi"], call["bias"], H),
        sink=_meta((H,), torch.float32) if call["sink"] else None,
        layout=layout,
        **{name: call[name] for name in ("scale", "dropout", "precision", "deterministic", "backend")},
    )


def numbers(name: str, text: str, count: int) -> list[int]:
    """Read whole numbers from "2,1024,16,64"."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or min(found) < 0:
        example = ",".join(("2", "1024", "16", "64")[:count])
        raise ValueError(
            f"{name} must be {count} whole numbers joined by commas, got {text!r}; write {example} or the like"
        )
    return found


def _masks(names: list[str], window: str | None, sizes: tuple[int, int, int]) -> Mask:
    for name in names:
        if name not in MASKS:
            raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {name!r}; use --window for a window")
    parts = [MASKS[name](*sizes) for name in names]
    if window is not None:
        ends = window.split(",")
        if len(ends) != 2:
            raise ValueError(f"window must be left,right such as 1023,0, got {window!r}; write - for an open side")
        parts.append(Window(*(None if end == "-" else numbers("window", end, 1)[0] for end in ends)))
    return reduce(and_, parts, Full())


def _scores(softcap: float | None, alibi: bool, bias: str | None, H: int) -> list[Score]:
    scores: list[Score] = []
    if softcap is not None:
        scores.append(SoftCap(softcap))
    if alibi:
        scores.append(Alibi(_meta((H,), torch.float32)))
    if bias is not None:
        scores.append(Bias(_meta(tuple(numbers("bias", bias, bias.count(",") + 1)), torch.float32)))
    return scores


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise ValueError(
            f"shapes must be ones that torch can allocate, got {shape} ({error}); make it smaller"
        ) from None
