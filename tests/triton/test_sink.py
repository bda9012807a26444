"""The gradient of a sink that learns, by its kernel (tile/sink.py), where a call names its back end."""

from types import SimpleNamespace

import pytest
import torch
import triton
from hopper.calls import call

import tilewise as tw
from tilewise.call.operands import Grads
from tilewise.host.sink import sink_launches
from tilewise.merge.sink import sink_gradient

needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")
H, D = 3, 64
LENGTHS = (5, 0, 70, 1, 64, 4300)


def ends(lengths):
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def learning(sink, M, batch=(2,), **options):
    """The problem of a backward in which the sink learns, and its operands."""
    p, x = call(M, M, D, H=H, H_k=H, batch=batch, sink=sink, backend="hopper", **options)
    return p._replace(wanted=tuple(t is sink for t in x.extra)), x


def computed(p, x, lse, delta, block):
    """The gradient as the kernel writes it."""
    grads = Grads(None, None, None, tuple(torch.full_like(t, -7) for t in x.extra))
    (made,) = sink_launches(p, SimpleNamespace(compiled={}), x, lse, delta, block, grads, None)
    made.run()
    return grads.extra[p.sink_at]


def close(found, sink, lse, delta):
    """Whether a gradient is as accurate as that of torch's operations, beside the same in fp64."""
    true, usual = sink_gradient(sink.double(), lse.double(), delta.double()), sink_gradient(sink, lse, delta)
    size = sink_gradient(sink.double(), lse.double(), -delta.double().abs())
    assert ((found.double() - true).abs() <= 2 * (usual - true).abs() + 2**-22 * size).all()


@needs_interpreter
@pytest.mark.parametrize(("B", "M"), [(2, 300), (90, 49), (1, 4097), (3, 1)], ids=str)
@pytest.mark.parametrize("padding", [0, 80])
def test_it_sums_the_rows_of_a_batch(B, M, padding):
    torch.manual_seed(0)
    p, x = learning(sink := torch.randn(H), M, batch=(B,))
    lse, delta = torch.randn(B, H, M), torch.full((B, H, M + padding), torch.nan)
    delta[..., :M] = torch.randn(B, H, M)
    found = computed(p, x, lse, delta, 64)
    close(found, sink, lse, delta[..., :M])
    assert torch.equal(found, computed(p, x, lse, delta, 64))


@needs_interpreter
@pytest.mark.parametrize("block", [1, 64, 128])
@pytest.mark.parametrize("lengths", [LENGTHS, (0, 0, 3), (9,)], ids=str)
def test_it_finds_the_rows_of_packed_sequences(block, lengths):
    """Each begins at a block, or where the one before ends. Rows that no sequence owns are left out."""
    torch.manual_seed(0)
    cu, rows, unowned = ends(lengths), sum(lengths), 37
    layout = tw.Varlen(cu, cu, max(lengths), max(lengths))
    p, x = learning(sink := torch.randn(H), rows + unowned, batch=(), layout=layout)
    lse, usual = torch.randn(2, H, rows + unowned)
    lse[:, rows:], usual[:, rows:] = -torch.inf, torch.nan
    at = torch.arange(rows + unowned)
    if block > 1:
        at = p.recipe.layout_of(x.extra).in_blocks(0, rows + unowned, block)
    delta = torch.full((H, p.query_blocks(block) * block if block > 1 else rows + 64), torch.nan)
    delta[:, at[:rows]] = usual[:, :rows]
    close(computed(p, x, lse, delta, block), sink, lse[:, :rows], usual[:, :rows])


@needs_interpreter
def test_infinities_count_as_in_torch():
    sink = torch.tensor([-torch.inf, 0.0, torch.inf])
    for value in (-torch.inf, torch.inf, 0.0):
        p, x = learning(sink, 2)
        lse, delta = torch.zeros(2, H, 2), torch.randn(2, H, 2)
        lse[0, :, 1] = value
        assert torch.equal(computed(p, x, lse, delta, 64).isnan(), sink_gradient(sink, lse, delta).isnan())
        assert torch.allclose(computed(p, x, lse, delta, 64)[:2], sink_gradient(sink, lse, delta)[:2])


@needs_interpreter
def test_it_reads_and_writes_the_type_of_the_sink():
    torch.manual_seed(0)
    sink = torch.randn(2 * H, dtype=torch.bfloat16)[::2]
    p, x = learning(sink, 100)
    lse, delta = torch.randn(2, 2, H, 100)
    found = computed(p, x, lse, delta, 64)
    assert found.dtype == torch.bfloat16
    wanted = sink_gradient(sink.float(), lse, delta)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=0.0)  # the interpreter rounds to 0


@needs_interpreter
def test_without_rows_it_is_zero():
    p, x = learning(torch.randn(H), 4, batch=(0,))
    assert not computed(p, x, torch.zeros(0, H, 4), torch.zeros(0, H, 4), 64).any()
