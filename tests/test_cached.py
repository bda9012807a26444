"""Keys in a cache: every case against the reference, on the CPU and in Triton; and what the layout promises."""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import caches
import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.attention.explain import problem_on
from tilewise.call import calls
from tilewise.call.backend import FORWARD, load, planned
from tilewise.call.check import check_arguments, describe
from tilewise.call.operands import Saved
from tilewise.call.problem import TensorSpec
from tilewise.call.recipe import KINDS

BACKENDS = ("cpu", "triton")
EACH = ("cpu", "triton")
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def device_of(backend):
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def run(call, backend, **changes):
    given = {**call.options, "layout": call.layout, "return_lse": True, "backend": backend, **changes}
    return tw.attention(call.q, call.k, call.v, **given)


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("case", [*caches.CASES, *caches.LATENTS], ids=str)
def test_as_the_reference_and_nothing_else_is_read(case, backend):
    call = caches.make(case, device_of(backend))
    found = run(call, backend)
    assert found[0].dtype == case.dtype
    assert found[1].dtype == torch.float32
    allowed = 2e-5 if backend == "triton" and torch.cuda.is_available() else ALLOWED[case.dtype]
    assert max(caches.errors(found, caches.truth(call))) <= max(allowed, ALLOWED[case.dtype])


def test_long_sequences_of_a_pack_are_left_to_another_kernel():
    pytest.importorskip("triton", reason="Triton is not installed")
    (case,) = [case for case in caches.CASES if case.name == "packed mixture"]
    call = caches.make(case, device_of("triton"))
    given = {"score": (), "scale": None, "sink": None, "precision": None} | call.options
    x, recipe, longest = check_arguments(
        call.q, call.k, call.v, given["mask"], given["score"], given["scale"], given["sink"], 0.0, call.layout, None,
        False, "triton",
    )  # fmt: skip
    o, lse = (torch.full_like(t, 7.0) for t in run(call, "triton"))
    planned(describe(x, recipe.up_to(3), longest)._replace(max_q=3), FORWARD).run(x, None, Saved(o, lse))
    whole, of_whole = run(call, "triton")
    assert case.queries == (1, 21, 0, 3)
    short = torch.ones(len(o), dtype=torch.bool, device=o.device).index_fill(0, torch.arange(1, 22, device=o.device), 0)
    torch.testing.assert_close(o[short], whole[short])
    torch.testing.assert_close(lse[:, short], of_whole[:, short])
    assert (o[~short] == 7.0).all()
    assert (lse[:, ~short] == 7.0).all()


def test_fp64_is_for_the_cpu():
    call = caches.make(replace(caches.CASES[0], dtype=torch.float64))
    assert max(caches.errors(run(call, None), caches.truth(call))) < 1e-14
    with pytest.raises(tw.Unsupported, match="fp64 is for the CPU"):
        run(call, "triton")


def rounded_once(a, b, dtype):
    """Multiply as Triton's interpreter asks numpy to. In fp32, a row's bits depend on the rows beside it: the library
    below numpy cuts products as it likes, a GPU does not."""
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)


PROMPT = caches.Case("", queries=(150,), lengths=(150,), H=4, packed=True, capacity=256, page=16, invariant=64)


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("mask", [tw.Causal(), tw.Causal() & tw.Window(70, 0)], ids=["causal", "window"])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(backend, mask, monkeypatch):
    monkeypatch.setattr(np, "matmul", rounded_once)
    call = caches.make(replace(PROMPT, mask=mask), device_of(backend))
    whole, lse = run(call, backend)
    for size in (64, 7):
        cut = list(range(0, 150, size))
        for first in cut[:3] + cut[-2:]:
            last = min(first + size, 150)
            ends = torch.tensor([0, last - first], device=call.q.device)
            lengths = torch.tensor([last], device=call.q.device)
            layout = tw.Cached(lengths, call.layout.table, cu_q=ends, max_q=size, invariant=64)
            part = tw.attention(call.q[first:last], call.k, call.v, mask=mask, layout=layout, backend=backend,
                                return_lse=True)  # fmt: skip
            assert torch.equal(part[0], whole[first:last])
            assert torch.equal(part[1], lse[:, first:last])


