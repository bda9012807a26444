"""Launches that are kept: the next call of a kind gives them its own addresses, and little else runs in Python."""

import cProfile
import inspect
import pstats
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tilewise import append, check, operator

pytest.importorskip("triton")
from triton.backends.nvidia import driver as nvidia

from tilewise.host import kept as host_kept
from tilewise.host import launch as host
from tilewise.host.replay import Replay
from tilewise.tile.append import cache_append
from tilewise.tile.merge import attention_merge
from tilewise.triton import decode_launch

pytestmark = pytest.mark.skipif(
    getattr(nvidia, "_BASE_ARGS_FORMAT_LEN", None) is None, reason="this Triton has another wrapper"
)
BF16 = torch.bfloat16


class Recorder:
    """A launcher that only tells what it was given."""

    def __init__(self, given):
        self.given = given

    def __call__(self, *arguments):
        self.given.append(arguments)


@pytest.fixture
def launched(monkeypatch):
    """Let CPU tensors count as a GPU's, and return the list of what launchers are given."""
    given = []

    def compiled(*_):
        run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        run.launch = Recorder(given)
        run.launch_cooperative_grid = run.launch_pdl = False
        run.global_scratch_size = run.profile_scratch_size = 0
        return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

    monkeypatch.setattr(host, "compile_once", compiled)
    monkeypatch.setattr(check, "target_of", lambda _: "sm_90")
    monkeypatch.setattr(operator, "check_contents", lambda *_: None)
    for module in (host, decode_launch, host_kept):
        monkeypatch.setattr(module, "current_stream", lambda _: 7)
    kernels = decode_launch.attention_decode, decode_launch.attention_combine, cache_append, attention_merge
    for kernel in kernels:
        monkeypatch.setattr(kernel, "arg_names", list(inspect.signature(kernel.fn).parameters), raising=False)
    launcher = append._launcher()
    monkeypatch.setattr(append, "_in_torch", launcher)
    cached = check._described, decode_launch.plan, host_kept.kept
    for each in cached:
        each.cache_clear()
    yield given
    for each in cached:
        each.cache_clear()


def plain(alibi=False):
    q, k, v = (torch.randn(1, n, h, 128, dtype=BF16) for n, h in ((1, 32), (1024, 8), (1024, 8)))
    score = (tw.Alibi(torch.rand(32)),) if alibi else ()
    return lambda: tw.attention(q, k, v, score=score), (q, k, v, *(t for s in score for t in s.tensors))


def cached(B=3):
    q, k, v = (torch.randn(*shape, 128, dtype=BF16) for shape in ((B, 1, 32), (64, 64, 8), (64, 64, 8)))
    table = torch.randint(0, 64, (B, 8), dtype=torch.int32)
    layout = tw.Cached(torch.full((B,), 100, dtype=torch.int32), table)
    return lambda: tw.attention(q, k, v, mask=tw.Causal(), layout=layout), (q, k, v, layout.lengths, table)


def appended(B=3):
    q, k, v = (torch.randn(*shape, 128, dtype=BF16) for shape in ((B, 1, 32), (64, 64, 8), (64, 64, 8)))
    k_new, v_new = torch.randn(2, B, 1, 8, 128, dtype=BF16).unbind()
    cos, sin = torch.randn(2, 512, 64).unbind()
    table = torch.zeros(B, 8, dtype=torch.int32)
    layout = tw.Cached(torch.full((B,), 100, dtype=torch.int32), table)
    tensors = q, k, v, k_new, v_new, cos, sin, layout.lengths, table
    return lambda: tw.append_(k, v, k_new, v_new, layout=layout, cos=cos, sin=sin, q=q), tensors


def merged(packed=False):
    rows, of_lse = ((64, 4), (4, 64)) if packed else ((2, 64, 4), (2, 4, 64))
    o, part = torch.randn(2, *rows, 128).unbind()
    lse, of_part = torch.randn(2, *of_lse).unbind()
    return lambda: tw.merge([(part, of_part)], into=(o, lse), backend="triton"), (o, lse, part, of_part)


def flat(value, names):
    """Return arguments with the name of a tensor in place of its address, and of others' a word."""
    if isinstance(value, tuple):
        return tuple(flat(each, names) for each in value)
    address = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return names.get(address, "made" if isinstance(address, int) and address > 1 << 40 else address)


CALLS = {"plain": plain, "alibi": lambda: plain(alibi=True), "cached": cached, "append": appended}
CALLS |= {"merge": merged, "merge packed": lambda: merged(packed=True)}


@pytest.mark.parametrize("name", CALLS)
def test_the_launchers_get_what_they_would_without_it(launched, monkeypatch, name):
    calls, found = [CALLS[name]() for _ in range(3)], []
    with torch.no_grad():
        calls[0][0]()  # it compiles, and launches nothing here
        for kept, (call, tensors) in zip((True, False), calls[1:], strict=True):
            if not kept:
                monkeypatch.setattr(Replay, "run", lambda *_: False)
            launched.clear()
            call()
            names = {t.data_ptr(): f"tensor {n}" for n, t in enumerate(tensors)}
            found.append([flat(given, names) for given in launched])
    assert len(found[0]) == (2 if name in ("plain", "alibi", "cached") else 1)
    assert found[0] == found[1]
    assert {n for given in found[0] for n in numbers(given)} >= {"tensor 0", "tensor 1", "tensor 2"}


def numbers(value):
    return [n for each in value for n in numbers(each)] if isinstance(value, tuple) else [value]


def test_a_copy_or_a_tensor_given_twice_is_not_kept(launched):
    q, k = torch.randn(1, 1, 32, 128, dtype=BF16), torch.randn(1, 1024, 8, 256, dtype=BF16)[..., ::2]
    with torch.no_grad():
        for _ in range(3):
            tw.attention(q, k, k)  # k is copied, as its entries lie apart
    k = k.contiguous()
    with torch.no_grad():
        for _ in range(3):
            tw.attention(q, k, k)
    problems = decode_launch.plan.cache_info().currsize
    assert problems == 2
    assert len(launched) == 2 * 2 * 2


@pytest.mark.parametrize(("name", "most"), [("plain", 115), ("cached", 155), ("append", 140)])
def test_a_call_makes_few_calls_in_python(launched, name, most):
    """Half as many as before launches were kept: 223, 278 and, with Triton's own launch, some 300."""
    call, _ = CALLS[name]()
    with torch.no_grad():
        for _ in range(3):
            call()
        profile = cProfile.Profile()
        profile.enable()
        call()
        profile.disable()
    assert pstats.Stats(profile).total_calls <= most
