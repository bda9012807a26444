"""Programs in PyTorch: tiles, types, indices, and sums for captured tensors."""

import pytest
import torch
from program.functions import B, H, M, N, examples

from tilewise.program import Entries, apply, keep, pull, run, trace, zero_sums

AT = Entries.of(B, H, M, N)
EXAMPLES = examples()


def tile(at, rows, columns):
    return at._replace(i=at.i[rows], j=at.j[:, columns])


@pytest.mark.parametrize("name", ["relative", "swin", "forgetting", "graphormer", "natten", "listed_blocks"])
def test_tiles_are_parts_of_the_whole(name):
    """A program runs on any index tensors; gradients of tiles add up."""
    example = EXAMPLES[name]
    program, tensors, _ = trace(example.fn, example.what, example.tensors)
    rows, columns = slice(4, 9), slice(8, 16)
    if example.what == "mask":
        whole = keep(program, AT, tensors).expand(B, H, M, N)
        part = keep(program, tile(AT, rows, columns), tensors)
        assert torch.equal(part.expand(B, H, 5, 8), whole[..., rows, columns])
        return
    S, dS = torch.randn(B, H, M, N).double(), torch.randn(B, H, M, N).double()
    part = apply(program, S[..., rows, columns], tile(AT, rows, columns), tensors)
    assert torch.equal(part, apply(program, S, AT, tensors)[..., rows, columns])
    whole, parts = zero_sums(tensors, torch.float64), zero_sums(tensors, torch.float64)
    pull(program, dS, S, AT, whole, tensors)
    for some in (slice(0, 6), slice(6, M)):
        pull(program, dS[..., some, :], S[..., some, :], tile(AT, some, slice(None)), parts, tensors)
    assert whole.keys() == {n for n, t in enumerate(tensors) if t.requires_grad}
    for n, total in whole.items():
        torch.testing.assert_close(parts[n], total)


def test_types():
    """Floating numbers have the logits' type, whole ones are int64, and sums do not have the captured tensor's type."""
    half = torch.full((H,), 0.1, dtype=torch.float16, requires_grad=True)
    program, tensors, _ = trace(lambda s, b, h, i, j: s * half[h] + i, "score")
    for real in (torch.float32, torch.float64):
        S = torch.ones(B, H, M, N, dtype=real)
        sums = zero_sums(tensors, real)
        assert apply(program, S, AT, tensors).dtype == pull(program, S, S, AT, sums, tensors).dtype == real
        assert sums[0].tolist() == [B * M * N] * H
        assert sums[0].dtype == real
    (large,) = run(trace(lambda b, h, i, j: i * 2**40 > 2**45, "mask").program, AT._asdict())
    assert large.sum() == 0
    (large,) = run(trace(lambda b, h, i, j: i * 2**40 >= 2**43, "mask").program, AT._asdict())
    assert large.sum() == M - 8


def test_indices():
    """Negative ones count from the end; those outside are an IndexError."""
    table = torch.arange(5.0)
    S = torch.zeros(1, 1, 4, 4)
    at = Entries.of(1, 1, 4, 4)
    program, tensors, _ = trace(lambda s, b, h, i, j: s + table[i - j], "score")
    assert apply(program, S, at, tensors)[0, 0, 0].tolist() == [0.0, 4.0, 3.0, 2.0]
    program, tensors, _ = trace(lambda s, b, h, i, j: s + table[i + j], "score")
    with pytest.raises(IndexError):
        apply(program, S, at, tensors)


def test_sums_come_before_additions():
    """A slope's gradient is one sum over all its entries, so that fp32 is enough."""
    slope = torch.ones(2, requires_grad=True)
    program, tensors, _ = trace(lambda s, b, h, i, j: s + slope[h], "score")
    dS = torch.rand(2, 2, 512, 512)
    sums = zero_sums(tensors, torch.float32)
    pull(program, dS, dS, Entries.of(2, 2, 512, 512), sums, tensors)
    torch.testing.assert_close(sums[0].double(), dS.double().sum((0, 2, 3)), rtol=3e-7, atol=0)


def test_all_gathers_of_a_tensor_add_up():
    """So do those from tensors without dimensions, and those of strides of 0; others keep their zeros."""
    scale, row = torch.tensor(2.0, requires_grad=True), torch.ones(1, requires_grad=True)
    wide, unread = row.expand(N), torch.ones(3, requires_grad=True)

    def fn(s, b, h, i, j, scale, wide, unread):
        return s * scale + scale * 3 + wide[i] * wide[j]

    program, tensors, _ = trace(fn, "score", (scale, wide, unread))
    S = torch.ones(B, H, M, N, dtype=torch.float64)
    sums = zero_sums(tensors, torch.float64)
    assert torch.equal(pull(program, S, S, AT, sums, tensors), 2 * S)
    assert sums[0] == 4 * S.numel()
    assert sums[1].tolist() == [B * H * (N * (n < M) + M) for n in range(N)]
    assert sums[2].tolist() == [0, 0, 0]


def test_a_score_of_nothing_has_the_logits_shape():
    S = torch.randn(B, H, M, N)
    program = trace(lambda s, b, h, i, j: h * 0.5, "score").program
    assert torch.equal(apply(program, S, AT), (AT.h * 0.5).expand(S.shape))
    assert torch.equal(pull(program, S, S, AT, {}), torch.zeros_like(S))


def test_a_mask_broadcasts():
    """It has the dimensions that its function reads, no more."""
    assert keep(trace(lambda b, h, i, j: i >= j, "mask").program, AT).shape == (M, N)
    assert keep(trace(lambda b, h, i, j: j >= b, "mask").program, AT).shape == (B, 1, 1, N)
