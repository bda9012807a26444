"""Programs as device functions, in Triton's interpreter and compiled for a chip that is not here."""

import pytest
import torch
from program.functions import B, H, M, N, examples

from tilewise.program import Entries, apply, keep, pull, trace

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl
from program.emitted import mask_part, score_part, scored, seen

from tilewise.program.emit import Form

AT = Entries.of(B, H, M, N)
EXAMPLES = examples()
FIRST = Form(rows="first")


@triton.jit
def saturated(x, limit):
    """Compute what Hopper's function of this name does (hopper/parts/scores.py)."""
    return limit - 2.0 * limit / (1.0 + tl.exp2(x))


def traced(name):
    example = EXAMPLES[name]
    return trace(example.fn, example.what, example.tensors)


def logits():
    """Logits and their gradients, of which some are 0."""
    dS = torch.randn(B, H, M, N)
    return torch.randn(B, H, M, N), dS.masked_fill(torch.rand(dS.shape) < 0.1, 0.0)


def of_torch(found, S, dS):
    """What run.py computes, in fp64."""
    program, tensors, numbers = found
    tensors = [t.detach().double() if t.is_floating_point() else t for t in tensors]
    S, dS = S.double(), dS.double()
    return apply(program, S, AT, tensors, numbers), pull(program, dS, S, AT, {}, tensors, numbers)


def assert_close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.what == "mask"])
@pytest.mark.parametrize("wide", [False, True])
def test_masks(name, wide):
    found = traced(name)
    want = keep(found.program, AT, found.tensors, found.numbers).expand(B, H, M, N)
    assert torch.equal(seen(mask_part(found, FIRST._replace(wide=wide), (N - M,)), B, H, M, N), want)


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.what == "score"])
@pytest.mark.parametrize("of_hopper", [None, saturated])
def test_scores_and_their_gradients(name, of_hopper):
    found, (S, dS) = traced(name), logits()
    form = FIRST if of_hopper else FIRST._replace(narrow=True)
    got = scored(score_part(found, form, (N - M,), saturated=of_hopper), S, dS)
    for x, want in zip(got, of_torch(found, S, dS), strict=True):
        assert_close(x, want)
