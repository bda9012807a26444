"""Functions as masks and scores under torch.compile, torch.export, torch.func, checkpointing."""

import time

import pytest
import torch
from program.functions import H
from torch.utils.checkpoint import checkpoint

import tilewise as tw

TABLE = torch.randn(H, 32, requires_grad=True)


def near(b, h, i, j):
    return (i - j <= 4 + h) & (i >= j)


def bent(s, b, h, i, j, table):
    return torch.tanh(s) + table[h, i - j]


MASK, SCORE = tw.Mask.of(near, align="last") | tw.Padding(torch.tensor([2, 3])), tw.Score.of(bent, TABLE)


def operands():
    return [torch.randn(2, 12, H, 8, requires_grad=True) for _ in range(3)]


def call(q, k, v, score=SCORE):
    return tw.attention(q, k, v, mask=MASK, score=score)


def with_gradients(fn, *x):
    o = fn(*x)
    return o, *torch.autograd.grad(o.square().sum(), (*x, TABLE))


def test_compile_without_graph_breaks():
    """Values are made outside; bits are those of eager calls."""
    torch.compiler.reset()
    x = operands()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for mine, eager in zip(with_gradients(compiled, *x), with_gradients(call, *x), strict=True):
        assert torch.equal(mine, eager)


def test_compile_binds_other_tensors():
    torch.compiler.reset()
    q, k, v = operands()
    compiled = torch.compile(lambda t: call(q, k, v, SCORE.with_(t)), backend="aot_eager", fullgraph=True)
    other = torch.randn(H, 32)
    assert torch.equal(compiled(other), call(q, k, v, SCORE.with_(other)))


class Layer(torch.nn.Module):
    def forward(self, q, k, v, table):
        return call(q, k, v, SCORE.with_(table))


def test_export():
    x, table = [t.detach() for t in operands()], torch.randn(H, 32)
    exported = torch.export.export(Layer(), (*x, table))
    assert torch.equal(exported.module()(*x, table), call(*x, SCORE.with_(table)))


def test_vmap_folds_unless_a_function_reads_b():
    """Captured tensors of (H,) stay as they are, whatever H and B are; what is mapped runs call by call."""
    q, k, v = (torch.randn(3, 2, 12, H, 8) for _ in range(3))
    slopes, rates = torch.randn(H), torch.randn(3, H)
    per_head = tw.Score.of(lambda s, b, h, i, j: s * slopes[h])
    of_batch = tw.Score.of(lambda s, b, h, i, j: s * (b + 1))
    for score in (per_head, of_batch):
        got = torch.vmap(lambda q, k, v: tw.attention(q, k, v, score=score))(q, k, v)  # noqa: B023
        torch.testing.assert_close(got, torch.stack([tw.attention(*x, score=score) for x in zip(q, k, v, strict=True)]))
    got = torch.vmap(lambda q, rate: tw.attention(q, k[0], v[0], score=per_head.with_(rate)))(q, rates)
    each = [tw.attention(a, k[0], v[0], score=per_head.with_(rate)) for a, rate in zip(q, rates, strict=True)]
    torch.testing.assert_close(got, torch.stack(each))


def test_func_grad_reaches_captured_tensors():
    x = [t.detach() for t in operands()]
    (wanted,) = torch.autograd.grad(call(*x).square().sum(), TABLE)
    got = torch.func.grad(lambda t: call(*x, SCORE.with_(t)).square().sum())(TABLE.detach())
    torch.testing.assert_close(got, wanted)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: call(*x, SCORE.with_(t)), (TABLE.detach(),), (torch.ones_like(TABLE),))


def test_checkpointing():
    x = operands()
    recomputed = with_gradients(lambda *x: checkpoint(call, *x, use_reentrant=False), *x)
    for mine, eager in zip(recomputed, with_gradients(call, *x), strict=True):
        assert torch.equal(mine, eager)


def test_a_function_made_anew_costs_little():
    """At most 0.3 ms over a built-in mask's call on a quiet machine; here several times that, of the thread's time."""
    q, k, v = (torch.randn(1, 64, 2, 32) for _ in range(3))

    def least(make):
        times = []
        for _ in range(60):
            start = time.thread_time()
            tw.attention(q, k, v, mask=make())
            times.append(time.thread_time() - start)
        return min(times)

    assert least(lambda: lambda b, h, i, j: (i >= j) & (i - j <= 30)) <= least(lambda: tw.Window(30, 0)) + 1e-3
