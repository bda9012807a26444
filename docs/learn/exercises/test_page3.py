import backward
import flash2
import naive
import page3
import pytest
import torch
from traffic import Lines


def test_one_pass():
    Q, K, V, dO = torch.randn(4, 2, 128, 16, dtype=torch.float64)
    O, lse = flash2.attention(Q, K, V)
    with Lines() as lines:
        got = page3.one_pass(Q, K, V, dO, lse, (dO * O).sum(-1), 32)
    torch.testing.assert_close(got, backward.backward(Q, K, V, O, lse, dO))
    assert [name for name, _ in lines.moved].count("bmm") == 5 * (128 // 32) ** 2


@pytest.mark.parametrize("tiles", [8, 20, 64])
@pytest.mark.parametrize("heads", [3, 8])
def test_longest_first(tiles, heads):
    costs = [i + 1 for _ in range(heads) for i in range(tiles)]  # causal: tile i has i + 1 tiles of keys
    processors = 6
    shares = page3.longest_first(costs, processors)
    assert len(shares) == processors
    assert sorted(t for share in shares for t in share) == list(range(len(costs)))
    assert max(sum(costs[t] for t in share) for share in shares) <= 1.1 * sum(costs) / processors


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_split_keys(parts):
    Q = torch.randn(2, 1, 16, dtype=torch.float64)
    K, V = 30 * torch.randn(2, 2, 500, 16, dtype=torch.float64)  # 30: e^lse is out of range
    given = []

    def attention(Q, K, V):
        given.append(K.shape[1])
        return flash2.attention(Q, K, V)

    torch.testing.assert_close(page3.split_keys(attention, Q, K, V, parts), naive.attention(Q, K, V))
    assert len(given) == parts
    assert sum(given) == 500
    assert max(given) <= -(-500 // parts)
