"""Keys in a cache on a GPU: every case of tests/caches.py, graphs that see new lengths, no wait for the host."""

from dataclasses import replace

import caches
import pytest
import torch

import tilewise as tw

from .sizes import on_gpu

pytestmark = on_gpu

LONG = caches.Case("long", queries=(1,) * 4, lengths=(1, 4000, 20000, 36000), page=64, capacity=36864, H=32, H_k=8,
                   D=128, D_v=128, dtype=torch.bfloat16)  # fmt: skip
TYPES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def run(call, **changes):
    given = {**call.options, "layout": call.layout, "return_lse": True, **changes}
    return tw.attention(call.q, call.k, call.v, **given)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", caches.CASES, ids=str)
def test_as_the_reference_and_nothing_else_is_read(case, dtype):
    check(case, dtype)


def check(case, dtype, **given):
    """A call twice: its errors are within the bounds of its type, and its bits repeat."""
    call = caches.make(replace(case, dtype=dtype), "cuda")
    found, again = run(call, **given), run(call, **given)
    of_o, of_lse = caches.errors(found, caches.truth(call))
    assert of_o <= TYPES[dtype]
    assert of_lse <= max(2e-4, TYPES[dtype] / 4)
    assert torch.equal(found[0], again[0])


@pytest.mark.parametrize(("scale", "most"), [(None, 2e-3), (1.0, 3.2e-2)])
def test_long_sequences(scale, most):
    """Also with logits whose row max still grows after many tiles, and where a few keys have all the weight."""
    call = caches.make(replace(LONG, scale=scale), "cuda")
    assert max(caches.errors(run(call), caches.truth(call))) < most


def captured_short(call, function):
    """What a graph gives that was captured where each sequence has one key, once it has all; and what a call gives."""
    want, lengths = function(call), call.layout.lengths.clone()
    call.layout.lengths.fill_(1)
    function(call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(call)
    call.layout.lengths.copy_(lengths)
    graph.replay()
    return found, want


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_graph_captured_short_is_replayed_long_without_a_wait():
    for found, want in zip(*captured_short(caches.make(LONG, "cuda"), run), strict=True):
        assert torch.equal(found, want)


def test_a_pool_of_more_than_two_to_the_31_entries():
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("it needs 20 GB of memory")
    k = torch.zeros(40000, 64, 8, 128, dtype=torch.bfloat16, device="cuda")  # 2.6e9 entries
    v = torch.zeros_like(k)
    k[-9:], v[-9:] = torch.randn_like(k[-9:]), torch.randn_like(v[-9:])
    table = torch.arange(39999, 39991, -1, device="cuda", dtype=torch.int32)[None]
    q = torch.randn(1, 1, 32, 128, dtype=torch.bfloat16, device="cuda")
    layout = tw.Cached(torch.tensor([500], device="cuda"), table)
    keys, values = (t[table[0].long()].flatten(0, 1)[None, :500] for t in (k, v))
    want = tw.reference.attention(q.double(), keys.double(), values.double())[0]
    assert float((tw.attention(q, k, v, layout=layout).double() - want).abs().max()) < 1e-2


def test_bits_do_not_depend_on_the_batch_or_on_how_a_prompt_is_cut():
    case = caches.Case("", queries=(1, 150, 3), lengths=(1570, 1000, 2030), packed=True, invariant=256, capacity=2048,
                       D=128, D_v=128, dtype=torch.bfloat16, page=64)  # fmt: skip
    call = caches.make(case, "cuda")
    o, _ = run(call)
    table, lengths = call.layout.table, call.layout.lengths
    for b, (first, last) in enumerate(((0, 1), (1, 151), (151, 154))):
        for step in (1, 64):
            for i in range(first, last, step * 16):
                stop = min(i + step, last)
                alone = tw.Cached(lengths[b : b + 1] - (last - stop), table[b : b + 1], invariant=256)
                part = tw.attention(call.q[None, i:stop], call.k, call.v, mask=tw.Causal(), layout=alone)
                assert torch.equal(part[0], o[i:stop])


@pytest.mark.parametrize("page", [16, 64, None])
def test_pages_in_8_bits(page):
    case = caches.Case("", lengths=(700, 1, 2000), page=page, capacity=2048, D=128, D_v=128, dtype=torch.bfloat16)
    call = caches.make(case, "cuda")
    eight = [tw.Quantized(t.to(torch.float8_e4m3fn), torch.rand(3, 2, device="cuda") + 0.5) for t in (call.k, call.v)]
    got = tw.attention(call.q, *eight, layout=call.layout, mask=tw.Causal())
    for b in range(3):
        k, v = (tw.reference.gather(t.x.float(), b, call.layout).double() * t.scale[b][:, None] for t in eight)
        want = tw.reference.attention(call.q[b : b + 1].double(), k, v)[0]
        assert float((got[b : b + 1].double() - want).abs().max()) < 1.5e-2


def test_a_step_without_a_wait():
    """append_ and attention in a graph, where lengths grow on the device."""
    k, v = (torch.zeros(2, 64, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, new = (torch.randn(2, 1, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8))
    angles = torch.randn(64, 64, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    lengths = torch.ones(2, dtype=torch.int32, device="cuda")
    layout = tw.Cached(lengths)

    def step():
        turned = tw.append_(k, v, new, new, layout=layout, cos=cos, sin=sin, q=q)
        return tw.attention(turned, k, v, mask=tw.Causal(), layout=layout)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for n in range(1, 20):
        lengths.fill_(n)
        graph.replay()
    turned = [tw.rotary(new.expand(-1, 19, -1, -1), cos, sin), new.expand(-1, 19, -1, -1)]
    want = tw.attention(tw.rotary(q, cos, sin, offsets=18), *turned, mask=tw.Causal())
    torch.testing.assert_close(o, want, atol=2e-2, rtol=2e-2)
