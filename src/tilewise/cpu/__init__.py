"""The CPU back end: PyTorch's own fused kernel where it covers the call, else the tiled algorithm in torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import Tensor

from ..problem import Grads, Operands, Problem, Saved
from . import fused, tiled

SETTING = RLock()
"""Torch has one setting for the precision of products, for all threads: whoever changes it computes alone."""


class Cpu:
    """Runs every call on CPU tensors. `fuse=False` keeps to the tiled path (for tests and benchmarks)."""

    name = "cpu"

    def __init__(self, fuse: bool = True) -> None:
        self.fuse = fuse

    def why_not(self, problem: Problem) -> list[str]:
        """Only the device can be wrong: plain fp32 honours every precision."""
        if problem.target != "cpu":
            return [f"the tensors are on {problem.target}; it takes CPU tensors, so move them with .cpu()"]
        return []

    def tiles(self, problem: Problem) -> str:
        """The path taken, and the tiled path's tile."""
        if self.fuse and not fused.why_not(problem):
            return "PyTorch's fused CPU kernel"
        heads, rows, columns = tiled.choose_tiles(problem)
        return f"tiled torch, {rows} queries x {columns} keys, {heads} key heads at a time"

    def forward(self, problem: Problem, x: Operands, seed: Tensor | None) -> Saved:
        with _exact_products(problem):
            if self.fuse and not fused.why_not(problem):
                saved = fused.forward(problem, x)
                if not bool((saved.lse == 0.0).any()):  # what it gives where all logits of a row are NaN or -inf
                    return saved
            return tiled.forward(problem, x, seed)

    def backward(self, problem: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        do = torch.zeros_like(saved.o) if do is None else do
        with _exact_products(problem):
            covered = self.fuse and dlse is None and not fused.why_not(problem)
            if covered and not bool(saved.lse.isneginf().any()):  # exp(-inf - -inf) is NaN there
                return fused.backward(problem, x, saved, do)
            return tiled.backward(problem, x, saved, do, dlse)


@contextmanager
def _exact_products(p: Problem) -> Iterator[None]:
    """fp32 products as they are. bf16 inputs, widened to fp32, lose nothing in oneDNN's bf16 products with fp32 sums,
    which are twice as fast; P and dS are rounded to bf16 on the way in, as on every matrix unit."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with SETTING, torch.autocast("cpu", enabled=False):
        before = matmul.fp32_precision
        if before == torch.backends.mkldnn.fp32_precision:  # type: ignore[attr-defined]
            before = "none"  # so it goes on to follow that one
        matmul.fp32_precision = "bf16" if p.dtype == torch.bfloat16 else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


backend = Cpu()
