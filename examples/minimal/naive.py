"""Stage 1: standard attention. The truth for the other stages, and what they avoid.

    S = Q K^T / sqrt(d)      P = softmax(S)      O = P V

Q is (heads, M, d): M queries. K and V are (heads, N, d): N keys and their values. Rows i are queries, columns j keys.
"""

import torch


def hide_future(S, i0, j0, shift):
    """-inf where key j comes after query i: e^-inf is 0, so the key leaves every sum.

    i0 and j0 are where this piece of S starts. With M != N the last query is aligned with the last key: shift = N - M.
    """
    i = i0 + torch.arange(S.shape[-2], device=S.device)[:, None]
    j = j0 + torch.arange(S.shape[-1], device=S.device)[None, :]
    return S.masked_fill(j > i + shift, -torch.inf)


def attention(Q, K, V, causal=False):
    """O, (heads, M, d)."""
    (_, M, d), N = Q.shape, K.shape[1]
    S = Q @ K.mT * d**-0.5  # (heads, M, N): sqrt(d) keeps the spread of S near 1, whatever d is
    if causal:
        S = hide_future(S, 0, 0, N - M)
    # m, the row max: e^S overflows beyond S = 88 in fp32 (11 in fp16), e^(S - m) never does, and softmax is the same,
    # because the factor e^-m stands above and below its fraction line.
    m = S.amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)  # a row that sees no key must not give inf - inf
    P = torch.exp(S - m)
    # l, the row sum: softmax divides by it so that the weights of a row sum to 1. A row that sees no key gets O = 0.
    l = P.sum(-1, keepdim=True)
    P = P / l.masked_fill(l == 0, 1.0)
    return P @ V


def bytes_moved(heads, M, N, d, size):
    """What the lines above read and write, full attention, numbers of `size` bytes.

    Each line is a pass over M x N numbers: the product writes them, * reads and writes, max reads, S - m and exp read
    and write, sum reads, / reads and writes, the last product reads. That makes 12; Q, K, V, O add little.
    """
    return heads * size * (12 * M * N + 2 * M * d + 2 * N * d)


def main():
    torch.manual_seed(0)
    Q, K, V = torch.randn(3, 2, 77, 64)
    for causal in (False, True):
        truth = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (Q, K, V)), is_causal=causal)
        error = (attention(Q, K, V, causal) - truth).abs().max().item()
        print(f"naive, causal={causal}: largest error {error:.1e}")
        assert error < 1e-5
    for N in (1024, 16384):
        moved, least = bytes_moved(1, N, N, 64, 4), 4 * 4 * N * 64
        print(f"N = {N}: moves {moved / 1e6:,.0f} MB a head, of which Q, K, V and O are {least / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
