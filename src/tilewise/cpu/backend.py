"""The CPU back end: PyTorch's fused kernel if it supports the call, else the tiled algorithm in torch."""

import torch
from torch import Tensor

from ..call.operands import Codes, Grads, Operands, Saved
from ..call.problem import Problem
from ..quantize.codes import quantize
from ..quantize.dequantize import multiplied, shift_of
from ..values.tables import TileList
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

    def why_not(self, problem: Problem) -> list[str]:
        """Check the device alone: plain fp32 is accurate enough for every precision."""
        if problem.target != "cpu":
            return [f"the tensors are on {problem.target}; it takes CPU tensors, so move them with .cpu()"]
        return problem.products.against(problem)

    def slower(self, problem: Problem, backward: bool) -> bool:
        return False

    def tiles(self, problem: Problem) -> str:
        """Describe the path taken, and the tile size of the tiled path."""
        heads, rows, columns = choose_tiles(problem)
        if "cache" in problem.layout.needs:
            width = cached.FEW_COLUMNS if cached.few_rows(problem) else columns
            if self.fuse and not cached.why_not_fused(problem):
                return "PyTorch's fused CPU kernel, keys from a cache, one sequence at a time"
            return f"tiled torch, keys from a cache, one sequence and {width} keys at a time"
        tiles = f"tiled torch, {rows} queries x {columns} keys, {heads} key heads at a time"
        if not self.fuse or fused.why_not(problem):
            return tiles
        of_backward = f"; backward: {tiles}" if fused.why_not_backward(problem) else ""
        return f"PyTorch's fused CPU kernel{of_backward}"

    def list_tiles(self, problem: Problem, x: Operands, gradients: bool) -> tuple[TileList, ...]:
        return ()

    def codes(self, problem: Problem, x: Operands) -> Codes:
        return quantize(problem, x)

    def forward(self, problem: Problem, x: Operands, seed: Tensor | None) -> Saved:
        if problem.products.codes:
            return self._forward_of_codes(problem, x, seed)
        # of few rows, products wait for memory, and rounding all keys to bf16 again would take longer than they do
        with exact_products(torch.float32 if cached.few_rows(problem) else problem.dtype):
            of = next((of for of, why_not in WAYS.items() if not why_not(problem)), None)
            if self.fuse and of is not None:
                saved = of(problem, x)
                if not fused.doubtful(saved):
                    return saved
            return tiled.forward(problem, x, seed)

    def _forward_of_codes(self, p: Problem, x: Operands, seed: Tensor | None) -> Saved:
        """Multiply what the codes stand for. fp32 sums of int8 products are exact."""
        codes = self.codes(p, x)
        with exact_products(torch.float32):
            saved = tiled.forward(p, multiplied(p, x, codes), seed)
        blind, shift = saved.lse.isneginf(), shift_of(p, x, codes)
        return saved._replace(lse=torch.where(blind, saved.lse, saved.lse + shift), kept=codes.present())

    def backward(self, problem: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        do = torch.zeros_like(saved.o) if do is None else do
        with exact_products(problem.dtype):
            covered = self.fuse and dlse is None and not fused.why_not_backward(problem)
            if covered and not bool(saved.lse.isneginf().any()):  # exp(-inf - -inf) is NaN there
                return fused.backward(problem, x, saved, do)
            return tiled.backward(problem, x, saved, do, dlse)


backend = Cpu()
