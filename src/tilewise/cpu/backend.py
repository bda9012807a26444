"""The CPU back end: PyTorch's fused kernel if it supports the call, else the tiled algorithm in torch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call.backend import EVERYTHING, FORWARD, Pass, Plan
from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem
from ..quantize.codes import quantize
from ..quantize.dequantize import multiplied, shift_of
from . import cached, fused, tiled
from .precision import exact_products
from .sequences import choose_tiles

WAYS = {cached.fused: cached.why_not_fused, fused.forward: fused.why_not}
"""The ways to PyTorch's kernel, and what speaks against each."""


class Cpu:
    """It runs every call on CPU tensors. `fuse=False` always takes the tiled path, for tests and benchmarks."""

    name = "cpu"

    def __init__(self, fuse: bool = True) -> None:
        self.fuse = fuse

    def takes(self, problem: Problem) -> Mapping[Any, str]:
        return EVERYTHING

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
        return Plan(partial(run, problem), lambda: tuple(describe(problem)))

    def _forward_path(self, p: Problem) -> list[str]:
        heads, rows, columns = choose_tiles(p)
        if p.layout.page(p) is not None:
            if self.fuse and not cached.why_not_fused(p):
                return ["PyTorch's fused CPU kernel, keys from a cache, one sequence at a time"]
            width = cached.FEW_COLUMNS if cached.few_rows(p) else columns
            return [f"tiled torch, keys from a cache, one sequence and {width} keys at a time"]
        if self.fuse and not fused.why_not(p):
            return ["PyTorch's fused CPU kernel"]
        return [f"tiled torch, {rows} queries x {columns} keys, {heads} key heads at a time"]

    def _backward_path(self, p: Problem) -> list[str]:
        forward, (heads, rows, columns) = self._forward_path(p), choose_tiles(p)
        fuses = self.fuse and not fused.why_not_backward(p)
        tiles = f"tiled torch, {rows} queries x {columns} keys, {heads} key heads at a time"
        return forward if fuses or forward == [tiles] else [f"backward: {tiles}"]

    def forward(self, p: Problem, x: Operands, seed: Tensor | None) -> Saved:
        """Compute o and lse."""
        if p.products.codes:
            return self._forward_quantized(p, x, seed)
        # of few rows, products wait for memory, and rounding all keys to bf16 again would take longer than they do
        with exact_products(torch.float32 if cached.few_rows(p) else p.dtype):
            of = next((of for of, why_not in WAYS.items() if not why_not(p)), None)
            if self.fuse and of is not None:
                saved = of(p, x)
                if not fused.doubtful(saved):
                    return saved
            return tiled.forward(p, x, seed)

    def _forward_quantized(self, p: Problem, x: Operands, seed: Tensor | None) -> Saved:
        """Multiply what the codes stand for. fp32 sums of int8 products are exact."""
        codes = quantize(p, x)
        with exact_products(torch.float32):
            saved = tiled.forward(p, multiplied(p, x, codes), seed)
        blind, shift = saved.lse.isneginf(), shift_of(p, x, codes)
        return saved._replace(lse=torch.where(blind, saved.lse, saved.lse + shift), kept=codes.present())

    def backward(self, p: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        """Compute dq, dk, dv, and the gradients that extras need."""
        do = torch.zeros_like(saved.o) if do is None else do
        with exact_products(p.dtype):
            covered = self.fuse and dlse is None and not fused.why_not_backward(p)
            if covered and not bool(saved.lse.isneginf().any()):  # exp(-inf - -inf) is NaN there
                return fused.backward(p, x, saved, do)
            return tiled.backward(p, x, saved, do, dlse)


backend = Cpu()
