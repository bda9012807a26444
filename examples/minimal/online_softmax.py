"""Stage 2: the online softmax. A row of S is seen in pieces, and never needed whole.

Softmax needs the row's max m before the first exponential, and m is known only after the last key. Start anyway, with
the max of the keys seen so far, and correct later. After some pieces a row has, summed over the keys j seen,

    m = max S_j         l = sum e^(S_j - m)         O = sum e^(S_j - m) V_j         (not divided yet)

The next piece may hold a larger number: m_new = max(m, its max). Every term above should have used m_new. Because

    e^(S_j - m_new) = e^(S_j - m) * e^(m - m_new)

all terms are wrong by the same factor alpha = e^(m - m_new), and one product repairs the whole sum:

    l_new = alpha l + sum of the piece's e^(S_j - m_new)         O_new = alpha O + the piece's e^(S_j - m_new) V_j

alpha is at most 1, so nothing overflows. Before the first piece m = -inf and l = O = 0: the empty sum is right too.
At the end O / l is softmax(S) V. It took one pass over the keys, and memory for one piece of S.
"""

import torch


def hide_future(S, i0, j0, shift):
    """-inf where key j comes after query i."""
    i = i0 + torch.arange(S.shape[-2], device=S.device)[:, None]
    j = j0 + torch.arange(S.shape[-1], device=S.device)[None, :]
    return S.masked_fill(j > i + shift, -torch.inf)


def online_softmax(S, m, l):
    """One piece: P = e^(S - m_new), the factor alpha for older sums, m_new and l_new."""
    m_new = torch.maximum(m, S.amax(-1, keepdim=True))
    finite = m_new.masked_fill(m_new == -torch.inf, 0.0)  # no key seen yet: avoid inf - inf
    P = torch.exp(S - finite)
    alpha = torch.exp(m - finite)
    return P, alpha, m_new, alpha * l + P.sum(-1, keepdim=True)


def attention(Q, K, V, causal=False, B_c=64, check=False):
    """O, (heads, M, d), from B_c columns at a time; `check` asserts what m, l and O mean after every piece."""
    (_, M, d), N = Q.shape, K.shape[1]
    O = torch.zeros_like(Q)
    m = Q.new_full((*Q.shape[:2], 1), -torch.inf)
    l = torch.zeros_like(m)
    for j0 in range(0, N, B_c):
        K_j, V_j = K[:, j0 : j0 + B_c], V[:, j0 : j0 + B_c]
        S = Q @ K_j.mT * d**-0.5  # (heads, M, B_c)
        if causal:
            S = hide_future(S, 0, j0, N - M)
        P, alpha, m, l = online_softmax(S, m, l)
        O = alpha * O + P @ V_j
        if check:
            assert_invariants(Q, K[:, : j0 + B_c], V[:, : j0 + B_c], N - M if causal else N, m, l, O)
    return O / l.masked_fill(l == 0, 1.0)


def assert_invariants(Q, K, V, shift, m, l, O):
    """m, l and O are what one gets from all keys so far at once."""
    S = hide_future(Q @ K.mT * Q.shape[-1] ** -0.5, 0, 0, shift)
    P = torch.exp(S - S.amax(-1, keepdim=True)).nan_to_num(0.0)
    torch.testing.assert_close(m, S.amax(-1, keepdim=True))
    torch.testing.assert_close(l, P.sum(-1, keepdim=True))
    torch.testing.assert_close(O, P @ V, rtol=1e-4, atol=1e-5)
    # the largest key seen contributes e^0, so l lies between 1 and the number of keys: it cannot overflow either
    assert ((l == 0) | (l >= 1)).all()
    assert (l <= K.shape[1] * 1.0001).all()


def bytes_moved(heads, M, N, d, size, B_c=64):
    """A piece of S still takes 10 passes, as line by line in stage 1, and O and Q are passed over for every piece."""
    pieces = -(-N // B_c)
    return heads * size * (10 * M * N + 2 * N * d + pieces * 6 * M * d)


def main():
    torch.manual_seed(0)
    Q, K, V = torch.randn(3, 2, 77, 64)
    for causal in (False, True):
        truth = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (Q, K, V)), is_causal=causal)
        error = (attention(Q, K, V, causal, B_c=16, check=True) - truth).abs().max().item()
        print(f"online softmax, causal={causal}: largest error {error:.1e}, invariants hold after every piece")
        assert error < 1e-5


if __name__ == "__main__":
    main()
