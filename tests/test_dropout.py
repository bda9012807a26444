"""Dropout: Philox's known answers, the same decisions on every back end, and what they depend on."""

import math

import pytest
import torch
from conformance.test_conformance import BACKENDS, chosen

import tilewise as tw
from tilewise.values.dropout import dropout_keep, dropout_number, dropout_rescale, dropout_threshold, philox

KNOWN_ANSWERS = [  # Random123's kat_vectors for philox4x32-10: counter, key, output
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor(word) for word in counter), key[0] | key[1] << 32)
    assert [int(word) for word in words] == expected


def test_philox_takes_negative_seeds_as_their_64_bits():
    zero = (torch.tensor(0),) * 4
    assert philox(zero, -1) == philox(zero, 2**64 - 1)


@pytest.mark.parametrize(
    ("i", "j", "counter", "word", "byte"),
    [
        (3, 5, (5, 3), 0, 0),
        (3, 13, (5, 3), 0, 1),
        (11, 5, (5, 3), 0, 2),
        (11, 13, (5, 3), 0, 3),
        (3, 21, (5, 3), 1, 0),
        (3, 37, (5, 3), 2, 0),
        (11, 61, (5, 3), 3, 3),
        (16, 111, (15, 8), 2, 1),
        (1000, 100_019, (12_499, 496), 3, 2),
    ],
)
def test_the_decision_is_written_down_bit_for_bit(i, j, counter, word, byte):
    words = philox(tuple(torch.tensor(c) for c in (*counter, 6, 0)), 11)
    of_words = [int(w) >> 8 * byte & 0xFF for w in words]
    number = of_words[word] << 8 | of_words[0] ^ of_words[1] ^ of_words[2] ^ of_words[3]
    at = 11, torch.tensor(6), torch.tensor(i), torch.tensor(j)
    assert int(dropout_number(*at)) == number
    for t in (number - 1, number, number + 1):
        assert bool(dropout_keep(*at, t / 2**16)) == (number >= t)


def test_a_counter_decides_sixteen_entries_and_no_two_share_their_upper_bits():
    i, j, zero = torch.arange(64)[:, None], torch.arange(256), torch.tensor(0)
    words = torch.stack(philox((j[:32], i[:32], zero, zero), 11))
    own = torch.stack([words >> byte & 0xFF for byte in (0, 8, 16, 24)])
    numbers = dropout_number(11, zero, i, j)
    assert torch.equal((numbers >> 8).flatten().sort().values, own.flatten().sort().values)


def test_the_lower_bits_are_independent_of_the_upper_ones():
    numbers = dropout_number(12, torch.tensor(0), torch.arange(1024)[:, None], torch.arange(2048))
    seen = torch.bincount(numbers.flatten(), minlength=2**16).double()
    expected = numbers.numel() / 2**16
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert abs(chi_square - 2**16) < 5 * math.sqrt(2 * 2**16)


@pytest.mark.parametrize(
    ("p", "threshold"),
    [
        (0.0, 0),
        (2.0**-18, 0),
        (2.0**-16, 1),
        (1.75 * 2.0**-16, 2),
        (0.1, 6554),
        (0.5, 32768),
        (1 - 2.0**-16, 65535),
        (1 - 2.0**-30, 65535),
    ],
)
def test_p_is_rounded_to_sixteen_bits(p, threshold):
    assert dropout_threshold(p) == threshold
    assert dropout_rescale(p) * (1 - threshold / 2**16) == 1.0


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.3, 0.9, 0.9999, 1 - 1e-9])
def test_the_mean_of_the_factor_is_one_over_all_that_sixteen_bits_can_hold(p):
    kept = int((torch.arange(2**16) >= dropout_threshold(p)).sum())
    assert kept * dropout_rescale(p) == pytest.approx(2**16, rel=1e-15)


def decisions(backend, M, N, seed, dropout=0.3, B=2, H=3, causal=False):
    """Which entries of P a back end keeps, (B, H, M, N), read off o with uniform P and v the identity."""
    device = "cuda" if backend == "triton" else "cpu"
    q, k = torch.zeros(B, M, H, 4, device=device), torch.zeros(B, N, H, 4, device=device)
    v = torch.eye(N, device=device)[None, :, None].expand(B, N, H, N).contiguous()
    with chosen(backend) as name:
        o = tw.attention(q, k, v, dropout=dropout, seed=seed, backend=name, mask=tw.Causal() if causal else tw.Full())
    return (o != 0).transpose(1, 2).cpu()


def expected(M, N, seed, dropout=0.3, B=2, H=3):
    row = torch.arange(B * H).view(B, H, 1, 1)
    return dropout_keep(seed, row, torch.arange(M)[:, None], torch.arange(N), dropout)


