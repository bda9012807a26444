"""Launches below Triton's wrapper, with a launcher that only tells what it was given."""

from types import SimpleNamespace

import pytest
import torch

import tilewise.host.direct as module
from tilewise.host.direct import BASE, direct

pytest.importorskip("triton")
from triton.backends.nvidia import driver as nvidia

OLD = getattr(nvidia, "_BASE_ARGS_FORMAT_LEN", None) is not None
wraps = pytest.mark.skipif(not OLD, reason="this Triton has another wrapper around its launcher")


def compiled(launched, signature, metadata, **changes):
    """Return a compiled kernel as Triton 3.6 makes it, without a GPU."""
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    run.launch = nvidia.wrap_handle_tensordesc(lambda *given: launched.append(given), signature, metadata)
    run.launch_cooperative_grid, run.launch_pdl = False, True
    run.global_scratch_size = run.profile_scratch_size = 0
    vars(run).update(changes)
    return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


def descriptor(t):
    return SimpleNamespace(base=t, shape=list(t.shape), strides=list(t.stride()), padding="zero")


@wraps
def test_the_launcher_gets_what_the_wrapper_would_give_it(monkeypatch):
    """But for addresses in place of tensors, which the launcher asks for them."""
    made = []
    fill = lambda address, *rest: made.append(address) or ("map", address, *map(str, rest))  # noqa: E731
    utils = SimpleNamespace(fill_tma_descriptor=fill)
    monkeypatch.setattr(nvidia.triton.runtime.driver, "_active", SimpleNamespace(utils=utils), raising=False)
    monkeypatch.setattr(type(nvidia.triton.runtime.driver), "active", property(lambda _: SimpleNamespace(utils=utils)))
    about = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    signature = {"q": "tensordesc<bf16[64, 64]>", "n": "i32", "o": "tensordesc<bf16[64, 64]>", "lse": "*fp32", "D": "x"}
    launched = []
    kernel = compiled(launched, signature, [about, about])
    q, o, other, lse = (torch.zeros(4, 8, dtype=torch.bfloat16) for _ in range(4))
    given = descriptor(q), 7, descriptor(o), lse
    kernel.run.launch(
        5, 1, 1, 99, "function", False, True, None, None, "metadata", None, None, None, *given, 64
    )  # fmt: skip
    at_once = direct(kernel, given, (64,))
    assert at_once is not None
    made.clear()
    for _ in range(2):
        at_once(5, 99, given)
    truth = tuple(lse.data_ptr() if each is lse else each for each in launched[0])
    assert launched[1] == launched[2] == truth
    assert sorted(made) == sorted([q.data_ptr(), o.data_ptr()]), "an address is described once"
    at_once(5, 99, (descriptor(other), 7, descriptor(o), lse))
    assert made[2:] == [other.data_ptr()]
    assert launched[3] != truth


@wraps
def test_old_descriptions_are_dropped(monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    signature, launched = {"q": "tensordesc<bf16[64, 64]>"}, []
    kernel = compiled(launched, signature, [None])
    tensors = [torch.zeros(4, 8) for _ in range(3)]
    at_once = direct(kernel, (descriptor(tensors[0]),), ())
    assert at_once is not None
    for t in tensors:
        at_once(1, 0, (descriptor(t),))
        assert launched[-1][len(BASE)] == t.data_ptr()
    (known,) = at_once.maps.values()
    assert list(known) == [tensors[2].data_ptr()]


@wraps
@pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_with_scratch_is_left_to_the_wrapper(size):
    assert direct(compiled([], {"x": "*fp32"}, None, **{size: 8}), (), ()) is None


def test_another_wrapper_is_left_as_it_is():
    assert direct(SimpleNamespace(run=SimpleNamespace(launch=print)), (), ()) is None
