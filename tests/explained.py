"""Calls whose `explain` is kept in explained.txt: python tests/explained.py writes it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import tilewise as tw

FILE = Path(__file__).with_suffix(".txt")
MODEL = """
def near(b, h, i, j):
    return (i >= j) & (i - j < 200)

def own(b, h, i, j, document):
    return document[b, i] == document[b, j]

def crowded(b, h, i, j):
    return ((i ^ j) & 3) != 0

def relative(s, b, h, i, j, table, slopes):
    return s + table[h, (i - j).clamp(0, 99)] - slopes[h]

def capped(s, b, h, i, j):
    return 30.0 * torch.tanh(s / 30.0)
"""
"""Masks and scores of a user, in the file model.py."""
BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def qkv(M: int, N: int, H: int = 8, H_k: int = 8, D: int = 128, D_v: int | None = None, B: int = 2, dtype: Any = BF16):
    return meta(B, M, H, D, dtype=dtype), meta(B, N, H_k, D, dtype=dtype), meta(B, N, H_k, D_v or D, dtype=dtype)


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield the name of each call, q, k and v, and its options."""
    int32 = torch.int32
    long, causal = qkv(4096, 4096), {"mask": tw.Causal()}
    for chip in ("cpu", "sm_70", "sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx1100"):
        yield f"causal on {chip}", long, {**causal, "device": chip}
    hopper = {"device": "sm_90"}
    yield "full", long, hopper
    yield "head size 64", qkv(4096, 4096, D=64), causal | hopper
    yield "head size 256", qkv(4096, 4096, D=256), causal | hopper
    yield "head size 80", qkv(4096, 4096, D=80), causal | hopper
    yield "head sizes 192 and 128", qkv(4096, 4096, D=192, D_v=128), causal | hopper
    yield "head size 512", qkv(4096, 4096, D=512), causal | hopper
    yield "an odd head size", qkv(4096, 4096, D=44), causal | hopper
    yield "grouped heads", qkv(4096, 4096, H=32), causal | hopper
    yield "short", qkv(48, 48), causal | hopper
    yield "one query", qkv(1, 8192, H=32), causal | hopper
    yield "one query, few keys", qkv(1, 256, H=32), causal | hopper
    yield "a window", long, {"mask": tw.Window(1023, 0)} | hopper
    yield "documents", long, {"mask": tw.Documents(*(meta(2, 4096, dtype=int32) for _ in range(2)))} | hopper
    ids = tw.Documents(*(meta(2, 4096, dtype=int32) for _ in range(2)))
    yield "documents, deterministic", long, {"mask": ids, "deterministic": True} | hopper
    yield "a bias", long, {"score": tw.Bias(meta(1, 8, 4096, 4096))} | hopper
    yield "a cap and a sink", long, causal | hopper | {"score": tw.SoftCap(30.0), "sink": meta(8, dtype=FP32)}
    yield "dropout", long, causal | hopper | {"dropout": 0.1}
    yield "dropout off its counters", long, hopper | {"dropout": 0.1, "origin": tw.Origin(8, 0)}
    yield "fp32", qkv(2048, 2048, dtype=FP32), causal | hopper
    yield "fp32 in tf32", qkv(2048, 2048, dtype=FP32), causal | hopper | {"precision": "tf32"}
    yield "fp32 with a score", qkv(2048, 2048, dtype=FP32), causal | hopper | {"score": tw.SoftCap(30.0)}
    yield "fp64", qkv(256, 256, dtype=torch.float64), causal | hopper
    yield "int8", qkv(16384, 16384), causal | hopper | {"precision": "int8"}
    yield "fp8", qkv(16384, 16384), causal | hopper | {"precision": "fp8"}
    yield "fp8 on sm_80", qkv(16384, 16384), causal | {"precision": "fp8", "device": "sm_80"}
    yield "fp32 results", long, causal | hopper | {"out_dtype": FP32}
    cu = meta(5, dtype=int32)
    packed = [t.flatten(0, 1) for t in long]
    yield "packed sequences", packed, causal | hopper | {"layout": tw.Varlen(cu, cu, 4096, 4096)}
    lengths, table = meta(2, dtype=int32), meta(2, 64, dtype=int32)
    cache = meta(128, 64, 8, 128), meta(128, 64, 8, 128)
    for name, layout in {
        "pages": tw.Cached(lengths, table),
        "pages from starts": tw.Cached(lengths, table, starts=lengths),
        "pages, in pieces": tw.Cached(lengths, table, invariant=1024),
    }.items():
        yield f"{name}, one query", (meta(2, 1, 32, 128), *cache), causal | hopper | {"layout": layout}
        yield f"{name}, a prompt", (meta(2, 512, 32, 128), *cache), causal | hopper | {"layout": layout}
    mixed = tw.Cached(lengths, table, cu_q=meta(3, dtype=int32), max_q=512)
    yield "pages, mixed", (meta(1024, 32, 128), *cache), causal | hopper | {"layout": mixed}
    yield "a back end by name", long, causal | hopper | {"backend": "triton"}
    yield from calls_of_functions()


def calls_of_functions() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield the same of calls whose masks and scores are functions."""
    own: dict[str, Any] = {"torch": torch}
    exec(compile(MODEL, "model.py", "exec"), own)
    x = (torch.zeros(2, 1024, 4, 64),) * 3
    document = (torch.arange(1024) // 300).expand(2, -1)
    packed, table = tw.Mask.of(own["own"], document), torch.zeros(4, 100, requires_grad=True)
    yield "a window as a function", x, {"mask": own["near"]}
    on_hopper = qkv(4096, 4096)
    yield "a window as a function, by name", on_hopper, {"mask": own["near"], "backend": "hopper", "device": "sm_90"}
    yield "causal documents as a function", x, {"mask": tw.Causal() & packed}
    yield "a window or documents, fewer rows", (x[0][:, :300], *x[1:]), {"mask": tw.Window(99, 99) | packed}
    yield "a function that is evaluated", x, {"mask": own["crowded"]}
    yield "scores as functions", x, {"score": [tw.Score.of(own["relative"], table, torch.ones(4)), own["capped"]]}


def explained() -> str:
    """Return what `explain` says of each call, where a CPU multiplies bf16."""
    with patch("tilewise.cpu.fused.bf16_units", lambda: True):
        return "\n\n".join(f"# {name}\n{tw.explain(*x, **options)}" for name, x, options in calls()) + "\n"


if __name__ == "__main__":
    FILE.write_text(explained())
    sys.stdout.write(explained())
