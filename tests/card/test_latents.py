"""Latents in a cache on a GPU: head sizes above 256, and V as the first columns of K, which are read once."""

import statistics
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import caches
import pytest
import torch

import tilewise as tw

from . import test_decode as decode
from .sizes import on_gpu

pytestmark = on_gpu

LONG = replace(caches.LATENT, name="long", queries=(1,) * 4, lengths=(1, 4000, 9001, 20000), capacity=20480, page=64,
               dtype=torch.bfloat16)  # fmt: skip


run = partial(decode.run, backend="triton")
ROWS = 32
"""The most rows (heads times queries) that Hopper's kernel takes; others are left to the portable one."""
BACKENDS = pytest.mark.parametrize("backend", ["triton", "hopper"])


@contextmanager
def left_out(backend, refused=True):
    """Skip what Hopper refuses, if it may."""
    try:
        yield
    except tw.Unsupported as error:
        assert backend == "hopper"
        assert refused
        pytest.skip(str(error).splitlines()[-1])


@BACKENDS
@pytest.mark.parametrize("dtype", decode.TYPES, ids=str)
@pytest.mark.parametrize("case", caches.LATENTS, ids=str)
def test_as_the_reference_and_nothing_else_is_read(case, dtype, backend):
    with left_out(backend):
        decode.check(case, dtype, backend=backend)


@BACKENDS
@pytest.mark.parametrize(("scale", "most"), [(None, 2e-3), (0.5, 3.2e-2)])
@pytest.mark.parametrize("page", [64, 16, None])
@pytest.mark.parametrize("M", [1, 2])
@pytest.mark.parametrize("H", [16, 24, 128])
def test_long_sequences(H, M, page, scale, most, backend):
    """Also with logits whose row max still grows after many tiles, and where a few keys have all the weight."""
    call = caches.make(replace(LONG, H=H, queries=(M,) * 4, page=page, scale=scale), "cuda")
    with left_out(backend, refused=M * H > ROWS):
        found, again = run(call, backend=backend), run(call, backend=backend)
    assert max(caches.errors(found, caches.truth(call))) < most
    assert torch.equal(found[0], again[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("H", [16, 32])
def test_a_graph_captured_short_is_replayed_long(H):
    call = caches.make(replace(LONG, H=H), "cuda")
    for found, want in zip(*decode.captured_short(call, partial(run, backend="hopper")), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("page", [64, None])
def test_values_apart_are_read_after_values_inside(page, backend):
    """One call is kept for both, as nothing but an address differs."""
    call = caches.make(replace(LONG, page=page), "cuda")
    inside, apart = call.v, (torch.randn_like(call.k) + 0 * call.k)[..., :512]
    assert apart.stride() == inside.stride()
    for values in (inside, apart, inside, apart, apart, inside):
        call.v = values
        words = tw.explain(call.q, call.k, call.v, layout=call.layout, backend=backend, **call.options).tiles
        assert ("V is read from K's tiles" in words) == (
            values is inside and torch.cuda.get_device_capability() == (9, 0)
        )
        assert max(caches.errors(run(call, backend=backend), caches.truth(call))) < 2e-3


def milliseconds(call, times=20):
    """The median time of a call on the GPU."""
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    torch.cuda._sleep(1 << 22)
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median([start.elapsed_time(stop) for start, stop in events])


@pytest.mark.parametrize("page", [64, None])
@pytest.mark.parametrize(("B", "H", "M", "N"), [(64, 16, 1, 8192), (16, 16, 2, 32768), (64, 128, 1, 8192)])
def test_cost_of_latents(B, H, M, N, page):
    """Printed: the time of a call, beside the time to read its cache once, and with V copied.

    With 16 heads, reading takes at least 0.90 of the time, and V in memory of its own takes 1.8 times as long. Products
    of 128 heads take longer than reading, so there both are printed alone.
    """
    latent = torch.randn(B * N, 576, device="cuda", dtype=torch.bfloat16)
    k = latent.view(B * N // page, page, 1, 576) if page else latent.view(B, N, 1, 576)
    table = torch.randperm(B * N // page, device="cuda").int().view(B, -1) if page else None
    layout = tw.Cached(torch.full((B,), N, device="cuda"), table)
    q = torch.randn(B, M, H, 576, device="cuda", dtype=torch.bfloat16)
    copied = k[..., :512].contiguous()

    def attend(v, backend="triton"):
        return tw.attention(q, k, v, mask=tw.Causal(), layout=layout, backend=backend)

    words, half = latent.view(torch.float32), latent[: B * N // 2]
    other = torch.empty_like(half)
    reading = min(milliseconds(words.sum), milliseconds(lambda: other.copy_(half)))
    fastest = "hopper" if M * H <= ROWS else "triton"
    ours, apart = milliseconds(lambda: attend(k[..., :512], fastest)), milliseconds(lambda: attend(copied))
    print(f"B {B}, {H} heads, M {M}, {N} keys, {f'pages of {page}' if page else 'contiguous'}: {1e3 * ours:.0f} us; "
          f"reading {reading / ours:.2f} of it; V copied {apart / ours:.2f} times as long")  # fmt: skip
    assert H > 16 or reading >= 0.90 * ours
    assert H > 16 or apart >= 1.8 * ours
