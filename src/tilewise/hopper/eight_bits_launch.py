"""Launch the forward on 8-bit codes of Q, K and, with "fp8", V (`tilewise.quantize`)."""

from typing import Any

from torch import Tensor

from ..host.launch import Launch, cdiv, device_values, dropout, packed, rows, tile_lists, unused
from ..problem import Operands, Problem, Saved
from ..quantize import Codes, blocks_of
from ..tile.ranges import Variant
from .descriptors import Box, Descriptor, layout_of
from .forward import kernel as kernels
from .forward.eight_bits import Codes as Scales
from .parts import scores
from .plan import Plan, dropout_warps, eight_bits_tile, processors
from .tiles import EIGHT_BITS, padded


def of_codes(codes: Tensor, batch: int, heads: int, box: tuple[int, int]) -> Descriptor:
    """Describe blocks of codes to TMA as (batch, heads, rows, columns)."""
    size = codes.shape[-1]
    count = codes.numel() // (batch * heads * size)
    shape, strides = [batch, heads, count, size], [heads * count * size, count * size, size, 1]
    return Descriptor(codes, Box(shape, strides, [1, 1, *box], layout_of(*box, codes.dtype)))


def forward_launches(p: Problem, pl: Plan, x: Operands, codes: Codes, saved: Saved, counter: Tensor) -> list[Launch]:
    """Return one launch, and one before it if tiles are listed; the codes are written before."""
    D, warps = padded(p), dropout_warps(p, 256)
    chosen = EIGHT_BITS[D, str(p.recipe.precision)]
    row = chosen.row
    if warps:
        row = row._replace(warpgroups=2, registers=208 if warps == 4 else 224)
    tile = eight_bits_tile(p, chosen._replace(row=row), warps)
    parts, changes, sink = pl.values or device_values(p, x.extra, scores)
    lists, listing = tile_lists(p, pl, row, parts, x, by_key=False)
    batch, B_c = 1 if p.recipe.varlen else p.B, row.B_c
    v = Descriptor(x.v, pl.boxes[2]) if codes.v is None else of_codes(codes.v, batch, p.H_k, (D, B_c))
    of_rows, where, skipped = (
        (rows(p, saved.o), packed(p, x), unused(p, saved)) if p.recipe.varlen else (None, None, None)
    )
    tiles = cdiv(p.M, row.B_r)
    shape = pl.shape._replace(tiles=tiles)
    arguments = (
        of_codes(codes.q, batch, p.H, (64, D)), of_codes(codes.k, batch, p.H_k, (B_c, D)), v,
        Scales(codes.q_descale, codes.q_shift, codes.k_descale, codes.v_descale, *blocks_of(p)),
        Descriptor(saved.o, pl.boxes[3]), of_rows, saved.lse, counter, where, skipped,
        Variant(parts, changes, dropout(p, saved.seed), lists, sink), pl.forward_c, shape,
    )  # fmt: skip
    constants: dict[str, Any] = {"tile": tile, "REGISTERS": row.registers, "num_warps": 4}
    programs = min(p.B * p.H * tiles, processors(x.q.device))
    return [*listing, Launch(kernels.attention_forward, programs, arguments, constants, pl.compiled, "8 bits")]
