"""Stage 3: FlashAttention-1 (Dao et al. 2022, algorithm 1). Rows come in tiles too, so that all of it fits on the chip.

A tile of S has B_r rows and B_c columns. Tiles of Q, K, V, O and S fit into fast memory together, where numbers cost
almost nothing to read; slow memory then sees Q, K, V and O only, never S or P.

The order of the loops is that of the first paper: key tiles outside, query tiles inside. A row's O, m and l are
therefore not finished before the last key tile. They live in slow memory and are read and written for each key tile.
O there is divided by l every time, so that it is always the right answer for the keys seen so far.
"""

import torch


def hide_future(S, i0, j0, shift):
    """-inf where key j comes after query i."""
    i = i0 + torch.arange(S.shape[-2], device=S.device)[:, None]
    j = j0 + torch.arange(S.shape[-1], device=S.device)[None, :]
    return S.masked_fill(j > i + shift, -torch.inf)


def online_softmax(S, m, l):
    """One tile: P = e^(S - m_new), the factor alpha for older sums, m_new and l_new."""
    m_new = torch.maximum(m, S.amax(-1, keepdim=True))
    finite = m_new.masked_fill(m_new == -torch.inf, 0.0)  # no key seen yet: avoid inf - inf
    P = torch.exp(S - finite)
    alpha = torch.exp(m - finite)
    return P, alpha, m_new, alpha * l + P.sum(-1, keepdim=True)


def attention(Q, K, V, causal=False, B_r=64, B_c=64):
    """O, (heads, M, d). Lengths need not be multiples of the tiles: the last slices are just shorter."""
    (_, M, d), N = Q.shape, K.shape[1]
    O = torch.zeros_like(Q)
    # m and l of every row, kept between the visits of a row: what the recurrence has to remember besides O
    m = Q.new_full((*Q.shape[:2], 1), -torch.inf)
    l = torch.zeros_like(m)
    for j0 in range(0, N, B_c):
        K_j, V_j = K[:, j0 : j0 + B_c], V[:, j0 : j0 + B_c]  # stay in fast memory during the loop over i
        for i0 in range(0, M, B_r):
            i = slice(i0, i0 + B_r)
            S = Q[:, i] @ K_j.mT * d**-0.5  # (heads, B_r, B_c)
            if causal:
                S = hide_future(S, i0, j0, N - M)
            P, alpha, m_new, l_new = online_softmax(S, m[:, i], l[:, i])
            # O was divided by the old l: multiply by it again, add this tile, divide by the new one
            total = alpha * l[:, i] * O[:, i] + P @ V_j
            O[:, i] = total / l_new.masked_fill(l_new == 0, 1.0)
            m[:, i], l[:, i] = m_new, l_new
    return O


def bytes_moved(heads, M, N, d, size, B_c=64):
    """Slow memory: K and V once; per key tile, Q read, O, m and l read and written."""
    tiles = -(-N // B_c)
    return heads * size * (2 * N * d + tiles * M * (3 * d + 4))


def main():
    torch.manual_seed(0)
    Q, K, V = torch.randn(3, 2, 77, 64)
    for causal in (False, True):
        truth = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (Q, K, V)), is_causal=causal)
        error = (attention(Q, K, V, causal, B_r=32, B_c=16) - truth).abs().max().item()
        print(f"flash1, causal={causal}: largest error {error:.1e}")
        assert error < 1e-5


if __name__ == "__main__":
    main()
