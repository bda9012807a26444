"""Products of slices: S = A B^T and S C, with tiles that are cut into four slices, two and one."""

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from tilewise.call.check import check_arguments, describe
from tilewise.tile.blocks import block, store_rows
from tilewise.tile.factors import (
    left_slices,
    load_left,
    load_right,
    load_stationary,
    load_streamed,
    load_values,
    product,
    tile_product,
)
from tilewise.tile.rows import Rows
from tilewise.triton import launch
from tilewise.triton.plan import planned
from tilewise.triton.tiles import DKDV, DQ, FORWARD, current

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")


@triton.jit
def twice(A, B, C, S, O, M, N, d: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, PRECISION: tl.constexpr):
    """S = A B^T, and O = S C."""
    b = tl.program_id(0)
    left = load_left(block(A, b, b, 0, B_R, d), 0, M, True, PRECISION)
    right = load_right(block(B, b, b, 0, B_C, d), 0, N, True, PRECISION)
    s = product(left, right, PRECISION)
    rows, columns = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    tl.store(S.ptr + rows * S.row + columns, s, mask=rows < M)
    c = load_values(block(C, b, b, 0, B_C, d), 0, N, True, PRECISION)
    store_rows(block(O, b, b, 0, B_R, d), 0, M, product(left_slices(s, c[0].dtype, PRECISION), c, PRECISION))


@triton.jit
def turned(A, B, S, M, N, d: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, PRECISION: tl.constexpr):
    """A B^T or its transpose, whichever way the backward takes it."""
    b = tl.program_id(0)
    stationary = load_stationary(block(A, b, b, 0, B_R, d), 0, M, PRECISION)
    streamed = load_streamed(block(B, b, b, 0, B_C, d), 0, N, True, PRECISION)
    s = tile_product(stationary, streamed, PRECISION)
    tl.store(S.ptr + tl.arange(0, s.shape[0])[:, None] * S.row + tl.arange(0, s.shape[1])[None, :], s)


def rows(t):
    """One matrix as an operand."""
    return Rows(t, 0, t.stride(0), 0)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize(("B_r", "B_c"), [(64, 128), (128, 64), (32, 32), (64, 16), (16, 64)])
@pytest.mark.parametrize("d", [64, 80])
def test_slices_sum_to_the_whole(B_r, B_c, d, precision):
    M, N = B_r - 3, B_c - 5
    A, B, C = random(M, d), random(N, d), random(N, d)
    S, O = torch.full((M, B_c), torch.nan), torch.full((M, d), torch.nan)
    twice[(1,)](*map(rows, (A, B, C, S, O)), M, N, d, B_r, B_c, precision)
    assert (S[:, N:] == 0).all()
    torch.testing.assert_close(S[:, :N], A @ B.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(O, A @ B.T @ C, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_the_tile_that_stays_is_the_right_factor_on_fma_units(precision):
    A, B = random(64, 48), random(32, 48)
    S = torch.full((64, 64), torch.nan)
    turned[(1,)](rows(A), rows(B), rows(S), 64, 32, 48, 64, 32, precision)
    want = A @ B.T
    want = want.T if precision == "ieee" else want
    torch.testing.assert_close(S[: want.shape[0], : want.shape[1]], want, rtol=1e-5, atol=1e-4)
    assert S.isnan().sum() == S.numel() - want.numel()


@pytest.mark.parametrize("D", [64, 128])
def test_the_rows_for_fma_units_attend_right(D):
    """Those of Hopper, whose tiles are larger than the interpreter's own."""
    q, k, v, do = (random(1, 150, 2, D) for _ in range(4))
    x, recipe, longest = check_arguments(q, k, v, tw.Causal(), (), None, None, 0.0, None, "ieee", False, "triton")
    p = describe(x, recipe, longest)
    chosen = {name: t["hopper", 4, D, "ieee"] for name, t in (("forward", FORWARD), ("dkdv", DKDV), ("dq", DQ))}
    plan = planned(p, current(p)._replace(**chosen))
    saved = launch.forward(p, plan, x, None)
    grads = launch.backward(p, plan, x, saved, do, None)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    o = tw.attention(*wide, mask=tw.Causal(), backend="cpu")
    for got, want in zip((saved.o, *grads[:3]), (o, *torch.autograd.grad(o, wide, do.double())), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
