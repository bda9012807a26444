"""Stage 5: the backward, in tiles (Dao et al. 2022, algorithm 4, split in two passes).

Let c = 1/sqrt(d), S = c Q K^T, P = softmax(S), O = P V, and dX the gradient of the loss with respect to X.

    O = P V                       gives   dV = P^T dO      and   dP = dO V^T
    P_ij = e^(S_ij - lse_i)       gives   dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik)
    S = c Q K^T                   gives   dQ = c dS K      and   dK = c dS^T Q

The second line is the derivative of softmax: raising S_ij raises P_ij and, through the row's sum, lowers all others.
Its sum runs over the whole row, which no tile holds. But the sum is a number that we can have without P:

    delta_i = sum_k P_ik dP_ik = sum_k P_ik (dO_i . V_k) = dO_i . (sum_k P_ik V_k) = dO_i . O_i

so delta = rowsum(dO * O), computed once per row from what is in memory anyway. P was not kept: that would be M x N
numbers. It is computed again from S and lse, tile by tile, as the forward left it. More arithmetic, far less memory.

dK and dV sum over rows, dQ sums over columns. Each gets its own loop, so every sum stays in registers and nobody
adds to memory that another one writes. The price is that S and dP are computed twice.
"""

import torch
from flash2 import attention, hide_future


def probabilities(Q_i, K_j, lse_i, i0, j0, shift):
    """P of one tile; shift is None for full attention."""
    S = Q_i @ K_j.mT * Q_i.shape[-1] ** -0.5  # (heads, B_r, B_c)
    if shift is not None:
        S = hide_future(S, i0, j0, shift)
    lse_i = lse_i.masked_fill(lse_i == -torch.inf, 0.0)  # a row that sees no key: P = e^-inf = 0
    return torch.exp(S - lse_i[..., None])


def dkdv(Q, K, V, dO, lse, delta, shift, B_r, B_c):
    """dK and dV: a block of columns stays, the rows that see it come by."""
    M, d = Q.shape[1:]
    dK, dV = torch.zeros_like(K), torch.zeros_like(V)
    for j0 in range(0, K.shape[1], B_c):
        j = slice(j0, j0 + B_c)
        first = 0 if shift is None else max(0, j0 - shift) // B_r * B_r  # tiles before it lie above the diagonal
        for i0 in range(first, M, B_r):
            i = slice(i0, i0 + B_r)
            P = probabilities(Q[:, i], K[:, j], lse[:, i], i0, j0, shift)
            dP = dO[:, i] @ V[:, j].mT
            dS = P * (dP - delta[:, i, None])
            dV[:, j] += P.mT @ dO[:, i]
            dK[:, j] += dS.mT @ Q[:, i] * d**-0.5
    return dK, dV


def dq(Q, K, V, dO, lse, delta, shift, B_r, B_c):
    """dQ: a block of rows stays, the columns that it sees come by, as in the forward."""
    (_, M, d), N = Q.shape, K.shape[1]
    dQ = torch.zeros_like(Q)
    for i0 in range(0, M, B_r):
        i = slice(i0, i0 + B_r)
        end = N if shift is None else max(0, min(N, i0 + B_r + shift))
        for j0 in range(0, end, B_c):
            j = slice(j0, j0 + B_c)
            P = probabilities(Q[:, i], K[:, j], lse[:, i], i0, j0, shift)
            dP = dO[:, i] @ V[:, j].mT
            dS = P * (dP - delta[:, i, None])
            dQ[:, i] += dS @ K[:, j] * d**-0.5
    return dQ


def backward(Q, K, V, O, lse, dO, causal=False, B_r=64, B_c=64):
    """dQ, dK, dV from what the forward was given and what it left."""
    shift = K.shape[1] - Q.shape[1] if causal else None
    delta = (dO * O).sum(-1)  # (heads, M)
    dK, dV = dkdv(Q, K, V, dO, lse, delta, shift, B_r, B_c)
    return dq(Q, K, V, dO, lse, delta, shift, B_r, B_c), dK, dV


def bytes_moved(heads, M, N, d, size, B_r=64, B_c=64):
    """Slow memory: delta; per key tile, Q, dO, lse and delta; per query tile, K and V; the rest once."""
    key_tiles, query_tiles = -(-N // B_c), -(-M // B_r)
    loops = key_tiles * M * (2 * d + 2) + 4 * N * d + query_tiles * 2 * N * d + M * (3 * d + 2)
    return heads * size * (M * (2 * d + 1) + loops)


def main():
    torch.manual_seed(0)
    Q, K, V, dO = torch.randn(4, 2, 77, 64)
    for causal in (False, True):
        leaves = [t.double().requires_grad_() for t in (Q, K, V)]
        truth = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        truth = torch.autograd.grad(truth, leaves, dO.double())
        grads = backward(Q, K, V, *attention(Q, K, V, causal), dO, causal, B_r=32, B_c=16)
        errors = [(grad - true).abs().max().item() for grad, true in zip(grads, truth, strict=True)]
        print(f"backward, causal={causal}: largest errors of dQ, dK, dV " + ", ".join(f"{e:.1e}" for e in errors))
        assert max(errors) < 1e-5


if __name__ == "__main__":
    main()
