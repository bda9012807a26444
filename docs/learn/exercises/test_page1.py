import math

import naive
import page1
import pytest
import torch
from traffic import Lines


def test_four_passes():
    heads, N, d = 2, 512, 16
    Q, K, V = torch.randn(3, heads, N, d)
    truth = naive.attention(Q, K, V)
    with Lines() as lines:
        O = page1.four_passes(Q, K, V)
    torch.testing.assert_close(O, truth, rtol=1e-4, atol=1e-5)
    passes = sum(moved for _, moved in lines.moved) / (heads * N * N * Q.itemsize)
    assert passes < 4.5, f"{passes:.1f} passes: {lines.moved}"


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("size", [2, 4])
def test_highest_intensity(d, size):
    N = 10**9
    truth = 4 * N * N * d / naive.bytes_moved(1, N, N, d, size)
    assert math.isclose(page1.highest_intensity(d, size), truth, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("keys", [1, 4096])
def test_largest_logit(dtype, keys):
    largest = torch.finfo(dtype).max
    x = page1.largest_logit(largest, keys)
    assert keys * math.exp(x - 1e-6) <= largest < keys * math.exp(x + 1e-6)