def skip_unless_there(backend):
    device = "cuda" if backend == "triton" else "cpu"
    q = torch.zeros(1, 4, 1, 4, device=device)
    name = backend.partition("-")[0]
    if reasons := tw.explain(q, q, q, dropout=0.3, backend=name).refusals[name]:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 0x123456789ABCDEF])
def test_every_back_end_decides_as_the_reference(backend, seed):
    skip_unless_there(backend)
    assert torch.equal(decisions(backend, 37, 53, seed), expected(37, 53, seed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_tiles_do_not_enter_the_decision(backend):
    skip_unless_there(backend)
    small, large = decisions(backend, 19, 33, 5), decisions(backend, 70, 90, 5)
    assert torch.equal(small, large[:, :, :19, :33])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout", [0.01, 0.5, 0.99])
def test_the_probability_is_kept(backend, dropout):
    skip_unless_there(backend)
    keep = decisions(backend, 64, 128, 3, dropout)
    n, found = keep.numel(), int(keep.sum())
    deviation = math.sqrt(n * dropout * (1 - dropout))
    assert abs(found - n * (1 - dropout)) < 5 * deviation  # by chance once in two million


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout", [2.0**-18, 0.3, 1 - 2.0**-18])
def test_what_is_kept_is_multiplied_by_the_reciprocal_of_what_sixteen_bits_keep(backend, dropout):
    skip_unless_there(backend)
    device = "cuda" if backend == "triton" else "cpu"
    M, N = 256, 512
    q, k, v = (torch.zeros(1, length, 1, 4, device=device) for length in (M, N, N))
    v[..., 0] = 1.0
    with chosen(backend) as name:
        o = tw.attention(q, k, v, dropout=dropout, seed=8, backend=name)[0, :, 0, 0].cpu()
    keep = expected(M, N, 8, dropout, B=1, H=1)[0, 0]
    assert bool(keep.any())
    assert bool(keep.all()) == (dropout < 0.1)
    torch.testing.assert_close(o, keep.sum(-1) * dropout_rescale(dropout) / N)


def test_decisions_differ_by_seed_head_and_batch_and_are_uncorrelated():
    keep = expected(64, 64, 1).flatten(0, 1).flatten(1).double()
    other = expected(64, 64, 2).flatten(0, 1).flatten(1).double()
    correlation = torch.corrcoef(torch.cat([keep, other]))
    off_diagonal = correlation[~torch.eye(12).bool()].abs()
    assert off_diagonal.max() < 5 / math.sqrt(64 * 64)


def test_neighbours_are_uncorrelated():
    keep = expected(256, 256, 1, B=1, H=1)[0, 0].double()
    keep = (keep - keep.mean()) / keep.std()
    apart = (0, 1), (1, 0), (8, 0), (0, 8), (8, 8), (1, 1), (16, 0), (0, 16), (8, 16), (0, 32), (0, 48), (0, 64)
    for rows, columns in apart:
        moved = keep[rows:, columns:]
        correlation = (moved * keep[: 256 - rows, : 256 - columns]).mean()
        assert abs(correlation) < 5 / math.sqrt(moved.numel())


def test_the_forward_and_the_backward_drop_the_same():
    q, k = torch.zeros(1, 40, 1, 4), torch.zeros(1, 50, 1, 4)
    v = torch.eye(50)[None, :, None].clone().requires_grad_()
    o = tw.attention(q, k, v, dropout=0.5, seed=9)
    (dv,) = torch.autograd.grad(o[0, :, 0].diagonal().sum(), v)
    assert torch.equal((dv[0, :40, 0] != 0).diagonal(), (o[0, :, 0] != 0).diagonal())


def test_the_mean_over_seeds_is_attention_without_dropout():
    q, k, v = torch.randn(1, 8, 1, 4), torch.randn(1, 16, 1, 4), torch.randn(1, 16, 1, 4)
    draws = torch.stack([tw.attention(q, k, v, dropout=0.4, seed=seed) for seed in range(400)])
    error = (draws.mean(0) - tw.attention(q, k, v)).abs()
    assert (error < 5 * draws.std(0) / math.sqrt(400)).all()


def test_manual_seed_repeats_and_advances():
    q = torch.randn(1, 16, 2, 8)

    def twice():
        torch.manual_seed(3)
        return tw.attention(q, q, q, dropout=0.5), tw.attention(q, q, q, dropout=0.5)

    first, second = twice()
    again, _ = twice()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_seed_may_be_a_tensor():
    q = torch.randn(1, 16, 2, 8)
    as_int = tw.attention(q, q, q, dropout=0.5, seed=12)
    assert torch.equal(as_int, tw.attention(q, q, q, dropout=0.5, seed=torch.tensor(12)))


def test_without_dropout_no_random_number_is_drawn():
    q = torch.randn(1, 4, 1, 4)
    before = torch.get_rng_state()
    tw.attention(q, q, q)
    tw.attention(q, q, q, dropout=0.5, seed=3)
    assert torch.equal(before, torch.get_rng_state())
