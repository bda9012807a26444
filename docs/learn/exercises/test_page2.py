import flash1
import flash2
import naive
import page2
import pytest
import torch
from traffic import Lines


def part(Q, K, V):
    """O, not divided, m and l of some keys."""
    S = Q @ K.mT * Q.shape[-1] ** -0.5
    m = S.amax(-1, keepdim=True)
    P = torch.exp(S - m)
    return P @ V, m, P.sum(-1, keepdim=True)


@pytest.mark.parametrize("size", [1.0, 100.0])  # 100: logits far beyond what e^x can hold
def test_merge(size):
    Q, K, V = torch.randn(3, 2, 33, 16, dtype=torch.float64)
    Q, K = size * Q, size * K
    a, b, c = (part(Q, K[:, keys], V[:, keys]) for keys in (slice(0, 5), slice(5, 20), slice(20, 33)))
    O, _, l = page2.merge(page2.merge(a, b), c)
    torch.testing.assert_close(O / l, naive.attention(Q, K, V))
    torch.testing.assert_close(page2.merge(c, page2.merge(b, a)), page2.merge(page2.merge(a, b), c))


def test_merge_with_nothing():
    one = part(*torch.randn(3, 2, 33, 16))
    nothing = torch.zeros_like(one[0]), torch.full_like(one[1], -torch.inf), torch.zeros_like(one[2])
    torch.testing.assert_close(page2.merge(one, nothing), one)
    torch.testing.assert_close(page2.merge(nothing, one), one)
    torch.testing.assert_close(page2.merge(nothing, nothing), nothing)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("fast", [24_000, 116_000])
def test_best_tiles(d, fast):
    def fits(B_r, B_c):
        return 2 * B_r * d + 2 * B_c * d + B_r * B_c + 2 * B_r <= fast

    def moved(B_c):
        return flash1.bytes_moved(1, 2**24, 2**24, d, 2, B_c=B_c)

    B_r, B_c = page2.best_tiles(d, fast)
    assert B_r % 16 == B_c % 16 == 0 < B_r
    assert fits(B_r, B_c)
    sizes = range(16, fast // d, 16)
    assert moved(B_c) == min(moved(c) for c in sizes for r in sizes if fits(r, c))


def test_row_sums():
    heads, M, N, d = 2, 64, 640, 16
    Q, dO = torch.randn(2, heads, M, d, dtype=torch.float64)
    K, V = torch.randn(2, heads, N, d, dtype=torch.float64)
    O, lse = flash2.attention(Q, K, V)
    with Lines() as lines:
        sums = page2.row_sums(Q, K, V, dO, lse, 32)
    torch.testing.assert_close(sums, (dO * O).sum(-1))
    assert max(moved for _, moved in lines.moved) < heads * M * N * Q.itemsize, "a matrix as large as S"
