"""q, k and v as a forward with 8-bit products multiplies them, from its codes, in plain torch."""

import torch
from torch import Tensor

from ..call.backend import launch_module
from ..call.operands import Codes, Operands
from ..call.problem import Problem
from .codes import columns, key_order, per_query_head, quantize, rotated, signs_of


def codes_of(p: Problem, x: Operands) -> Codes:
    """Return the codes of a call whose forward handed none on, by the kernels on a GPU, else in torch: equal bits."""
    return launch_module("quantize").codes_of(p, x, {}) if x.q.is_cuda else quantize(p, x)


def multiplied(p: Problem, x: Operands, codes: Codes) -> Operands:
    """Return q, k and v as the two products of a forward take them, in fp32: Q and K rotated, (…, heads, size)."""
    q = _rows(p, x, codes.q.float() * codes.q_descale[..., None], 0)
    k = _rows(p, x, codes.k.float() * codes.k_descale[:, None, None], 1)
    v = x.v.float()
    if codes.v is not None and codes.v_descale is not None:
        v = codes.v.float().mT[:, torch.argsort(key_order(v.device))] * codes.v_descale[:, None, None]
        v = _rows(p, x, v, 1)[..., : p.D_v]
    return Operands(q, k, v, x.extra)


def dequantized(p: Problem, x: Operands, codes: Codes) -> Operands:
    """Return q, k and v as a forward multiplied them, in their own type and coordinates; K without its mean.

    The 16-bit backward takes these, with lse less `shift_of`: P sums to 1, as it did in the forward. With the original
    tensors it would not.
    """
    found, size = multiplied(p, x, codes), columns(p)
    signs = signs_of(size, x.q.device)
    q = rotated(found.q) * signs / per_query_head(p, _of_rows(p, x, codes.balance, 0), -2)
    k = rotated(found.k) * (signs / size) * _of_rows(p, x, codes.balance, 1)
    return Operands(q[..., : p.D].to(p.dtype), k[..., : p.D].to(p.dtype), found.v.to(p.dtype), x.extra)


def shift_of(p: Problem, x: Operands, codes: Codes) -> Tensor:
    """Return scale * q . mean of each row, of lse's shape: lse is that of the codes' logits plus this."""
    shift = _rows(p, x, codes.q_shift[..., None], 0)[..., 0]  # (B, M, H) or (T, H)
    return shift.transpose(-1, -2).contiguous()


def mean_of_keys(p: Problem, x: Operands, codes: Codes) -> Tensor:
    """Return the mean that K lost, for each query: (B, 1, H, D), packed (T, H, D)."""
    return per_query_head(p, _of_rows(p, x, codes.mean, 0), -2)[..., : p.D]


def probabilities(p: Problem, P: Tensor) -> Tensor:
    """Round P, at most 1, as its product with V does: 256 P to the type of V's codes, if it has any. Without scores,
    its sum is lse's."""
    *_, kind = p.products.code_types
    return P if kind is None else P.mul(256.0).to(kind).to(P.dtype).div_(256.0)


def _rows(p: Problem, x: Operands, t: Tensor, side: int) -> Tensor:
    """Take blocks (blocks, rows, columns) apart into (B, length, heads, columns), packed (T, heads, columns).

    `side` is 0 for queries, 1 for keys. Packed rows of no sequence hold any number.
    """
    heads, like, (_, size, columns) = (p.H, p.H_k)[side], (x.q, x.k)[side], t.shape
    if p.B == 0:  # all rows are of no sequence
        return t.new_zeros(*like.shape[:-2], heads, columns)
    at = p.recipe.layout_of(x.extra).in_blocks(side, like.shape[-3], size)
    return t.reshape(p.batch, heads, -1, columns)[:, :, at].transpose(1, 2).reshape(*like.shape[:-2], heads, columns)


def _of_rows(p: Problem, x: Operands, t: Tensor, side: int) -> Tensor:
    """Return numbers of each head (B, H_k, size) for each row: (B, 1, H_k, size), packed (T, H_k, size)."""
    return p.recipe.layout_of(x.extra).of_rows(t, side, (x.q, x.k)[side].shape[0])
