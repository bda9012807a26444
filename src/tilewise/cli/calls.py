"""A call of attention as options of a command: shapes and numbers, no tensors. Several commands share them."""

import inspect
from collections.abc import Callable
from functools import reduce, wraps
from operator import and_
from typing import Annotated, Any

import torch
import typer

from ..layout import Varlen
from ..mask import Causal, Dense, Documents, Full, Mask, Padding, Prefix, Window
from ..score import Alibi, Bias, Score, SoftCap

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
MASKS = ("full", "causal", "prefix", "padding", "documents", "dense")


def arguments(
    q: Annotated[str, typer.Option(help="Shape of q: batch,length,heads,head size.")] = "2,1024,16,64",
    keys: Annotated[int | None, typer.Option(min=0, help="Keys; as many as queries if left out.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of k and v; as many as q's if left out.")] = None,
    v_size: Annotated[int | None, typer.Option(min=1, help="Head size of v; q's if left out.")] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    mask: Annotated[list[str] | None, typer.Option(help=f"{', '.join(MASKS)}; several are combined.")] = None,
    window: Annotated[str | None, typer.Option(help="left,right; - is open: 1023,0 or 128,-.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Cap of the logits.")] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="With a slope for each head.")] = False,
    bias: Annotated[str | None, typer.Option(help="Shape of an additive bias, such as 1,16,1024,1024.")] = None,
    sink: Annotated[bool, typer.Option("--sink", help="With a sink logit for each head.")] = False,
    scale: Annotated[float | None, typer.Option(help="What the logits are multiplied by.")] = None,
    dropout: Annotated[float, typer.Option(help="Probability in [0, 1).")] = 0.0,
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed: q's batch is the number of sequences.")] = False,
    precision: Annotated[str | None, typer.Option(help="For fp32: ieee, bf16x6, fp16x3, ...")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Repeatable gradients.")] = False,
    backend: Annotated[str | None, typer.Option(help="Ask for this one only.")] = None,
) -> dict[str, Any]:
    """Return arguments of `attention` on the meta device."""
    B, M, H, D = numbers("q", q, 4)
    N = M if keys is None else keys
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; leave it out for bf16")
    H_k, D_v = H if kv_heads is None else kv_heads, D if v_size is None else v_size
    shapes = (B, M, H, D), (B, N, H_k, D), (B, N, H_k, D_v)
    layout = None
    if varlen:
        shapes = tuple((shape[0] * shape[1], *shape[2:]) for shape in shapes)
        layout = Varlen(_meta((B + 1,), torch.int32), _meta((B + 1,), torch.int32), M, N)
    return dict(
        zip("qkv", (_meta(shape, DTYPES[dtype]) for shape in shapes), strict=True),
        mask=_masks(mask or [], window, (B, M, N)),
        score=_scores(softcap, alibi, bias, H),
        scale=scale,
        sink=_meta((H,), torch.float32) if sink else None,
        dropout=dropout,
        layout=layout,
        precision=precision,
        deterministic=deterministic,
        backend=backend,
    )


OPTIONS = inspect.signature(arguments).parameters
"""Of a call."""


def with_call(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a call to a command, which receives their values by name as `call`."""
    _, *own = inspect.signature(command).parameters.values()

    @wraps(command)
    def run(**given: Any) -> None:
        command({name: given.pop(name) for name in OPTIONS}, **given)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*OPTIONS.values(), *own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


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
    B, M, N = sizes
    makers: dict[str, Any] = {
        "full": Full,
        "causal": Causal,
        "prefix": lambda: Prefix(_meta((B,), torch.int32)),
        "padding": lambda: Padding(_meta((B,), torch.int32)),
        "documents": lambda: Documents(_meta((B, M), torch.int32), _meta((B, N), torch.int32)),
        "dense": lambda: Dense(_meta((M, N), torch.bool)),
    }
    for name in names:
        if name not in makers:
            raise ValueError(f"mask must be one of {', '.join(MASKS)}, got {name!r}; use --window for a window")
    parts = [makers[name]() for name in names]
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
