"""Launch the kernels that quantize Q, K and V."""

from typing import Any

import torch

from ..call.operands import Codes, Operands
from ..call.problem import Problem
from ..host.arguments import cdiv, lengths, packed, rows, with_adjacent_rows
from ..host.launch import Launch, current_stream
from ..rotary.kernel import Tables
from . import rows as device
from .codes import BLOCK_K, BLOCK_Q, blocks_of, empty_codes, given_statistics, key_bounds, size_of, smooths
from .kernel import attention_quantize
from .statistics import attention_quantize_statistics

WARPS = {64: 8, 256: 8}
"""Counts warps by columns of codes, else 4: threads would need too many registers."""


def quantized(p: Problem, x: Operands, compiled: dict[Any, Any]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a call's codes, or none where its products are of other numbers."""
    return codes_of(p, x, compiled).present() if p.products.codes else ()


def codes_of(p: Problem, x: Operands, compiled: dict[Any, Any]) -> Codes:
    """Return the codes of a call."""
    codes, stream = empty_codes(p, x.q.device), current_stream(x.q.device)
    if (found := given_statistics(p, x)) is not None:
        codes = codes._replace(mean=found[0].contiguous(), balance=found[1].contiguous())
    if p.products.scales:
        codes.mean.zero_()
        codes.balance.fill_(1.0)
    for launch in quantize_launches(p, with_adjacent_rows(x), codes, compiled):
        launch.run(stream)
    return codes


def quantize_launches(p: Problem, x: Operands, codes: Codes, compiled: dict[Any, Any]) -> list[Launch]:
    """Return the launches that write the codes of a call, by `empty_codes`: statistics unless given, then blocks. What
    is e4m3 has no statistics: its blocks are copies."""
    size, products = size_of(p), p.recipe.products_of(x.extra)
    angles, pairs, interleaved = None, 0, False
    if products.scales:
        x = x._replace(q=x.q.view(torch.int8), k=x.k.view(torch.int8), v=x.v.view(torch.int8))
    if products.angles is not None:
        cos, sin, *_ = products.angles.tables()
        angles, pairs, interleaved = (
            Tables(cos, sin, cos.stride(0), sin.stride(0)),
            cos.shape[1],
            products.angles.interleaved,
        )
    sizes = device.Sizes(p.H // p.H_k, p.D, p.D_v, size, pairs, interleaved)
    starts, ends = (None if t is None else t.contiguous() for t in key_bounds(p.values(x.extra)[0]))
    bits = [t.view(torch.int8) if t is not None and t.dtype == torch.float8_e4m3fn else t for t in codes]
    given = device.Inputs(rows(x.q), rows(x.k), rows(x.v), starts, ends, angles, products.scales or None)
    where, (M, N), made = packed(p, x), lengths(p), device.Codes(*bits)
    exact = {"enable_fp_fusion": False, "sizes": sizes}
    statistics = Launch(
        attention_quantize_statistics, p.B * p.H_k, (given, made, where, M, N, p.H_k),
        {**exact, "SMOOTH": smooths(p), "num_warps": 8}, compiled,
    )  # fmt: skip
    q_tiles, k_tiles = cdiv(p.M, BLOCK_Q), cdiv(p.N, BLOCK_K)
    of_q, of_k = p.B * p.H * q_tiles, p.B * p.H_k * k_tiles * (1 if codes.v is None else 2)
    arguments = (given, made, where, p.scale, M, N, p.H, q_tiles, k_tiles, *blocks_of(p), of_q)
    blocks = Launch(attention_quantize, of_q + of_k, arguments, {**exact, "num_warps": WARPS.get(size, 4)}, compiled)
    return [blocks] if products.scales or products.mean is not None else [statistics, blocks]