@pytest.mark.parametrize("backend", EACH)
def test_bits_do_not_depend_on_the_batch(backend):
    case = caches.Case("", queries=(1, 21, 3), lengths=(157, 100, 203), packed=True, invariant=64)
    call = caches.make(case, device_of(backend))
    o, _ = run(call, backend)
    table, lengths = call.layout.table, call.layout.lengths
    alone = tw.Cached(lengths[2:], table[2:], cu_q=torch.tensor([0, 3], device=call.q.device), invariant=64)
    assert torch.equal(tw.attention(call.q[22:], call.k, call.v, mask=tw.Causal(), layout=alone, backend=backend),
                       o[22:])  # fmt: skip
    turned = tw.Cached(lengths.flip(0), table.flip(0), cu_q=torch.tensor([0, 3, 24, 25], device=call.q.device),
                       invariant=64)  # fmt: skip
    q = torch.cat([call.q[22:], call.q[1:22], call.q[:1]])
    got = tw.attention(q, call.k, call.v, mask=tw.Causal(), layout=turned, backend=backend)
    assert torch.equal(got, torch.cat([o[22:], o[1:22], o[:1]]))


@pytest.mark.parametrize("programs", [1, 2, 5, 40])
def test_any_number_of_programs_gives_the_same_within_rounding_and_bits_if_asked(programs, monkeypatch):
    from tilewise.triton.split_keys import launch as decode_launch

    for invariant in (0, 64):
        case = caches.Case("", queries=(1, 9, 3), lengths=(157, 100, 203), packed=True, sink=True, invariant=invariant)
        call = caches.make(case, device_of("triton"))
        before = run(call, "triton")
        calls.forget()
        monkeypatch.setattr(decode_launch, "programs", lambda p, tiles: programs)
        monkeypatch.setattr(decode_launch, "LEAST", 32)
        after = run(call, "triton")
        again = run(call, "triton")
        calls.forget()
        monkeypatch.undo()
        assert torch.equal(after[0], again[0])
        assert max(caches.errors(after, caches.truth(call))) < (2e-5 if torch.cuda.is_available() else 2e-6)
        assert torch.equal(before[0], after[0]) or not invariant


@pytest.mark.parametrize(("B", "kernels"), [(6, 1), (7, 2)])
def test_partial_sums_are_added_only_where_there_are_some(B, kernels, monkeypatch):
    """The interpreter has three programs a key head: each sums two of 6 sequences, but not a third of 7."""
    from tilewise.triton.split_keys import launch as decode_launch

    seen, launches = [], decode_launch.launches
    monkeypatch.setattr(decode_launch, "launches", lambda *args: seen.append(launches(*args)) or seen[-1])
    monkeypatch.setattr(decode_launch, "programs", lambda p, tiles: 3)
    calls.forget()
    q, k, v = (torch.randn(B, n, H, 64, device=device_of("triton")).half() for n, H in ((1, 4), (100, 2), (100, 2)))
    o = tw.attention(q, k, v, backend="triton")
    calls.forget()
    assert [len(each) for each in seen] == [kernels]
    want, _ = tw.reference.attention(q.double(), k.double(), v.double())
    assert float((o - want).abs().max()) < 1e-3


def pages_of(B):
    """A layout of B sequences of up to 64 pages."""
    return tw.Cached(*(torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((B,), (B, 64))))


def decoding(B, layout=None):
    """A problem of one query a sequence, as an H200 or H100 would get it."""
    entries, rows = (B * 64, 64) if layout else (B, 4096)
    shapes = (B, 1, 32, 128), (entries, rows, 8, 128), (entries, rows, 8, 128)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    x, recipe, longest = check_arguments(q, k, v, tw.Full(), (), None, None, 0.0, layout, None, False, "triton")
    return problem_on(x, recipe, longest, "sm_90")


@pytest.mark.parametrize(
    ("B", "alone", "paged"), [(1, 16, 16), (8, 16, 16), (30, 15, 30), (64, 16, 32), (128, 32, 32), (131, 33, 33)]
)
def test_programs_divide_the_sequences_where_a_few_less_do(B, alone, paged):
    from tilewise.triton.split_keys import launch as decode_launch

    for layout, programs in ((None, alone), (pages_of(B), paged)):
        p = decoding(B, layout)
        assert decode_launch.programs(p, decode_launch.decode_tiles(p)) == programs


