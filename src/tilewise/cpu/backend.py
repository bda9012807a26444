"""The CPU back end: PyTorch's fused kernel if it supports the call, else the tiled algorithm in torch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.backend import FORWARD, Pass, Plan, never
from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem
from ..quantize.codes import quantize
from ..quantize.dequantize import multiplied, shift_of
from . import cached, fused, sequences, tiled
from .precision import exact_products


class Way(NamedTuple):
    """How forwards of a layout are computed: by PyTorch's kernel, unless `why_not` says what a call needs that it
    lacks, or in `tiles`, a module that gives sequences."""

    fused: Callable[[Problem, Operands], Saved | None]
    why_not: Callable[[Problem], list[str]]
    tiles: Any


TAKES = (
    "packed", "cache", "pages", "starts in pages", "index", "invariant", "8-bit keys", "few queries", torch.int8,
    torch.float8_e4m3fn,
)  # fmt: skip
"""What it can do of `NEEDS`."""
ROWS, CACHE = Way(fused.forward, fused.why_not, sequences), Way(cached.fused, cached.why_not_fused, cached)


def way_of(p: Problem) -> Way:
    """Return how a problem's forward is computed."""
    return CACHE if "cache" in p.layout.needs else ROWS


class Cpu:
    """It runs every call on CPU tensors. `fuse=False` always takes the tiled path, for tests and benchmarks."""

    name = "cpu"

    def __init__(self, fuse: bool = True) -> None:
        self.fuse = fuse

    def takes(self, problem: Problem) -> Mapping[Any, str]:
        return dict.fromkeys(TAKES, "")

    def why_not(self, problem: Problem, which: Pass) -> list[str]:
        """Check the device alone: plain fp32 is accurate enough for every precision."""
        if problem.target != "cpu":
            return [f"the tensors are on {problem.target}; it takes CPU tensors, so move them with .cpu()"]
        return []

    def slower(self, problem: Problem, which: Pass) -> bool:
        return False

    def plan(self, problem: Problem, which: Pass) -> Plan:
        """Return how a pass runs: by PyTorch's kernel, or by the tiled algorithm."""
        run, describe = (self.forward, self._forward_path) if which is FORWARD else (self.backward, self._backward_path)
        repeat = partial(fused.repeated, problem) if self.fuse and way_of(problem) is ROWS else never
        return Plan(partial(run, problem), lambda: (describe(problem),), repeat=repeat)

    def _forward_path(self, p: Problem) -> str:
        way = way_of(p)
        if not self.fuse or way.why_not(p):
            return f"tiled torch, {way.tiles.describe(p)}"
        return way.tiles.FUSED + ", or tiles where the mask hides most" * p.listed

    def _backward_path(self, p: Problem) -> str:
        forward, tiles = self._forward_path(p), f"tiled torch, {sequences.describe(p)}"
        fuses = self.fuse and not fused.why_not_backward(p)
        return forward if fuses or forward == tiles else f"backward: {tiles}"

    def forward(self, p: Problem, x: Operands, seed: Tensor | None) -> Saved:
        """Compute o and lse."""
        if p.products.codes:
            return self._forward_quantized(p, x, seed)
        way = way_of(p)
        with exact_products(way.tiles.product_type(p)):
            if self.fuse and not way.why_not(p):
                saved = way.fused(p, x)
                if saved is not None and not fused.doubtful(p, saved):
                    return saved
            return tiled.forward(p, x, seed, way.tiles.sequences(p, x))

    def _forward_quantized(self, p: Problem, x: Operands, seed: Tensor | None) -> Saved:
        """Multiply what the codes stand for. fp32 sums of int8 products are exact."""
        codes = quantize(p, x)
        seen = multiplied(p, x, codes)
        with exact_products(torch.float32):
            saved = tiled.forward(p, seen, seed, sequences.sequences(p, seen))
        blind, shift = saved.lse.isneginf(), shift_of(p, x, codes)
        return saved._replace(lse=torch.where(blind, saved.lse, saved.lse + shift), extra=codes.present())

    def backward(self, p: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        """Compute dq, dk, dv, and the gradients that extras need."""
        do = torch.zeros_like(saved.o) if do is None else do
        with exact_products(p.dtype):
            covered = self.fuse and dlse is None and not fused.why_not_backward(p)
            grads = fused.backward(p, x, saved, do) if covered else None
            return tiled.backward(p, x, saved, do, dlse) if grads is None else grads


backend = Cpu()
