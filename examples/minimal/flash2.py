"""Stage 4: FlashAttention-2 (Dao 2023, algorithm 1). The loops change places.

Query tiles outside, key tiles inside: a tile of O, with its m and l, stays in registers from the first key tile to
the last and is written once. Four things follow.

- No O, m, l is read back: only K and V are read again, once per tile of queries.
- Query tiles do not depend on each other, so each can run on its own processor: one long head fills a GPU.
- O is divided by l once, at the end, and not at every tile: divisions run far from the matrix units' rate.
- m and l leave as one number per row, lse = m + log l, the log of the whole sum of e^S. The backward needs it: with
  it P = e^(S - lse) comes back exactly, in one step and already divided, from a tile of S computed again.

Tiles above the diagonal hold only hidden entries, so the loop stops before them: about half of the work for causal.
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
    """O, (heads, M, d), and lse, (heads, M); a row that sees no key gets 0 and -inf."""
    (_, M, d), N = Q.shape, K.shape[1]
    O = torch.empty_like(Q)
    lse = Q.new_empty(Q.shape[:2])
    for i0 in range(0, M, B_r):
        i = slice(i0, i0 + B_r)
        Q_i = Q[:, i]
        acc = torch.zeros_like(Q_i)  # O before the division
        m = torch.full_like(Q_i[..., :1], -torch.inf)
        l = torch.zeros_like(m)
        # the last row of the tile sees keys up to i0 + B_r - 1 + N - M
        end = max(0, min(N, i0 + B_r + N - M)) if causal else N
        for j0 in range(0, end, B_c):
            K_j, V_j = K[:, j0 : j0 + B_c], V[:, j0 : j0 + B_c]
            S = Q_i @ K_j.mT * d**-0.5  # (heads, B_r, B_c)
            if causal and j0 + B_c - 1 > i0 + N - M:  # below the diagonal nothing is hidden
                S = hide_future(S, i0, j0, N - M)
            P, alpha, m, l = online_softmax(S, m, l)
            acc = alpha * acc + P @ V_j
        O[:, i] = acc / l.masked_fill(l == 0, 1.0)
        lse[:, i] = (m + torch.log(l)).squeeze(-1)
    return O, lse


def bytes_moved(heads, M, N, d, size, B_r=64):
    """Slow memory: Q read once, O and lse written once; per query tile, K and V read."""
    tiles = -(-M // B_r)
    return heads * size * (M * (2 * d + 1) + tiles * 2 * N * d)


def main():
    torch.manual_seed(0)
    Q, K, V = torch.randn(3, 2, 77, 64)
    for causal in (False, True):
        truth = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (Q, K, V)), is_causal=causal)
        O, lse = attention(Q, K, V, causal, B_r=32, B_c=16)
        error = (O - truth).abs().max().item()
        print(f"flash2, causal={causal}: largest error {error:.1e}, lse of the last row {lse[0, -1].item():.3f}")
        assert error < 1e-5


if __name__ == "__main__":
    main()