def test_slower_memory_and_shared_multiprocessors_have_fewer_loads_in_flight(monkeypatch):
    """By the memory of an H100 and of an H200: with one program a multiprocessor and with two, also with pages."""
    from tilewise.triton.split_keys import launch as decode_launch

    p, paged, cuda = decoding(128), decoding(128, pages_of(128)), torch.device("cuda", 0)
    tiles = decode_launch.decode_tiles(p)
    for clock, lines, stages in ((2619000, 5120, [3, 2, 5, 5]), (3201000, 6144, [4, 3, 7, 5]), (None, 0, [4, 3, 7, 5])):
        card = SimpleNamespace(memory_bus_width=lines, **({} if clock is None else {"memory_clock_rate": clock}))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        bytes_a_second = decode_launch.bandwidth(cuda)
        assert bytes_a_second == (float("inf") if clock is None else pytest.approx(clock * lines / 4 * 1e3))
        monkeypatch.setattr(decode_launch, "bandwidth", lambda device, of=bytes_a_second: of)
        plans = [decode_launch.planned(one, tiles, W) for one, W in ((p, 16), (p, 32), (paged, 16), (paged, 32))]
        assert [each.split.STAGES for each in plans] == stages
        monkeypatch.undo()


@pytest.mark.parametrize("backend", EACH)
def test_a_prompt_in_pieces_is_one_causal_call(backend):
    call = caches.make(replace(PROMPT, invariant=0), device_of(backend))
    whole = run(call, backend)[0]
    for size in (1, 7, 64):
        for first in (0, size, 150 - size):
            lengths = torch.tensor([first + size], device=call.q.device)
            layout = tw.Cached(lengths, call.layout.table)
            part = tw.attention(call.q[None, first : first + size], call.k, call.v, mask=tw.Causal(), layout=layout,
                                backend=backend)  # fmt: skip
            torch.testing.assert_close(part[0], whole[first : first + size], atol=2e-6, rtol=0)


