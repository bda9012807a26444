"""Launch the backward in chunks of key tiles."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...call.operands import Grads, Operands
from ...call.problem import Problem
from ...host.arguments import cdiv, lengths, odd, rows
from ...host.launch import Launch
from ...tile.gradients import Factors
from ...tile.ranges import Variant
from ..plan import Plan
from ..tiles import in_chunks
from .kernel import Chunk, Tile, attention_backward_chunk, attention_backward_chunk_sums
from .tiles import chunk_tiles

WORKSPACE = 256 << 20
"""Bytes of P and dS that a chunk may have, beyond its least number of key tiles."""
LEAST = 16
"""Key tiles that a chunk has at least, if there are so many. With fewer, programs would not occupy a large GPU."""


def counts(p: Problem) -> tuple[int, int, int]:
    """Return the key tiles of a head, its query tiles, and the key tiles of a chunk: whole heads, if a chunk holds
    one."""
    row = chunk_tiles(p)
    key_tiles, query_tiles = max(1, cdiv(p.N, row.B_c)), cdiv(p.M, row.B_r)
    each = 2 * p.H // p.H_k * query_tiles * row.B_r * row.B_c * p.dtype.itemsize
    size = min(max(LEAST, WORKSPACE // each), p.B * p.H_k * key_tiles)
    return key_tiles, query_tiles, size // key_tiles * key_tiles if size > key_tiles else size


def shape_of(p: Problem) -> tuple[int, int, int]:
    """Return the shape of a chunk's P: a matrix for each key tile and query head, of all queries x B_c."""
    row, (_, query_tiles, size) = chunk_tiles(p), counts(p)
    return size * (p.H // p.H_k), query_tiles * row.B_r, row.B_c


def workspace(p: Problem, x: Operands) -> tuple[Tensor, ...]:
    """Allocate P and dS of a chunk, and sums of dQ where a head has several chunks; nothing if calls run otherwise."""
    if not in_chunks(p):
        return ()
    key_tiles, _, size = counts(p)
    found = [torch.empty(shape_of(p), dtype=p.dtype, device=x.q.device) for _ in range(2)]
    if size < key_tiles:
        found.append(torch.empty(x.q.shape, dtype=torch.float32, device=x.q.device))
    return tuple(found)


def launches(
    p: Problem, pl: Plan, given: tuple[Any, ...], made: tuple[Tensor, ...], grads: Grads, where: Any, variant: Variant,
    factors: Factors, key: Any,
) -> Iterator[Launch]:  # fmt: skip
    """Yield two launches a chunk. `given`: Q, K, V, dO and row values; `made`: what `workspace` allocated."""
    row, (M, N), (key_tiles, query_tiles, size) = chunk_tiles(p), lengths(p), counts(p)
    q, k, _, do, _ = given
    dq, dk, dv = (rows(t) for t in grads[:3])
    G, sums = p.H // p.H_k, rows(made[2]) if len(made) == 3 else None
    tile = Tile(G, p.D, p.D_v, row.B_r, row.B_c, row.columns, row.slice, pl.precision)
    constants = {"tile": tile, "num_warps": row.warps, "num_stages": row.stages}
    of_k, of_v = cdiv(p.D, row.columns), cdiv(p.D_v, row.columns)
    total = p.B * p.H_k * key_tiles
    for first in range(0, total, size):
        count = min(size, total - first)
        heads = (first + count - 1) // key_tiles - first // key_tiles + 1
        counted = [2 * first + 3, *map(odd, (count, key_tiles, query_tiles))]
        chunk = Chunk(*made[:2], *counted)
        shared = where, variant, factors, M, N, p.H_k, chunk
        arguments = *given, *shared
        yield Launch(attention_backward_chunk, count * G * query_tiles, arguments, constants, pl.compiled, key)
        arguments = q, k, do, sums, dq, dk, dv, *shared
        programs = count * (of_k + of_v) + heads * G * query_tiles * of_k
        yield Launch(attention_backward_chunk_sums, programs, arguments, constants, pl.compiled, key)


def describe(p: Problem) -> list[str]:
    """Describe the chunks."""
    row, size, made = chunk_tiles(p), counts(p)[2], 2 * prod(shape_of(p)) * p.dtype.itemsize
    tiles = f"{row.B_r}x{row.B_c}, {row.columns} columns of a gradient, {row.warps} warps"
    return [f"backward in chunks of {size} key tiles {tiles}; P and dS take {made >> 20} MiB"]
