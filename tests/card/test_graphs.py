"""CUDA graphs on a GPU: torch.compile's own, whose memory pools check that nothing is kept, and captures by hand."""

import pytest
import torch

import tilewise as tw

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU"),
    pytest.mark.filterwarnings("default"),  # the compiler warns of an empty graph that it captures first
]

ENDS = (0, 300, 300, 1000)
CALLS = {
    "hopper": ("hopper", torch.bfloat16, {"mask": tw.Causal()}),
    "hopper, deterministic": ("hopper", torch.bfloat16, {"mask": tw.Causal(), "deterministic": True}),
    "hopper, listed": ("hopper", torch.bfloat16, {"mask": "documents"}),
    "hopper, packed": ("hopper", torch.bfloat16, {"layout": "packed", "mask": tw.Causal()}),
    "hopper, fp32": ("hopper", torch.float32, {"precision": "fp16x3", "mask": tw.Causal()}),
    "triton": ("triton", torch.bfloat16, {"mask": tw.Causal()}),
    "triton, packed": ("triton", torch.float16, {"layout": "packed"}),
}


def made(case):
    """Operands that want gradients, do, and the call as a function of them."""
    backend, dtype, options = CALLS[case]
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need compute capability 9.0")
    rows = (ENDS[-1],) if "layout" in options else (2, ENDS[-1])
    x = [torch.randn(*rows, heads, 64, device="cuda", dtype=dtype).requires_grad_() for heads in (8, 4, 4)]
    do = torch.randn(*rows, 8, 64, device="cuda", dtype=dtype)
    options = dict(options)
    if options.get("mask") == "documents":
        ids = (torch.arange(ENDS[-1], device="cuda") // 250).expand(2, -1)
        options["mask"] = tw.Documents(ids, ids)
    if "layout" in options:
        cu = torch.tensor(ENDS, device="cuda", dtype=torch.int32)
        options["layout"] = tw.Varlen(cu, cu, 700, 700)
    return x, do, lambda q, k, v: tw.attention(q, k, v, backend=backend, **options)


def step(function, x, do):
    """o and gradients, as copies: a graph writes into the same memory again."""
    o = function(*x)
    found = o, *torch.autograd.grad(o, x, do)
    return [t.detach().clone() for t in found]


def compare(case, found, wanted):
    """The same bits, but for dQ of Hopper, which is added up in the order in which tiles end."""
    for name, got, want in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        if name == "dq" and CALLS[case][0] == "hopper":
            error, bound = (got - want).abs().max().item(), 0.01 * want.abs().max().item()
            assert error <= bound, f"{name} is off by {error}, allowed {bound}"
        else:
            assert torch.equal(got, want), f"{name} is off by {(got - want).abs().max().item()}"


@pytest.fixture(autouse=True)
def as_users_run(monkeypatch):
    """Without the tests' poison, which compiled code fills in, too; nothing compiled is left to the next test."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("case", CALLS)
def test_three_compiled_steps_give_what_eager_gives(case, mode):
    """The first warms up inside the pool of the graph, the second records it, the third replays it."""
    x, do, function = made(case)
    wanted = step(function, x, do)
    compiled = torch.compile(function, mode=mode, fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        compare(case, step(compiled, x, do), wanted)


@pytest.mark.parametrize("case", CALLS)
def test_compiled_inference_gives_what_eager_gives(case):
    x, _, function = made(case)
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        wanted = function(*x)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*x), wanted)


@pytest.mark.parametrize("case", CALLS)
def test_a_graph_captured_on_a_side_stream_replays_what_eager_gives(case):
    x, do, function = made(case)
    wanted = step(function, x, do)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(function, x, do)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = step(function, x, do)
    for _ in range(3):
        for t in found:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        compare(case, found, wanted)


def test_a_first_call_inside_a_pool_leaves_nothing_there():
    """On a stream that no call has used: its counter is made there, and then serves calls outside of the pool."""
    x, do, function = made("hopper")
    wanted = step(function, x, do)
    pool = torch.cuda.MemPool()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        with torch.cuda.use_mem_pool(pool):
            inside = step(function, x, do)
        compare("hopper", inside, wanted)
        del inside
        torch.cuda.synchronize()
        blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
        live = [block["size"] for block in blocks if block["state"] == "active_allocated"]
        assert blocks, "the call allocated from the pool"
        assert not live, f"blocks of {live} bytes are still alive in the pool"
        compare("hopper", step(function, x, do), wanted)
