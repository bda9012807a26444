"""The exercises of examples/minimal. Each check is first shown to be right, on a reference solution.

If you have solved one, delete its name from UNSOLVED: a solved exercise with the mark fails.
"""

import math
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "minimal"))
import exercises
import flash1
import flash2

UNSOLVED = {
    "window", "merge", "largest_tile", "bytes_by_order", "tiles_visited", "softcap_gradient", "delta_with_lse",
    "grouped", "programs", "stages_that_fit",
}  # fmt: skip


class Solutions:
    """Look here last."""

    @staticmethod
    def window(Q, K, V, w):
        i, j = torch.arange(Q.shape[1])[:, None], torch.arange(K.shape[1])[None, :]
        S = Q @ K.mT * Q.shape[-1] ** -0.5
        return torch.softmax(S.masked_fill((j > i) | (j < i - w), -torch.inf), -1) @ V

    @staticmethod
    def merge(O_1, lse_1, O_2, lse_2):
        lse = torch.logaddexp(lse_1, lse_2)
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        return torch.exp(lse_1 - finite)[..., None] * O_1 + torch.exp(lse_2 - finite)[..., None] * O_2, lse

    @staticmethod
    def largest_tile(d, fast):
        B = 1
        while 4 * (2 * B) * d + (2 * B) ** 2 + 2 * (2 * B) <= fast:
            B *= 2
        return B

    @staticmethod
    def bytes_by_order(M, N, d, size, B):
        return size * d * (2 * N + N // B * 3 * M), size * d * (2 * M + M // B * 2 * N)

    @staticmethod
    def tiles_visited(M, N, B_r, B_c):
        ends = (min(M, i0 + B_r) + N - M for i0 in range(0, M, B_r))  # keys that a tile's last row sees
        return sum(math.ceil(max(0, end) / B_c) for end in ends)

    @staticmethod
    def softcap_gradient(S, dT, cap):
        return dT * (1 - torch.tanh(S / cap) ** 2)

    @staticmethod
    def delta_with_lse(O, dO, dlse):
        return (dO * O).sum(-1) - dlse

    @staticmethod
    def grouped(attention, Q, K, V):
        O, _ = attention(Q.reshape(K.shape[0], -1, Q.shape[-1]), K, V)  # the group's rows, one head after the other
        return O.reshape(Q.shape)

    @staticmethod
    def programs(heads, M, N, B_r, B_c, processors):
        rows, columns = heads * math.ceil(M / B_r), heads * math.ceil(N / B_c)
        return rows, columns, rows, math.ceil(columns / processors)

    @staticmethod
    def stages_that_fit(B_r, B_c, d, shared, size=2):
        return (shared - B_r * d * size) // (2 * B_c * d * size)


def each(name):
    """The reference solution, and the exercise with its mark."""
    unsolved = [pytest.mark.xfail(strict=True, raises=NotImplementedError)] if name in UNSOLVED else []
    answers = [pytest.param(getattr(Solutions, name), id="solution")]
    answers.append(pytest.param(getattr(exercises, name), id="exercise", marks=unsolved))
    return pytest.mark.parametrize("answer", answers)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@each("window")
@pytest.mark.parametrize("w", [0, 3, 40])
def test_window(answer, w):
    Q, K, V = random(3, 2, 33, 16)
    got = answer(Q, K, V, w)
    for i in range(33):
        seen = slice(max(0, i - w), i + 1)
        weights = torch.softmax(Q[:, i, None] @ K[:, seen].mT / 4, -1)
        torch.testing.assert_close(got[:, i], (weights @ V[:, seen])[:, 0])


@each("merge")
@pytest.mark.parametrize("size", [1.0, 100.0])  # 100: logits far beyond what e^x can hold
def test_merge(answer, size):
    Q, K, V = random(3, 2, 33, 16) * torch.tensor([size, size, 1.0]).view(3, 1, 1, 1)
    O, lse = flash2.attention(Q, K, V)
    got = answer(*flash2.attention(Q, K[:, :20], V[:, :20]), *flash2.attention(Q, K[:, 20:], V[:, 20:]))
    torch.testing.assert_close(got, (O, lse))
    nothing = torch.zeros_like(O), torch.full_like(lse, -torch.inf)  # of an empty set of keys
    torch.testing.assert_close(answer(O, lse, *nothing), (O, lse))
    torch.testing.assert_close(answer(*nothing, *nothing), nothing)


@each("largest_tile")
def test_largest_tile(answer):
    for d, fast in product((32, 64, 128), (5_000, 50_000, 116_000)):
        B = answer(d, fast)
        assert B & (B - 1) == 0
        numbers = [4 * b * d + b * b + 2 * b for b in (B, 2 * B)]
        assert numbers[0] <= fast < numbers[1]


@each("bytes_by_order")
def test_bytes_by_order(answer):
    M, N, d, size, B = 256, 512, 64, 2, 64
    first, second = answer(M, N, d, size, B)
    without_m_and_l = flash1.bytes_moved(1, M, N, d, size, B_c=B) - size * (N // B) * 4 * M
    assert (first, second) == (without_m_and_l, flash2.bytes_moved(1, M, N, d, size, B_r=B) - size * M)


@each("tiles_visited")
def test_tiles_visited(answer):
    for M, N, B_r, B_c in product((1, 77, 130), (1, 64, 200), (16, 64), (16, 32)):
        i, j = torch.arange(M)[:, None], torch.arange(N)[None, :]
        seen = (j <= i + N - M).nonzero()
        tiles = {(int(i) // B_r, int(j) // B_c) for i, j in seen}
        assert answer(M, N, B_r, B_c) == len(tiles)


@each("softcap_gradient")
def test_softcap_gradient(answer):
    S, dT = (20 * random(2, 9, 9)).requires_grad_(), random(2, 9, 9)
    (truth,) = torch.autograd.grad(10 * torch.tanh(S / 10), S, dT)
    torch.testing.assert_close(answer(S.detach(), dT, 10), truth)


@each("delta_with_lse")
def test_delta_with_lse(answer):
    S, V, dO, dlse = random(2, 9, 7).requires_grad_(), random(2, 7, 5), random(2, 9, 5), random(2, 9)
    P, lse = torch.softmax(S, -1), torch.logsumexp(S, -1)
    O = P @ V
    (truth,) = torch.autograd.grad((O, lse), S, (dO, dlse))
    delta = answer(O.detach(), dO, dlse)
    torch.testing.assert_close(P * (dO @ V.mT - delta[..., None]), truth)


@each("grouped")
def test_grouped(answer):
    Q, (K, V) = random(6, 33, 16), random(2, 2, 40, 16)

    def attention(Q, K, V):
        assert Q.shape[0] == K.shape[0] == 2
        return flash2.attention(Q, K, V)

    truth, _ = flash2.attention(Q, K.repeat_interleave(3, 0), V.repeat_interleave(3, 0))
    torch.testing.assert_close(answer(attention, Q, K, V), truth)


@each("programs")
def test_programs(answer):
    assert answer(4, 130, 200, 64, 32, 132) == (12, 28, 12, 1)
    assert answer(16, 1024, 1000, 32, 32, 132) == (512, 512, 512, 4)


@each("stages_that_fit")
def test_stages_that_fit(answer):
    for B_r, B_c, d in product((64, 128), (64, 128), (64, 128, 256)):
        stages, shared = answer(B_r, B_c, d, 232_448), 232_448
        assert B_r * d * 2 + stages * 2 * B_c * d * 2 <= shared < B_r * d * 2 + (stages + 1) * 2 * B_c * d * 2
