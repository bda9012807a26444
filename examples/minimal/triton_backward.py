"""Stage 7: stage 5 as GPU kernels: delta, then dK and dV by tiles of keys, and dQ by tiles of queries.

The formulas and their reasons are in backward.py. As there, P comes back from lse, in base 2 here.
"""

import math

import torch
import triton
import triton.language as tl
from triton_forward import LOG2E, attention, hide, load_rows, sizes, store_rows


@triton.jit
def load_numbers(X, head, i0, M, ROWS: tl.constexpr):
    """One number of each row: of lse or delta."""
    i = i0 + tl.arange(0, ROWS)
    return tl.load(X + head.to(tl.int64) * M + i, mask=i < M, other=0.0)  # (ROWS,)


@triton.jit
def gradients(q, k, v, do, lse, delta, i0, j0, c, M, N, CAUSAL: tl.constexpr):
    """P and dS of one tile, (B_r, B_c)."""
    S = tl.dot(q, k.T, input_precision="ieee") * c
    S = hide(S, i0, j0, M, N, CAUSAL)
    lse = tl.where(lse == float("-inf"), 0.0, lse)  # a row that sees no key: P = e^-inf = 0
    # The difference is turned into base 2, not S and lse, whose rounding would grow with them. Rows past the end need
    # no mask: their q and dO were loaded as 0, and so is all that they add.
    P = tl.exp2((S - lse[:, None]) * LOG2E)
    dP = tl.dot(do, v.T, input_precision="ieee")
    return P, P * (dP - delta[:, None])


@triton.jit
def delta(O, dO, Delta, M, d: tl.constexpr, D: tl.constexpr, B_R: tl.constexpr):
    """delta = rowsum(dO * O)."""
    head = tl.program_id(1)
    i0 = tl.program_id(0) * B_R
    o = load_rows(O, head, i0, M, d, B_R, D).to(tl.float32)
    do = load_rows(dO, head, i0, M, d, B_R, D).to(tl.float32)
    i = i0 + tl.arange(0, B_R)
    tl.store(Delta + head.to(tl.int64) * M + i, tl.sum(o * do, 1), mask=i < M)


@triton.jit
def dkdv(
    Q, K, V, dO, L, Delta, dK, dV, c, M, N,
    d: tl.constexpr, D: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys: the tiles of queries that see it come by."""
    head = tl.program_id(1)
    j0 = tl.program_id(0) * B_C
    k = load_rows(K, head, j0, N, d, B_C, D)
    v = load_rows(V, head, j0, N, d, B_C, D)
    dk = tl.zeros([B_C, D], tl.float32)
    dv = tl.zeros([B_C, D], tl.float32)
    first = tl.maximum(0, j0 - (N - M)) // B_R * B_R if CAUSAL else 0  # tiles before it lie above the diagonal
    for i0 in range(first, M, B_R):
        q = load_rows(Q, head, i0, M, d, B_R, D)
        do = load_rows(dO, head, i0, M, d, B_R, D)
        lse = load_numbers(L, head, i0, M, B_R)
        sums = load_numbers(Delta, head, i0, M, B_R)
        P, dS = gradients(q, k, v, do, lse, sums, i0, j0, c, M, N, CAUSAL)
        dv = tl.dot(P.to(do.dtype).T, do, dv, input_precision="ieee")
        dk = tl.dot(dS.to(q.dtype).T, q, dk, input_precision="ieee")
    store_rows(dK, dk * c, head, j0, N, d)
    store_rows(dV, dv, head, j0, N, d)


@triton.jit
def dq(
    Q, K, V, dO, L, Delta, dQ, c, M, N,
    d: tl.constexpr, D: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries: the tiles of keys that it sees come by, as in the forward."""
    head = tl.program_id(1)
    i0 = tl.program_id(0) * B_R
    q = load_rows(Q, head, i0, M, d, B_R, D)
    do = load_rows(dO, head, i0, M, d, B_R, D)
    lse = load_numbers(L, head, i0, M, B_R)
    sums = load_numbers(Delta, head, i0, M, B_R)
    acc = tl.zeros([B_R, D], tl.float32)
    end = tl.minimum(N, i0 + B_R + N - M) if CAUSAL else N
    for j0 in range(0, end, B_C):
        k = load_rows(K, head, j0, N, d, B_C, D)
        v = load_rows(V, head, j0, N, d, B_C, D)
        _, dS = gradients(q, k, v, do, lse, sums, i0, j0, c, M, N, CAUSAL)
        acc = tl.dot(dS.to(k.dtype), k, acc, input_precision="ieee")
    store_rows(dQ, acc * c, head, i0, M, d)


def backward(Q, K, V, O, lse, dO, causal=False, B_r=32, B_c=32):
    """dQ, dK, dV from what the forward was given and what it left."""
    Q, K, V, dO = (t.contiguous() for t in (Q, K, V, dO))
    (heads, M, d), N = Q.shape, K.shape[1]
    dQ, dK, dV, sums = (torch.empty_like(t) for t in (Q, K, V, lse))
    tiles = sizes(Q, B_r, B_c)
    by_rows, by_columns = (triton.cdiv(M, tiles["B_R"]), heads), (triton.cdiv(N, tiles["B_C"]), heads)
    delta[by_rows](O, dO, sums, M, d, tiles["D"], tiles["B_R"])
    given, constants = (Q, K, V, dO, lse, sums), {**tiles, "CAUSAL": causal}
    dkdv[by_columns](*given, dK, dV, 1 / math.sqrt(d), M, N, **constants)
    dq[by_rows](*given, dQ, 1 / math.sqrt(d), M, N, **constants)
    return dQ, dK, dV


def main():
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        print("no GPU: set TRITON_INTERPRET=1 to run this in Triton's interpreter")
        return
    torch.manual_seed(0)
    Q, K, V, dO = torch.randn(4, 2, 77, 40, device="cuda" if torch.cuda.is_available() else "cpu")
    for causal in (False, True):
        leaves = [t.double().requires_grad_() for t in (Q, K, V)]
        truth = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        truth = torch.autograd.grad(truth, leaves, dO.double())
        grads = backward(Q, K, V, *attention(Q, K, V, causal), dO, causal)
        errors = [(grad - true).abs().max().item() for grad, true in zip(grads, truth, strict=True)]
        print(f"triton backward, causal={causal}: largest errors " + ", ".join(f"{e:.1e}" for e in errors))
        assert max(errors) < 1e-5


if __name__ == "__main__":
    main()
