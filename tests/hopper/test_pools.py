"""CUDA graphs take memory from a private pool, and want all of it back: no cache keeps a tensor that a call's thread
allocates. Pools serve single threads, and so does a dispatch mode, which sees those tensors here, where nothing is
launched."""

import gc

import pytest
import torch
from hopper.calls import call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise as tw
from tilewise.call import calls
from tilewise.hopper import launch
from tilewise.hopper.fp32 import launch as fp32_launch
from tilewise.hopper.plan import plan
from tilewise.host.launch import Launch
from tilewise.triton import launch as portable
from tilewise.triton.plan import plan as portable_plan

IDS = torch.zeros(2, 256, dtype=torch.int32)
ENDS = torch.tensor([0, 100, 256], dtype=torch.int32)
CALLS = {
    "full": {},
    "causal": {"mask": tw.Causal()},
    "deterministic": {"mask": tw.Causal(), "deterministic": True},
    "listed": {"mask": tw.Documents(IDS, IDS)},
    "sink": {"sink": torch.zeros(4), "mask": tw.Window(50, 0)},
    "packed": {"layout": tw.Varlen(ENDS, ENDS, 156, 156), "batch": ()},
    "grouped": {"H_k": 1},
}
NOT_IN_FP32 = {"dropout": {"dropout": 0.1}, "scored": {"score": [tw.SoftCap(20.0), tw.Alibi(torch.ones(4))]}}
PLANS = {launch: plan, fp32_launch: fp32_launch.plan, portable: portable_plan}


class Allocations(TorchDispatchMode):
    """The memory of every tensor that this thread makes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.made += [StorageWeakRef(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


@pytest.fixture(autouse=True)
def first_calls_that_launch_nothing(monkeypatch):
    for name in ("COUNTERS", "SPARE"):
        monkeypatch.setattr(launch, name, {}, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Launch, "run", lambda self, stream=None: None)


def step(of, p, x, dtype):
    """Forward and backward, with every gradient."""
    pl = PLANS[of](p)
    seed = torch.tensor(3) if p.recipe.dropout else None
    saved = of.forward(p, pl, x, seed)
    p = p._replace(wanted=tuple(t.is_floating_point() and t.ndim == 1 for t in x.extra))
    of.backward(p, PLANS[of](p), x, saved, torch.zeros_like(saved.o), torch.zeros_like(saved.lse))


@pytest.mark.parametrize(
    ("of", "dtype"), [(launch, torch.bfloat16), (fp32_launch, torch.float32), (portable, torch.float16)]
)
def test_no_cache_keeps_what_a_call_allocates(of, dtype):
    calls.forget()
    for name, options in (CALLS if of is fp32_launch else CALLS | NOT_IN_FP32).items():
        p, x = call(256, 256, 64, dtype=dtype, **options)
        with Allocations() as seen:
            step(of, p, x, dtype)
            step(of, p, x, dtype)
        own = {StorageWeakRef(t.untyped_storage()) for t in (*x[:3], *x.extra)}
        gc.collect()
        kept = [ref for ref in seen.made if not ref.expired() and ref not in own]
        assert len(seen.made) > 6, "the mode sees what a call allocates"
        assert not kept, f"{name}: {len(kept)} of {len(seen.made)} allocations are still alive"


def test_every_stream_has_a_counter_of_its_own_for_good():
    cpu = torch.device("cpu")
    first, second = launch.counter(cpu, 1), launch.counter(cpu, 2)
    assert first.tolist() == second.tolist() == [0, 0]
    assert first.dtype == torch.int32
    assert first.data_ptr() != second.data_ptr()
    assert launch.counter(cpu, 1) is first
    assert launch.counter(cpu, 2) is second


def test_a_captured_launch_has_a_counter_of_the_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu, zeros, made = torch.device("cuda", 0), torch.zeros, []
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **kind: made.append(device) or zeros(*size, **kind))
    assert launch.counter(gpu, 1).tolist() == [0, 0]
    assert made == [gpu], "one allocation, which the graph's pool gives"
    assert not launch.COUNTERS


def test_captured_launches_take_the_zeros_that_a_first_call_left_over(monkeypatch):
    """A graph then writes no zeros."""
    gpu, made, on = torch.device("cuda", 0), launch.new_counters, []
    monkeypatch.setattr(launch, "CAPTURED", 2)
    monkeypatch.setattr(launch, "new_counters", lambda _, count: made(torch.device("cpu"), count))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(on))
    eager = [launch.counter(gpu, stream) for stream in (1, 2, 1)]
    on.append(True)
    captured = [launch.counter(gpu, 1) for _ in range(2)]
    assert [each.tolist() for each in (*eager, *captured)] == [[0, 0]] * 5
    assert len({each.data_ptr() for each in (*eager, *captured)}) == 4, "each stream and each graph has its own"
    assert {each.data_ptr() % 16 for each in captured} == {0}, "kernels are compiled for such addresses"
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **kind: zeros(*size, **kind).add(len(on) - 1))
    assert launch.counter(gpu, 1).tolist() == [0, 0], "none is left, so the graph writes its own"
