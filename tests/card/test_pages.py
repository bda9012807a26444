"""Hopper's forward on keys in a cache: first whether TMA fills parts of a tile as a whole.

python -m pytest tests/card/test_pages.py -k panels     the first thing to run
"""

from dataclasses import replace

import caches
import pytest
import torch

import tilewise as tw

from .sizes import on_gpu
from .test_decode import TYPES, captured_short

pytestmark = on_gpu
WITHIN = [dtype for dtype in TYPES if dtype != torch.float32]


def hopper(call, **changes):
    """The call by Hopper's forward; a case that it refuses is skipped with its reasons."""
    given = {**call.options, "layout": call.layout, "backend": "hopper", **changes}
    if reasons := tw.explain(call.q, call.k, call.v, **given).refusals["hopper"]:
        pytest.skip("; ".join(reasons))
    return tw.attention(call.q, call.k, call.v, return_lse=True, **given)


@pytest.mark.parametrize("page", [8, 16, 24, 48, 64, 128, 256, 512])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_panels_are_filled_right(D, page):
    """A row that sees one key alone has its value as o, and under the query e_c its entry c as lse."""
    torch.manual_seed(0)
    N, H = 3 * 512, D
    width = -(-N // page)
    table = torch.randperm(width, device="cuda").int()[None]
    k, v = (torch.randint(-128, 128, (width, page, 1, D), device="cuda").bfloat16() for _ in range(2))
    q = torch.eye(D, device="cuda", dtype=torch.bfloat16).expand(1, N, H, D).contiguous()
    layout = tw.Cached(torch.tensor([N], device="cuda"), table)
    o, lse = tw.attention(
        q, k, v, mask=tw.Window(0, 0), scale=1.0, layout=layout, backend="hopper", return_lse=True
    )  # fmt: skip
    keys, values = (t[table[0].long()].flatten(0, 1)[:N, 0] for t in (k, v))
    torch.testing.assert_close(lse[0].T, keys.float(), atol=1e-3, rtol=1e-5)
    assert torch.equal(o[0], values[:, None].expand(-1, H, -1))


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("case", caches.CASES, ids=str)
def test_as_the_reference_and_nothing_else_is_read(case, dtype):
    call = caches.make(replace(case, dtype=dtype), "cuda")
    found, again = hopper(call), hopper(call)
    of_o, of_lse = caches.errors(found, caches.truth(call))
    assert of_o <= TYPES[dtype]
    assert of_lse <= max(2e-4, TYPES[dtype] / 4)
    assert torch.equal(found[0], again[0])


LONG = caches.Case("", queries=(600, 1, 0, 130), lengths=(3000, 700, 9, 130), packed=True, unowned=7, page=64,
                   capacity=4096, H=8, H_k=2, D=128, D_v=128, dtype=torch.bfloat16)  # fmt: skip
CHANGES = {
    "": {},
    "pages of 8": {"page": 8},
    "pages of 256": {"page": 256},
    "contiguous": {"page": None},
    "contiguous, padded on the left": {"page": None, "starts": (5, 0, 3, 100)},
    "window": {"mask": tw.Causal() & tw.Window(300, 0)},
    "full": {"mask": tw.Full()},
    "prefix": {"mask": "prefix"},
    "soft cap, sink": {"score": tw.SoftCap(5.0), "sink": True},
    "alibi per sequence": {"score": "alibi by sequence"},
    "head size 64": {"D": 64, "D_v": 64},
    "head size 256": {"D": 256, "D_v": 256},
    "head size 192 and 128": {"D": 192, "D_v": 128},
    "shared entries": {"index": (2, 0, 1, 2), "lengths": (3000, 700, 9, 130)},
    "heads first": {"order": "HND"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_chunks_of_prompts(name):
    call = caches.make(replace(LONG, **CHANGES[name]), "cuda")
    assert max(caches.errors(hopper(call), caches.truth(call))) < 1.6e-2


LENGTHS = tuple(int(n) for n in torch.randint(0, 3000, (40,), generator=torch.Generator().manual_seed(0)))
FEW = replace(LONG, packed=False, unowned=0, queries=(1,) * 40, lengths=LENGTHS, H=32, H_k=8)
FEW_CHANGES = {
    **{name: change for name, change in CHANGES.items() if not {"starts", "index", "lengths"} & change.keys()},
    "four queries": {"queries": (4,) * 40},
    "long": {"queries": (1,) * 4, "lengths": (1, 4000, 20000, 36000), "capacity": 36864},
    "one": {"queries": (1,), "lengths": (36000,), "capacity": 36864},
    "contiguous, padded on the left": {"page": None, "starts": tuple(n // 3 for n in LENGTHS)},
}


@pytest.mark.parametrize("name", FEW_CHANGES)
def test_few_queries_of_many_sequences(name):
    call = caches.make(replace(FEW, **FEW_CHANGES[name]), "cuda")
    found, again = hopper(call), hopper(call)
    assert max(caches.errors(found, caches.truth(call))) < 1.6e-2
    assert torch.equal(found[0], again[0])


@pytest.mark.parametrize("page", [64, None])
def test_what_the_kernels_before_write_is_read(page):
    """A call begins before they end, and asks for keys by the lengths and the table that it finds then."""
    cases = [replace(FEW, page=page, lengths=lengths) for lengths in (LENGTHS, LENGTHS[::-1])]
    calls = [caches.make(case, "cuda") for case in cases]
    wanted = [hopper(call)[0] for call in calls]
    q, k, v = (torch.zeros_like(t) for t in (calls[0].q, calls[0].k, calls[0].v))
    of_lengths, table = calls[0].layout.lengths.clone(), None if page is None else calls[0].layout.table.clone()
    layout, found = tw.Cached(of_lengths, table), []
    for call in calls * 10:
        for mine, its in (
            (q, call.q),
            (k, call.k),
            (v, call.v),
            (table, call.layout.table),
            (of_lengths, call.layout.lengths),
        ):
            if mine is not None:
                mine.copy_(its)
        found.append(tw.attention(q, k, v, layout=layout, **call.options, backend="hopper"))
    for got, want in zip(found, wanted * 10, strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("queries", [1, 130])
def test_a_graph_captured_short_is_replayed_long_without_a_wait(queries):
    call = caches.make(replace(LONG, packed=False, queries=(queries,) * 4, unowned=0), "cuda")
    for found, want in zip(*captured_short(call, hopper), strict=True):
        assert torch.equal(found, want)


def test_max_q_bounds_nothing():
    call = caches.make(LONG, "cuda")
    layout = call.layout
    less = tw.Cached(layout.lengths, layout.table, cu_q=layout.cu_q, max_q=1)
    assert max(caches.errors(hopper(call, layout=less), caches.truth(call))) < 1.6e-2


def test_a_pool_of_more_than_two_to_the_31_entries():
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("it needs 20 GB of memory")
    k = torch.zeros(40000, 64, 8, 128, dtype=torch.bfloat16, device="cuda")  # 2.6e9 entries
    v = torch.zeros_like(k)
    k[-9:], v[-9:] = torch.randn_like(k[-9:]), torch.randn_like(v[-9:])
    table = torch.arange(39999, 39991, -1, device="cuda", dtype=torch.int32)[None]
    q = torch.randn(1, 200, 32, 128, dtype=torch.bfloat16, device="cuda")
    layout = tw.Cached(torch.tensor([500], device="cuda"), table)
    keys, values = (t[table[0].long()].flatten(0, 1)[None, :500] for t in (k, v))
    want = tw.reference.attention(q.double(), keys.double(), values.double(), mask=tw.Causal())[0]
    got = tw.attention(q, k, v, mask=tw.Causal(), layout=layout, backend="hopper")
    assert float((got.double() - want).abs().max()) < 1e-2
