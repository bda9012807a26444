"""Launch the kernels that quantize Q, K and V."""

from typing import Any

import torch

from ..call.operands import Codes, Operands
from ..call.problem import Problem
from ..host.arguments import cdiv, lengths, packed, rows, with_adjacent_rows
from ..host.launch import Launch, current_stream
from ..rotary.kernel import Tables
from .codes import BLOCK_K, BLOCK_Q, blocks_of, columns, empty_codes, given_statistics, key_bounds, smooths
from .kernel import attention_quantize
from .rows import Inputs, Sizes
from .statistics import attention_quantize_statistics

WARPS = {64: 8, 256: 8}
"""Counts warps by columns of codes, else 4: threads would need too many registers."""


def codes_of(p: Problem, x: Operands, compiled: dict[Any, Any]) -> Codes:
    """Return the codes of a call."""
    codes, stream = empty_codes(p, x.q.device), current_stream(x.q.device)
    found = given_statistics(p, x)
    if found is not None:
        codes = codes._replace(mean=found[0].contiguous(), balance=found[1].contiguous())
    launches = quantize_launches(p, with_adjacent_rows(x), codes, compiled)
    for launch in launches[found is not None :]:
        launch.run(stream)
    return codes


def bits(t: Any) -> Any:
    """Return e4m3 as bytes, which the kernels read and write; others as they are."""
    return t.view(torch.int8) if t is not None and t.dtype == torch.float8_e4m3fn else t


def quantize_launches(p: Problem, x: Operands, codes: Codes, compiled: dict[Any, Any]) -> list[Launch]:
    """Return the launches that write the codes of a call, by `empty_codes`: mean and balance, then blocks."""
    size, products = columns(p), p.recipe.products_of(x.extra)
    tables, pairs, interleaved = None, 0, False
    if (angles := products.angles) is not None:
        tables, pairs, interleaved = Tables(*angles.tables()), angles.pairs, angles.interleaved
    sizes = Sizes(p.H // p.H_k, p.D, p.D_v, size, pairs, interleaved)
    q, k, v = (rows(bits(t)) for t in x[:3])
    starts, ends = (None if t is None else t.contiguous() for t in key_bounds(p, x))
    given = Inputs(q, k, v, starts, ends, tables, products.scales or None)
    where, (M, N), made = packed(p, x), lengths(p), Codes(*map(bits, codes))
    exact = {"enable_fp_fusion": False, "sizes": sizes}
    statistics = Launch(
        attention_quantize_statistics, p.B * p.H_k, (given, made, where, M, N, p.H_k),
        {**exact, "SMOOTH": smooths(p), "num_warps": 8}, compiled,
    )  # fmt: skip
    q_tiles, k_tiles = cdiv(p.M, BLOCK_Q), cdiv(p.N, BLOCK_K)
    of_q, of_k = p.B * p.H * q_tiles, p.B * p.H_k * k_tiles * (1 + products.codes_of_v)
    arguments = (given, made, where, p.scale, M, N, p.H, q_tiles, k_tiles, *blocks_of(p), of_q)
    blocks = Launch(attention_quantize, of_q + of_k, arguments, {**exact, "num_warps": WARPS.get(size, 4)}, compiled)
    return [statistics, blocks]
