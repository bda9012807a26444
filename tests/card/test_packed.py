"""Packed rows that no sequence owns, on a GPU: memory that is reused, lengths that are too short, and what it costs."""

import pytest
import torch
from graphs import captured

import tilewise as tw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="both back ends of this test need a GPU")

KINDS = {
    "hopper bf16": ("hopper", torch.bfloat16, {}),
    "hopper bf16, deterministic": ("hopper", torch.bfloat16, {"deterministic": True}),
    "hopper fp32": ("hopper", torch.float32, {"precision": "fp16x3"}),
    "hopper fp32 in bf16": ("hopper", torch.float32, {"precision": "bf16x6"}),
    "triton bf16": ("triton", torch.bfloat16, {}),
    "triton fp32": ("triton", torch.float32, {}),
}
LENGTHS = {
    "one short": (700,),
    "many": (300, 0, 129, 64, 1, 500),
    "of two rows": (2,) * 200,
}
GRADIENTS = ("dq", "dk", "dv", "dsink")


def ends(lengths):
    return torch.tensor((0, *lengths), device="cuda").cumsum(0).to(torch.int32)


def made(kind, rows, D=64, H=8, H_k=4):
    """q, k, v, sink and do."""
    backend, dtype, options = KINDS[kind]
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need compute capability 9.0")
    x = [torch.randn(rows, heads, D, device="cuda", dtype=dtype) for heads in (H, H_k, H_k)]
    sink = torch.randn(H, device="cuda")
    return x, sink, torch.randn(rows, H, D, device="cuda", dtype=dtype), {"backend": backend, **options}


def step(x, sink, do, layout, **options):
    """All results by name, in memory that is poisoned before."""
    leaves = [t.detach().requires_grad_() for t in (*x, sink)]
    o, lse = tw.attention(*leaves[:3], sink=leaves[3], mask=tw.Causal(), layout=layout, return_lse=True, **options)
    grads = torch.autograd.grad((o, lse), leaves, (do, torch.ones_like(lse)))
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


def compare(found, wanted, owned, rows):
    """The owned rows are what the shorter call gives, the others 0, or -inf in lse; dq of Hopper up to its rounding."""
    for name in wanted:
        got, want = (results[name].T if name == "lse" else results[name] for results in (found, wanted))
        if name != "dsink":
            assert got.shape[0] == rows
            behind = got[owned:]
            assert (behind == (-torch.inf if name == "lse" else 0)).all(), f"{name} behind the last sequence"
            got = got[:owned]
        if name in ("dq", "dsink"):
            error, bound = (got - want).abs().max().item(), 0.01 * want.abs().max().item()
            assert error <= bound, f"{name} is off by {error}, allowed {bound}"
        else:
            assert torch.equal(got, want), f"{name} is off by {(got - want).abs().max().item()}"


@pytest.mark.parametrize("behind", [0, 1, 40, 5000])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_behind_the_last_sequence_are_nobodys(kind, lengths, behind):
    """Twice, with other numbers in the memory that is used again; behind the last sequence all inputs are NaN."""
    owned, longest = sum(LENGTHS[lengths]), max(LENGTHS[lengths])
    x, sink, do, options = made(kind, owned + behind)
    cu = ends(LENGTHS[lengths])
    layout = tw.Varlen(cu, cu, longest, longest)
    wanted = step([t[:owned] for t in x], sink, do[:owned], layout, **options)
    for t in (*x, do):
        t[owned:] = torch.nan
    for _ in range(2):
        found = step(x, sink, do, layout, **options)
        compare(found, wanted, owned, owned + behind)
        for t in found.values():
            t.fill_(7.0)
        del found


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("kind", ["hopper bf16", "triton bf16"])
def test_other_head_sizes(kind, D):
    x, sink, do, options = made(kind, 1500, D)
    cu = ends((300, 600))
    layout = tw.Varlen(cu, cu, 600, 600)
    wanted = step([t[:900] for t in x], sink, do[:900], layout, **options)
    compare(step(x, sink, do, layout, **options), wanted, 900, 1500)


@pytest.mark.parametrize("kind", ["hopper bf16", "triton bf16"])
def test_a_soft_cap_does_not_meet_the_next_sequence(kind):
    """Hopper's soft cap shares a reciprocal between neighbors, and the first sequence has an odd number of keys."""
    x, _, _, options = made(kind, 1000)
    options |= {"mask": tw.Causal(), "score": tw.SoftCap(5.0)}
    first, both = ends((301,)), ends((301, 699))
    wanted = tw.attention(*(t[:301] for t in x), layout=tw.Varlen(first, first, 699, 699), **options)
    for t in x:
        t[301:] = torch.nan
    assert torch.equal(tw.attention(*x, layout=tw.Varlen(both, both, 699, 699), **options)[:301], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_ends_at_a_longest_length_that_is_too_short(kind):
    """Its first rows and keys are the sequence, the rest is nobody's; as a call without that rest gives it."""
    x, sink, do, options = made(kind, 1000)
    cu, kept = ends((300, 700)), torch.cat([torch.arange(200), torch.arange(300, 500)]).cuda()
    found = step(x, sink, do, tw.Varlen(cu, cu, 200, 200), **options)
    shorter = ends((200, 200))
    layout = tw.Varlen(shorter, shorter, 200, 200)
    wanted = step([t[kept] for t in x], sink, do[kept], layout, **options)
    rest = torch.ones(1000, dtype=torch.bool, device="cuda").index_fill(0, kept, False)
    order = torch.cat([kept, rest.nonzero()[:, 0]])
    found = {n: t if n == "dsink" else t[:, order] if n == "lse" else t[order] for n, t in found.items()}
    compare(found, wanted, 400, 1000)


@pytest.mark.parametrize("kind", ["triton bf16", "triton fp32"])
def test_no_sequence_at_all(kind):
    x, sink, do, options = made(kind, 100)
    cu = ends(())
    found = step(x, sink, do, tw.Varlen(cu, cu, 0, 0), **options)
    assert (found.pop("lse") == -torch.inf).all()
    assert all((t == 0).all() for t in found.values())


def milliseconds(function, rounds=30):
    """A call's time among many, one behind the other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


@pytest.mark.parametrize("kind", ["hopper bf16", "triton bf16", "hopper fp32"])
def test_what_unowned_rows_cost(kind, monkeypatch):
    """Printed: calls of 16 sequences of 1024 without and with 1024 rows that nobody owns, forward, and forward and
    backward. They may cost a tenth: they are no more than written once."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    x, sink, do, options = made(kind, 17 * 1024, 128, 16, 16)
    cu = ends((1024,) * 16)
    layout = tw.Varlen(cu, cu, 1024, 1024)
    owned = [t[: 16 * 1024] for t in x]
    both = (owned, do[: 16 * 1024]), (x, do)
    calls = {
        "forward": [lambda x=x: tw.attention(*x, mask=tw.Causal(), layout=layout, **options) for x, _ in both],
        "step": [lambda x=x, do=do: step(x, sink, do, layout, **options) for x, do in both],
    }
    for name, pair in calls.items():
        without, with_rows = (captured(function)[0].replay for function in pair)  # the GPU's time alone
        milliseconds(without, 5), milliseconds(with_rows, 5)
        rounds = [(milliseconds(without), milliseconds(with_rows)) for _ in range(7)]
        times = [sorted(column)[3] for column in zip(*rounds, strict=True)]
        print(
            f"{kind}, {name}: {times[0]:.4f} ms, with unowned rows {times[1]:.4f} ms, {times[1] / times[0]:.3f} times"
        )
        assert times[1] <= 1.1 * times[0]
