"""One sequence over this machine's GPUs by NCCL, and on one GPU what parts need: fp32 results, places and Spans."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilewise as tw
import tilewise.parallel as tp
from tilewise.parallel.shards import READING

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="messages between GPUs and kernels need GPUs")

COUNTS = [count for count in (2, 4, 8) if count <= torch.cuda.device_count()]
B, N, H, H_K, D = 1, 4096, 8, 8, 128
PLANS = ("ulysses", "gather", "ring", "halo")


def masks(device):
    ids = (torch.arange(N, device=device) // 700)[None]
    return {
        "causal": tw.Causal(),
        "window": tw.Causal() & tw.Window(511, 0),
        "documents": tw.Causal() & tw.Documents(ids, ids),
        "fixed documents": tp.fixed(tw.Causal() & tw.Documents(ids, ids)),
    }


def operands(device, dtype=torch.bfloat16):
    g = torch.Generator(device).manual_seed(0)
    return [torch.randn(B, N, heads, D, device=device, dtype=dtype, generator=g) for heads in (H, H_K, H_K, H)]


def close(mine, theirs, what, bound=2e-2):
    mine, theirs = mine.detach().double(), theirs.detach().double()
    error = float((mine - theirs).abs().max() / theirs.abs().max())
    assert error <= bound, f"{what}: {error:.1e}"


def rank_main(rank, count, folder, backend):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    for name, mask in masks(device).items():
        *x, do = operands(device)
        whole = [t.clone().requires_grad_() for t in x]
        o, lse = tw.attention(*whole, mask=mask, return_lse=True)
        grads = torch.autograd.grad(o, whole, do)
        for plan in PLANS:
            for s in (tp.Zigzag(dist.group.WORLD), tp.Contiguous(dist.group.WORLD)):
                own = [t.requires_grad_() for t in s.shard(x)]
                mine, own_lse = tp.attention(*own, sharding=s, plan=plan, mask=mask, return_lse=True, backend=backend)
                found = torch.autograd.grad(mine, own, s.shard(do))
                close(mine, s.shard(o), f"{plan} {name} o")
                close(own_lse, s.shard(lse, 2), f"{plan} {name} lse", 1e-4)
                for grad, true in zip(found, s.shard(grads), strict=True):
                    close(grad, true, f"{plan} {name} gradient")
    s, (*x, _) = tp.Zigzag(dist.group.WORLD), operands(device)
    dropped = tw.attention(*x, mask=tw.Causal(), dropout=0.2, seed=5)
    for plan in PLANS:
        given = {"dropout": 0.2, "seed": 5, "backend": backend or "triton"}
        mine = tp.attention(*s.shard(x), sharding=s, plan=plan, mask=tw.Causal(), **given)
        close(mine, s.shard(dropped), f"{plan} dropout")
        ids = (torch.arange(N, device=device) // (700 + rank))[None]
        for other in (tw.Window(300 + rank, 0), tw.Documents(ids, ids) if plan in READING else tw.Window(1, rank)):
            with pytest.raises(ValueError, match="must be alike on every rank"):
                tp.attention(*s.shard(x), sharding=s, plan=plan, mask=other)
        with pytest.raises(TypeError if rank else ValueError, match=r"scale must be|possible on every rank"):
            tp.attention(*s.shard(x), sharding=s, plan=plan, scale="large" if rank else None)
        again = tp.attention(*s.shard(x), sharding=s, plan=plan, mask=tw.Causal(), **given)
        assert torch.equal(again, mine), f"{plan} after errors"
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "hopper"])
@pytest.mark.parametrize("count", COUNTS or [pytest.param(2, marks=pytest.mark.skip(reason="it needs two GPUs"))])
def test_every_plan_on_several_gpus(count, backend, tmp_path):
    if backend and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are written for sm_90")
    mp.spawn(rank_main, (count, str(tmp_path), backend), nprocs=count)


SIZES = [(64, 64), (128, 128), (256, 256), (96, 72)]
"""Head sizes: the rows of the table, and two whose rows are longer in shared memory than in memory."""


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_results_in_fp32_are_those_before_they_were_rounded(backend, sizes, varlen):
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(heads, size) for heads, size in zip((4, 2, 2, 4), (sizes[0], *sizes, sizes[1]), strict=True)]
    rows = (700,) if varlen else (2, 700)
    q, k, v, do = (torch.randn(*rows, *shape, device="cuda", generator=g).bfloat16() for shape in shapes)
    given = {"mask": tw.Causal(), "backend": backend}
    if varlen:
        ends = torch.tensor([0, 130, 131, 650], dtype=torch.int32, device="cuda")
        given["layout"] = tw.Varlen(ends, ends, 519, 519)
    if tw.explain(q, k, v, out_dtype=torch.float32, **given).backend is None:
        pytest.skip(f"{backend} does not run here")
    o, lse = tw.attention(q, k, v, return_lse=True, out_dtype=torch.float32, **given)
    rounded, same = tw.attention(q, k, v, return_lse=True, **given)
    assert o.dtype == torch.float32
    assert torch.equal(o.bfloat16(), rounded)
    assert torch.equal(lse, same)
    delta = (do.float() * o).sum(-1).transpose(-1, -2)
    wide = tw.attention_backward(do, q, k, v, o, lse, delta=delta, out_dtype=torch.float32, **given)
    narrow = tw.attention_backward(do, q, k, v, rounded, lse, delta=delta, **given)
    assert [t.dtype for t in wide] == [torch.float32] * 3
    close(wide[0], narrow[0], "dq", 1e-2)  # Hopper adds up dQ in any order
    for mine, theirs in zip(wide[1:], narrow[1:], strict=True):
        assert torch.equal(mine.bfloat16(), theirs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_merges_parts_as_torch_does(dtype, packed):
    g = torch.Generator("cuda").manual_seed(0)
    rows, of_lse = ((5000, 4, 96), (4, 5000)) if packed else ((2, 2500, 4, 96), (2, 4, 2500))
    parts = [
        (torch.randn(rows, device="cuda", generator=g).to(dtype), 4 * torch.randn(of_lse, device="cuda", generator=g))
        for _ in range(3)
    ]
    for n, (_, lse) in enumerate(parts):
        lse[..., n::7] = -torch.inf
        lse[..., -1] = -torch.inf
    sums = torch.zeros(rows, device="cuda"), torch.full(of_lse, -torch.inf, device="cuda")
    for part in parts:
        tw.merge([part], into=sums, backend="triton")
    true = tw.merge([(o.double(), lse.double()) for o, lse in parts])
    for found, exact in zip(sums, true, strict=True):
        assert torch.equal(found.isinf(), exact.isinf())
        close(found.nan_to_num(0, 0, 0), exact.nan_to_num(0, 0, 0), "sums", 1e-5)
    close(tw.merge(parts, backend="triton")[0], true[0], "at once", 1e-2)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_places_and_spans_are_those_of_the_whole(backend):
    *x, do = operands("cuda")
    if tw.explain(*x, backend=backend).backend is None:
        pytest.skip(f"{backend} does not run here")
    slopes = torch.linspace(0.01, 0.1, H, device="cuda")
    whole = tw.attention(*x, score=tw.Alibi(slopes), backend=backend)
    given = {"score": tw.Alibi(slopes), "return_lse": True, "backend": backend}
    ends = ((0, N // 2), (N // 2, N))
    halves = [tw.attention(x[0], *(t[:, a:b] for t in x[1:3]), origin=tw.Origin(0, a), **given) for a, b in ends]
    close(tw.merge(halves)[0], whole, "alibi at a place")
    given = {"dropout": 0.2, "seed": 5, "backend": backend}
    whole = [t.clone().requires_grad_() for t in x]
    dropped = tw.attention(*whole, **given)
    heads = [t[:, :, 4:].detach().requires_grad_() for t in whole]
    mine = tw.attention(*heads, origin=tw.Origin(head=4, heads=H), **given)
    close(mine, dropped[:, :, 4:], "heads")
    true = torch.autograd.grad(dropped, whole, do)
    for grad, of_all in zip(torch.autograd.grad(mine, heads, do[:, :, 4:]), true, strict=True):
        close(grad, of_all[:, :, 4:], "gradients of heads")
    for a, b in ends:  # rows; their keys are all, so that nothing is merged
        rows = x[0][:, a:b].clone().requires_grad_()
        mine = tw.attention(rows, *x[1:3], origin=tw.Origin(row=a), **given)
        close(mine, dropped[:, a:b], "rows")
        close(*torch.autograd.grad(mine, rows, do[:, a:b]), true[0][:, a:b], "dq of rows")
    dropped_halves = [
        tw.attention(x[0], *(t[:, a:b] for t in x[1:3]), origin=tw.Origin(0, a), return_lse=True, **given)
        for a, b in ends
    ]
    close(tw.merge(dropped_halves)[0], dropped, "keys")
    ids = (torch.arange(N, device="cuda") // 700)[None]
    spans = tw.Spans((ids * 700).int(), ((ids + 1) * 700).clamp(max=N).int())
    own = [t.clone().requires_grad_() for t in x]
    for mask in (spans, spans & tw.Causal()):
        listed = tw.Documents(ids, ids) & (tw.Causal() if mask is not spans else tw.Full())
        a, b = (tw.attention(*own, mask=m, backend=backend) for m in (mask, listed))
        close(a, b, "spans")
        for mine, theirs in zip(torch.autograd.grad(a, own, do), torch.autograd.grad(b, own, do), strict=True):
            close(mine, theirs, "gradients of spans")
