"""count_calls: what ran where, in every way of running, and nothing when nobody counts."""

from threading import Thread

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.call.count import COUNTING

Q = torch.randn(2, 5, 4, 8)


def test_calls_count_by_back_end():
    with tw.count_calls() as calls:
        tw.attention(Q, Q, Q)
        tw.attention_qkvpacked(torch.randn(2, 5, 3, 4, 8))
        o, lse = tw.attention(Q, Q, Q, return_lse=True)
        tw.attention_backward(o, Q, Q, Q, o, lse)
    tw.attention(Q, Q, Q)
    assert calls.ran == {"cpu": 3}
    assert not calls.fell_back
    assert str(calls) == "ran 3 calls (cpu: 3); 0 calls fell back to PyTorch"
    assert COUNTING == []


def test_triton_counts_under_its_name():
    pytest.importorskip("triton", reason="Triton is not installed")
    with tw.count_calls() as calls:
        tw.attention(Q, Q, Q, backend="triton")
    assert calls.ran == {"triton": 1}


def interrupted(counts):
    with tw.count_calls() as inner:
        counts.append(inner)
        tw.attention(Q, Q, Q)
        raise ZeroDivisionError


def test_counts_may_be_nested_and_end_with_an_error():
    with tw.count_calls() as outer:
        counts = [outer]
        with pytest.raises(ZeroDivisionError):
            interrupted(counts)
        tw.attention(Q, Q, Q)
    assert [calls.ran["cpu"] for calls in counts] == [2, 1]


def test_other_threads_count():
    def work():
        for _ in range(10):
            tw.attention(Q, Q, Q)

    threads = [Thread(target=work) for _ in range(4)]
    with tw.count_calls() as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls.ran["cpu"] == 40


def test_compiled_code_counts_each_time_and_checkpointing_twice():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: tw.attention(q, q, q), backend="aot_eager", fullgraph=True)
    compiled(Q)
    with tw.count_calls() as calls:
        compiled(Q)
        compiled(Q)
    assert calls.ran == {"cpu": 2}
    x = Q.clone().requires_grad_()
    with tw.count_calls() as calls:
        checkpoint(tw.attention, x, x, x, use_reentrant=False).sum().backward()
    assert calls.ran == {"cpu": 2}


def test_what_is_only_traced_does_not_count():
    with tw.count_calls() as calls:
        tw.attention(*[Q.to("meta")] * 3)
        tw.explain(Q, Q, Q)
    assert calls.total() == 0
