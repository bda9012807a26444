"""Stage 6: stage 4 as a GPU kernel, in Triton. One program takes one tile of queries and loops over the keys.

Triton moves tiles between slow memory and the chip where the code says load and store, and everything in between stays
on the chip. New against stage 4: masks for ragged ends, because tiles have a fixed size, and base 2, because e^x is
computed as 2^(x log2 e) anyway: the factor log2 e joins c = 1/sqrt(d) in one multiplication.

    python examples/minimal/triton_forward.py                       on a GPU
    TRITON_INTERPRET=1 python examples/minimal/triton_forward.py    on a CPU, slowly
"""

import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(X, head, i0, length, d: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows i0.. of one head of X, (heads, length, d); 0 beyond the ends, so that they add nothing to a product."""
    i = i0 + tl.arange(0, ROWS)[:, None]
    x = tl.arange(0, D)[None, :]
    at = (head.to(tl.int64) * length + i) * d + x  # 64 bits: large tensors have more than 2^31 numbers
    return tl.load(X + at, mask=(i < length) & (x < d), other=0.0)  # (ROWS, D)


@triton.jit
def store_rows(X, x, head, i0, length, d: tl.constexpr):
    """Writes the part of a tile that exists."""
    i = i0 + tl.arange(0, x.shape[0])[:, None]
    column = tl.arange(0, x.shape[1])[None, :]
    at = (head.to(tl.int64) * length + i) * d + column
    tl.store(X + at, x.to(X.dtype.element_ty), mask=(i < length) & (column < d))


@triton.jit
def hide(S, i0, j0, M, N, CAUSAL: tl.constexpr):
    """-inf beyond the last key and, if causal, where key j comes after query i."""
    i = i0 + tl.arange(0, S.shape[0])[:, None]
    j = j0 + tl.arange(0, S.shape[1])[None, :]
    seen = j < N
    if CAUSAL:
        seen = seen & (j <= i + N - M)
    return tl.where(seen, S, float("-inf"))


@triton.jit
def online_softmax(S, m, l):
    """One tile, in base 2: P = 2^(S - m_new), the factor alpha for older sums, m_new and l_new."""
    m_new = tl.maximum(m, tl.max(S, 1))
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet: avoid inf - inf
    P = tl.exp2(S - finite[:, None])
    alpha = tl.exp2(m - finite)
    return P, alpha, m_new, alpha * l + tl.sum(P, 1)


@triton.jit
def forward(
    Q, K, V, O, L, c, M, N, d: tl.constexpr, D: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, CAUSAL: tl.constexpr
):
    """O and L, the lse, of one tile of queries. D is d rounded up to what matrix units take."""
    head = tl.program_id(1)
    i0 = tl.program_id(0) * B_R
    q = load_rows(Q, head, i0, M, d, B_R, D)
    acc = tl.zeros([B_R, D], tl.float32)  # O before the division; sums are fp32 whatever the inputs are
    m = tl.full([B_R], float("-inf"), tl.float32)
    l = tl.zeros([B_R], tl.float32)
    end = tl.minimum(N, i0 + B_R + N - M) if CAUSAL else N  # tiles above the diagonal are skipped
    for j0 in range(0, end, B_C):
        k = load_rows(K, head, j0, N, d, B_C, D)
        v = load_rows(V, head, j0, N, d, B_C, D)
        S = tl.dot(q, k.T, input_precision="ieee") * (c * LOG2E)  # "ieee": fp32 inputs are not cut to 10 bits
        S = hide(S, i0, j0, M, N, CAUSAL)  # (B_r, B_c)
        P, alpha, m, l = online_softmax(S, m, l)
        acc = tl.dot(P.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    store_rows(O, acc / tl.where(l == 0.0, 1.0, l)[:, None], head, i0, M, d)
    i = i0 + tl.arange(0, B_R)
    tl.store(L + head.to(tl.int64) * M + i, (m + tl.log2(l)) * LN2, mask=i < M)


def sizes(Q, B_r, B_c):
    """Constants of the kernels; tiles shrink until q, k, v and the sums fit on the chip."""
    # at least 64: narrower tiles of fp32, or of rows with a padded end, have read outside shared memory on an H200
    D = max(64, triton.next_power_of_2(Q.shape[-1]))
    most = 128 if D == 64 else 64 if D == 128 else 32
    if Q.dtype == torch.float32 and D > 64:  # twice the bytes; fp32 is exact here, but not fast: registers spill
        most = 16
    return {"d": Q.shape[-1], "D": D, "B_R": min(B_r, most), "B_C": min(B_c, most)}


def attention(Q, K, V, causal=False, B_r=64, B_c=64):
    """O, (heads, M, d), and lse, (heads, M); fp16, bf16 or fp32, d up to 256, tiles of 16, 32, 64 or 128."""
    Q, K, V = Q.contiguous(), K.contiguous(), V.contiguous()
    (heads, M, d), N = Q.shape, K.shape[1]
    O = torch.empty_like(Q)
    lse = torch.empty(heads, M, dtype=torch.float32, device=Q.device)
    tiles = sizes(Q, B_r, B_c)
    grid = (triton.cdiv(M, tiles["B_R"]), heads)
    forward[grid](Q, K, V, O, lse, 1 / math.sqrt(d), M, N, **tiles, CAUSAL=causal)
    return O, lse


def main():
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        print("no GPU: set TRITON_INTERPRET=1 to run this in Triton's interpreter")
        return
    torch.manual_seed(0)
    Q, K, V = torch.randn(3, 2, 77, 40, device="cuda" if torch.cuda.is_available() else "cpu")
    for causal in (False, True):
        truth = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (Q, K, V)), is_causal=causal)
        O, lse = attention(Q, K, V, causal, B_r=32, B_c=16)
        error = (O - truth).abs().max().item()
        print(
            f"triton forward, causal={causal}: largest error {error:.1e}, lse of the last row {lse[0, -1].item():.3f}"
        )
        assert error < 1e-5


if __name__ == "__main__":
    main()