@pytest.mark.parametrize("backend", EACH)
def test_a_shared_prefix_merges_with_the_rest(backend):
    """Two calls, of the shared pages and of each sequence's own, are one."""
    call = caches.make(replace(caches.CASES[0], lengths=(200, 200, 200)), device_of(backend))
    table, device = call.layout.table.clone(), call.q.device
    table[:, :4] = table[0, :4]
    whole = tw.attention(call.q, call.k, call.v, layout=tw.Cached(call.layout.lengths, table), backend=backend)
    rest = tw.Cached(call.layout.lengths - 64, table[:, 4:])
    prefix = tw.Cached(torch.tensor([64], device=device), table[:1, :4])
    own = tw.attention(call.q, call.k, call.v, layout=rest, return_lse=True, backend=backend)
    shared = tw.attention(call.q.transpose(0, 1), call.k, call.v, layout=prefix, return_lse=True, backend=backend)
    both, _ = tw.merge([own, (shared[0].transpose(0, 1), shared[1].permute(2, 1, 0))])
    torch.testing.assert_close(both, whole, atol=2e-6, rtol=0)


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("shape", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("page", [16, None])
def test_pages_in_8_bits_are_what_they_stand_for(backend, shape, page):
    case = replace(caches.CASES[0], page=page, score=tw.SoftCap(5.0), queries=(2, 2, 2))
    call = caches.make(case, device_of(backend))
    device = call.q.device
    scales = [torch.rand(shape, device=device) + 0.5 for _ in "kv"]
    eight = [tw.Quantized(t.to(torch.float8_e4m3fn), s) for t, s in zip((call.k, call.v), scales, strict=True)]
    if shape == (3, 2):  # a factor for each sequence
        entries = []
        for b in range(3):
            one = tw.Cached(call.layout.lengths[b : b + 1], None if page is None else call.layout.table[b : b + 1])
            own = slice(None) if page is not None else slice(b, b + 1)
            k, v = (t.x.float()[own] * s[b][:, None] for t, s in zip(eight, scales, strict=True))
            entries.append(tw.attention(call.q[b : b + 1], k, v, backend=backend, **{**call.options, "layout": one}))
        want = torch.cat(entries)
    else:
        k, v = (t.x.float() * s.expand(2)[:, None] for t, s in zip(eight, scales, strict=True))
        want = tw.attention(call.q, k, v, layout=call.layout, backend=backend, **call.options)
    got = tw.attention(call.q, *eight, layout=call.layout, backend=backend, **call.options)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("D_v", [32, 40, 33])
@pytest.mark.parametrize(("dtype", "size"), [
    (torch.bfloat16, 1.0), (torch.bfloat16, 2.0**40), (torch.bfloat16, 2.0**-40), (torch.float16, 1.0),
])  # fmt: skip
def test_queries_of_16_bits_meet_keys_of_8(backend, dtype, size, D_v):
    """Also queries that fp16, in which the portable kernel multiplies, would not hold; D_v even and odd."""
    case = replace(caches.CASES[0], queries=(5, 5, 5), D_v=D_v, dtype=dtype)
    call = caches.make(case, device_of(backend))
    q, device = call.q * size, call.q.device
    eight = [tw.Quantized(t.to(torch.float8_e4m3fn), torch.rand((), device=device) + 0.5) for t in (call.k, call.v)]
    eight[0] = tw.Quantized(eight[0].x, eight[0].scale / size)
    got, lse = tw.attention(q, *eight, layout=call.layout, backend=backend, return_lse=True, **call.options)
    exact = [t.x.double() * t.scale.double() for t in eight]
    true = caches.truth(replace(call, q=q, k=exact[0], v=exact[1]))
    of_o, of_lse = caches.errors((got, lse), true)
    assert of_o <= {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert of_lse <= 1e-3


def test_8_bits_run_where_they_can():
    call = caches.make(caches.CASES[0])
    eight = [tw.Quantized(t.to(torch.float8_e4m3fn), torch.ones(())) for t in (call.k, call.v)]
    assert tw.explain(call.q.bfloat16(), *eight, layout=call.layout, device="sm_90").backend == "triton"
    told = tw.explain(call.q.bfloat16(), *eight, layout=call.layout, device="sm_80", backend="triton")
    assert "converts no e4m3 on sm_80" in told.refusals["triton"][0]
    with pytest.raises(TypeError, match="v must be a Quantized where the other is"):
        tw.attention(call.q, eight[0], call.v, layout=call.layout)
    with pytest.raises(ValueError, match="layout must be a Cached where k is a Quantized"):
        tw.attention(call.q, *eight)
    with pytest.raises(ValueError, match="k's scale must have shape"):
        tw.attention(call.q, tw.Quantized(eight[0].x, torch.ones(7)), eight[1], layout=call.layout)
    with pytest.raises(TypeError, match="x must be a tensor of torch"):
        tw.Quantized(call.k, torch.ones(()))


def test_infinite_values_that_are_seen_arrive():
    call = caches.make(caches.CASES[1])
    call.v[0, 3] = torch.inf
    for backend in BACKENDS:
        if device_of(backend) == "cpu":
            assert run(call, backend)[0][0].isposinf().all()


def test_compiled_and_fake_and_checked():
    call = caches.make(caches.CASES[0])
    fn = torch.compile(lambda q, lengths: tw.attention(
        q, call.k, call.v, mask=tw.Causal(), layout=tw.Cached(lengths, call.layout.table)), fullgraph=True,
        backend="aot_eager", dynamic=True)  # fmt: skip
    for size in (1, 2, 5):
        q, lengths = torch.randn(3, size, 8, 32), torch.tensor([50, 1, 90], dtype=torch.int32)
        layout = tw.Cached(lengths, call.layout.table)
        want = tw.attention(q, call.k.nan_to_num(0.0), call.v.nan_to_num(0.0), mask=tw.Causal(), layout=layout)
        torch.testing.assert_close(fn(q, lengths), want)
    x, recipe, longest = check_arguments(
        call.q, call.k, call.v, tw.Causal(), (), None, None, 0.0, call.layout, None, False, None
    )
    torch.library.opcheck(torch.ops.tilewise.attention, (*x[:3], list(x.extra), None, recipe.encode(), *longest))


@pytest.mark.parametrize("packed", [False, True])
def test_no_queries_and_no_sequences(packed):
    for backend, (B, M) in itertools.product(BACKENDS, ((0, 1), (2, 0))):
        device = device_of(backend)
        k = torch.randn(4, 16, 2, 8, device=device)
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        layout = tw.Cached(zeros(B), zeros(B, 2), cu_q=zeros(B + 1) if packed else None)
        q = torch.randn(*((3,) if packed else (B, M)), 4, 8, device=device)
        o, lse = tw.attention(q, k, k, layout=layout, return_lse=True, backend=backend)
        assert o.shape == q.shape
        assert not o.any()
        assert lse.isneginf().all()


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize(
    ("shape", "width", "starts"),
    [((2, 0), 1, None), ((2, 0), 3, (0, 0)), ((0, 16), 0, None), ((0, 0), 1, None), ((2, 0), None, None)],
    ids=["pages of no rows", "pages of no rows, starts", "no pages", "nothing", "entries of no rows"],
)
def test_empty_caches_show_no_keys(backend, M, shape, width, starts):
    device = device_of(backend)
    q, k, v = torch.randn(2, M, 4, 8), torch.randn(*shape, 2, 8), torch.randn(*shape, 2, 16)
    q, k, v = (t.to(device) for t in (q, k, v))
    lengths = torch.tensor([0, 5], device=device)
    table = None if width is None else torch.zeros(2, width, dtype=torch.int32, device=device)
    layout = tw.Cached(lengths, table, starts=None if starts is None else torch.tensor(starts, device=device))
    o, lse = tw.attention(q, k, v, mask=tw.Causal(), layout=layout, return_lse=True, backend=backend)
    assert o.shape == (2, M, 4, 16)
    assert not o.any()
    assert lse.isneginf().all()
    cos = torch.ones(9, 2, device=device)
    new = q[:, :, :2]
    turned = tw.append_(k, v, new, torch.cat([new, new], -1), layout=layout, cos=cos, sin=1 - cos, q=q)
    assert torch.equal(turned, q)


def test_explain_tells_rows_programs_and_look_ups():
    call = caches.make(caches.CASES[0])
    told = tw.explain(call.q.bfloat16(), call.k.bfloat16(), call.v.bfloat16(), layout=call.layout, device="sm_90")
    assert told.backend == "triton"
    assert "16 rows of 4 heads x 64 keys" in told.tiles
    assert "132 programs for each of 2 key heads" in told.tiles
    assert "pages of 16, 4 look-ups a tile" in told.tiles
    assert not told.refusals["hopper"]  # but with few keys it is slower
    assert "keys from a cache" in tw.explain(call.q, call.k, call.v, layout=call.layout).tiles


@pytest.mark.parametrize(("B", "sums"), [(16, "no"), (17, "at most 32")])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_explain_tells_partial_sums(backend, B, sums):
    """Sixteen programs a key head sum a sequence each, but of a seventeenth a part each."""
    q, k = (torch.empty(B, n, H, 128, device="meta").bfloat16() for n, H in ((1, 32), (4096, 8)))
    assert f"{sums} partial sums" in tw.explain(q, k, k, device="sm_90", backend=backend).tiles


@pytest.mark.parametrize("of", [torch.Tensor.clone, lambda t: t.to("meta")], ids=["addresses", "meta"])
def test_explain_tells_whether_v_is_read_from_k(of):
    """By memory and strides, however the view was made."""
    call = caches.make(replace(caches.LATENT, dtype=torch.bfloat16))
    k, other = of(call.k), of(call.k)
    views = {
        "a slice": (k[..., :512], True),
        "reshaped": (k.flatten(2)[..., :512].unsqueeze(2), True),
        "fewer columns": (k[..., :60], True),
        "apart": (other[..., :512], False),
        "contiguous": (k[..., :512].contiguous(), False),
        "the last columns": (k[..., 64:], False),
        "later pages": (k[1:][..., :512], False),
    }
    for name, (v, inside) in views.items():
        keys = k[:-1] if name == "later pages" else k
        options = {"layout": call.layout.to(k.device), "mask": tw.Causal(), "device": "sm_90"}
        told = tw.explain(call.q.to(k.device), keys, v, backend="triton", **options)
        assert ("V is read from K's tiles" in told.tiles) == inside, name


def test_hopper_takes_latents():
    """A multiprocessor has two programs of 16 rows, or one of 32, which takes long caches alone."""
    k, ints = torch.empty(9, 64, 1, 576, device="meta").bfloat16(), torch.empty(4, 128, device="meta").int()
    layout = tw.Cached(ints[:, 0].contiguous(), ints)

    def told(heads, v=k[..., :512], backend=None):
        q = torch.empty(4, 1, heads, 576, device="meta").bfloat16()
        return tw.explain(q, k, v, mask=tw.Causal(), layout=layout, backend=backend, device="sm_90")

    assert told(128).backend == "triton"
    assert told(128, backend="hopper").backend is None
    assert told(16, torch.empty_like(k[..., :512]), "hopper").backend is None
    for heads, rows, programs in ((8, 16, 264), (16, 16, 264), (17, 32, 132), (32, 32, 132)):
        found = told(heads)
        assert found.backend == "hopper"
        tiles = found.tiles
        assert f"{rows} rows of {heads} heads x 64 keys" in tiles
        assert f"{programs} programs for each of 1 key heads" in tiles
        assert "V is read from K's tiles" in tiles


def test_few_queries_split_keys_on_hopper():
    q, k = torch.empty(3, 4, 32, 128, dtype=torch.bfloat16), torch.empty(40, 64, 8, 128, dtype=torch.bfloat16)
    layout = tw.Cached(torch.full((3,), 100), torch.zeros(3, 8, dtype=torch.int32))

    def told(q=q, layout=layout, **options):
        return tw.explain(q, k, k, mask=tw.Causal(), layout=layout, device="sm_90", **options)

    assert told().backend == "triton"  # with few keys
    assert "splits keys, 16 rows of 4 heads x 64 keys" in told(backend="hopper").tiles
    assert "pages of 64, 1 look-up a tile" in told(backend="hopper").tiles
    more = torch.empty(3, 5, 32, 128, dtype=torch.bfloat16)  # 20 rows
    assert "keys not split" in told(more, backend="hopper").tiles
    ends = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    packed = tw.Cached(layout.lengths, layout.table, cu_q=ends)
    assert "keys not split" in told(q.flatten(0, 1), packed, backend="hopper").tiles


@pytest.mark.parametrize(
    ("B", "N", "mask", "backend"),
    [
        (8, 4096, tw.Causal(), "hopper"), (8, 4032, tw.Causal(), "triton"), (40, 1024, tw.Causal(), "hopper"),
        (64, 960, tw.Causal(), "triton"), (1, 32768, tw.Full(), "hopper"),
        (40, 4096, tw.Causal() & tw.Window(1000, 0), "triton"), (40, 4096, tw.Causal() & tw.Window(1023, 0), "hopper"),
    ],
)  # fmt: skip
def test_hopper_takes_few_queries_with_many_keys(B, N, mask, backend):
    """From 1,024 keys a sequence and 2,048 a program on, as measured; a window leaves fewer."""
    q, k = torch.empty(B, 1, 32, 128, device="meta").bfloat16(), torch.empty(9, 64, 8, 128, device="meta").bfloat16()
    lengths, table = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((B,), (B, N // 64)))
    layout = tw.Cached(lengths, table)
    assert tw.explain(q, k, k, mask=mask, layout=layout, device="sm_90").backend == backend


def test_a_mixture_gives_each_sequence_its_kernel():
    ends, lengths = torch.tensor([0, 1, 2, 2050], dtype=torch.int32), torch.full((3,), 2560, dtype=torch.int32)
    layout = tw.Cached(lengths, torch.zeros(3, 40, dtype=torch.int32), cu_q=ends, max_q=2048)
    k = torch.empty(40, 64, 8, 128, dtype=torch.bfloat16)
    told = tw.explain(k.new_empty(2050, 32, 128), k, k, mask=tw.Causal(), layout=layout, device="sm_90")
    assert told.backend == "hopper"
    assert "sequences of fewer than 64 queries on the portable kernel" in told.tiles


def scaled(k, v):
    """Attention on keys and values in 8 bits with these scales."""
    eight = (tw.Quantized(K.to(torch.float8_e4m3fn), torch.tensor(scale)) for scale in (k, v))
    return tw.attention(Q, *eight, layout=tw.Cached(LENGTHS))


LENGTHS = torch.tensor([5, 9])
Q, K = torch.randn(2, 1, 4, 8), torch.randn(2, 16, 2, 8)
WRONG = {
    "lengths must be an int32 tensor": lambda: tw.Cached([5, 9]),
    "lengths must be int32 or int64": lambda: tw.Cached(LENGTHS.float()),
    "lengths must have shape": lambda: tw.Cached(LENGTHS[None]),
    "table must have shape": lambda: tw.Cached(LENGTHS, LENGTHS),
    "table must have shape (B, width), got (3, 2)": lambda: tw.Cached(LENGTHS, torch.zeros(3, 2, dtype=torch.int32)),
    "cu_q must have shape (B + 1,)": lambda: tw.Cached(LENGTHS, cu_q=LENGTHS),
    "max_q must be None without cu_q": lambda: tw.Cached(LENGTHS, max_q=3),
    "max_q must be >= 0": lambda: tw.Cached(LENGTHS, cu_q=torch.tensor([0, 1, 2]), max_q=-3),
    "invariant must be 0 or a multiple of 64": lambda: tw.Cached(LENGTHS, invariant=100),
    "q must have shape (B, M, H, D)": lambda: tw.attention(Q[0], K, K, layout=tw.Cached(LENGTHS)),
    "q must have one entry for each": lambda: tw.attention(Q[:1], K, K, layout=tw.Cached(LENGTHS)),
    "k must have shape (entries, capacity, H_k, D)": lambda: tw.attention(Q, K[0], K, layout=tw.Cached(LENGTHS)),
    "k must have an entry for each": lambda: tw.attention(Q, K[:1], K[:1], layout=tw.Cached(LENGTHS)),
    "lengths and starts must be >= 0": lambda: tw.attention(Q, K, K, layout=tw.Cached(-LENGTHS)),
    "index must be in [0, 2)": lambda: tw.attention(Q, K, K, layout=tw.Cached(LENGTHS, index=LENGTHS)),
    "table must have pages in [0, 2) for the rows that a call reads or writes, got 77": lambda: tw.attention(
        Q, K, K, layout=tw.Cached(LENGTHS + 12, torch.tensor([[0, 77], [1, 0]]))
    ),
    "table must have pages in [0, 2) for the rows that a call reads or writes, got -1": lambda: tw.attention(
        Q[:, [0, 0]], K, K, layout=tw.Cached(LENGTHS, torch.tensor([[1, 77], [-1, 0]]))
    ),
    "k's scale must be finite and > 0, got 0.0": lambda: scaled(0.0, 1.0),
    "k's scale must be finite and > 0, got inf": lambda: scaled(torch.inf, 1.0),
    "v's scale must be finite and > 0, got [1.0, -1.0]": lambda: scaled(1.0, [1.0, -1.0]),
    "v's scale must be finite and > 0, got nan": lambda: scaled(1.0, torch.nan),
    "cu_q must start at 0": lambda: tw.attention(Q[0], K, K, layout=tw.Cached(LENGTHS, cu_q=torch.tensor([0, 9, 1]))),
    "with qkv": lambda: tw.attention_qkvpacked(torch.randn(2, 1, 3, 4, 8), layout=tw.Cached(LENGTHS)),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_are_named(text):
    with pytest.raises((TypeError, ValueError)) as error:
        WRONG[text]()
    assert text in str(error.value)
    from test_messages import FORM

    assert FORM.fullmatch(str(error.value)), str(error.value)


REFUSED = {
    "no gradients": lambda: tw.attention(Q.clone().requires_grad_(), K, K, layout=tw.Cached(LENGTHS)),
    "no backward": lambda: tw.attention_backward(Q, Q, K, K, Q, Q, layout=tw.Cached(LENGTHS)),
    "no dropout": lambda: tw.attention(Q, K, K, dropout=0.5, layout=tw.Cached(LENGTHS)),
    "Dense does not": lambda: tw.attention(
        Q, K, K, mask=tw.Dense(torch.ones(1, 16, dtype=torch.bool)), layout=tw.Cached(LENGTHS)
    ),
    r"Padding \(bool\) does not": lambda: tw.attention(
        Q, K, K, mask=tw.Padding(torch.ones(2, 16, dtype=torch.bool)), layout=tw.Cached(LENGTHS)
    ),
    "Documents does not": lambda: tw.attention(
        Q, K, K, mask=tw.Documents(torch.ones(2, 1, dtype=torch.int32), torch.ones(2, 16, dtype=torch.int32)),
        layout=tw.Cached(LENGTHS),
    ),
    "Bias does not": lambda: tw.attention(Q, K, K, score=tw.Bias(torch.ones(1, 16)), layout=tw.Cached(LENGTHS)),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Added(tw.Mask):
    """A mask that the package does not have: the first keys and a window, as CONTRIBUTING.md's Streaming."""

    first: int
    left: int
    interval = False
    varlen = False

    @staticmethod
    def rule(b, h, i, j, first, left):
        return (j <= i) & ((j < first) | (j >= i - left))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("mask", [Added(4, 8), tw.Causal() & Added(4, 8)], ids=["alone", "with an interval"])
def test_an_added_mask_is_refused_by_what_it_is(mask, M, backend, monkeypatch):
    monkeypatch.setitem(KINDS, "Added", Added)
    with pytest.raises(tw.Unsupported, match="Added does not go with Cached: it is for one number"):
        tw.attention(torch.randn(2, M, 4, 8), K, K, mask=mask, layout=tw.Cached(LENGTHS), backend=backend)


@pytest.mark.parametrize("page", [16, None])
@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("backend", EACH)
def test_no_back_end_skips_keep(backend, M, page):
    """Also not where the check lets a mask without an interval pass: bools, for a cache of two full entries."""
    call = caches.make(caches.Case("", (M, M), (64, 64), page=page, capacity=64, mask=tw.Full()), device_of(backend))
    mask = tw.Causal() & tw.Padding(torch.rand(2, 64, device=call.q.device) < 0.5)
    given = (), None, None, 0.0, call.layout, None, False, backend
    whole = describe(*check_arguments(call.q, call.k, call.v, tw.Full(), *given))
    x, recipe, _ = check_arguments(call.q, call.k, call.v, mask, *given)
    problem = whole._replace(recipe=recipe, extra=tuple([TensorSpec.of(t) for t in x.extra]))
    found = load(backend).plan(problem, FORWARD).run(x, None)
    call.options["mask"] = mask
    assert max(caches.errors(found[:2], caches.truth(call))) < (2e-5 if torch.cuda.is_available() else 2e-6)


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_cache_does_not_go_with_is_refused_with_a_reason(text):
    with pytest.raises(tw.Unsupported, match=text):
        REFUSED[text]()


def test_no_grad_lets_weights_pass():
    with torch.no_grad():
        o = tw.attention(Q.clone().requires_grad_(), K, K, layout=tw.Cached(LENGTHS))
    assert torch.equal(o, tw.attention(Q, K, K, layout=tw.Cached(LENGTHS)))


def test_a_layout_is_a_value():
    layout = tw.Cached(LENGTHS, invariant=64)
    assert layout == tw.Cached(layout.lengths, invariant=64)
    assert layout != tw.Cached(layout.lengths)
    assert hash(layout) == hash(tw.Cached(layout.lengths, invariant=64))
    assert layout.to("cpu") == layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page", [16, None])
def test_one_query_a_sequence_is_pytorchs_kernel_on_a_cpu(page, dtype):
    case = caches.Case("", queries=(1,) * 4, lengths=(0, 1, 100, 203), page=page, capacity=256, D_v=32, dtype=dtype)
    call = caches.make(replace(case, mask=tw.Causal() & tw.Window(90, 0)), "cpu")
    problem = {"mask": call.options["mask"], "layout": call.layout}
    assert "PyTorch's fused CPU kernel, keys from a cache" in str(tw.explain(call.q, call.k, call.v, **problem))
    of_o, of_lse = caches.errors(run(call, "cpu"), caches.truth(call))
    assert of_o <= {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert of_lse <= (2e-6 if dtype == torch.float32 else 1e-2)
