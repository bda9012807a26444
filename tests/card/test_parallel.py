"""One sequence over this machine's GPUs by NCCL, and on one GPU what parts need: fp32 results, places and Spans."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilewise as tw
import tilewise.parallel as tp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="messages between GPUs and kernels need GPUs")

COUNTS = [count for count in (2, 4, 8) if count <= torch.cuda.device_count()]
B, N, H, H_K, D = 1, 4096, 8, 8, 128
PLANS = ("ulysses", "gather", "ring")


def masks(device):
    ids = (torch.arange(N, device=device) // 700)[None]
    return {
        "causal": tw.Causal(),
        "window": tw.Causal() & tw.Window(511, 0),
        "documents": tw.Causal() & tw.Documents(ids, ids),
    }


def operands(device, dtype=torch.bfloat16):
    g = torch.Generator(device).manual_seed(0)
    return [torch.randn(B, N, heads, D, device=device, dtype=dtype, generator=g) for heads in (H, H_K, H_K, H)]


def close(mine, theirs, what, bound=2e-2):
    mine, theirs = mine.detach().double(), theirs.detach().double()
    error = float((mine - theirs).abs().max() / theirs.abs().max())
    assert error <= bound, f"{what}: {error:.1e}"


def rank_main(rank, count, folder):
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
                mine, own_lse = tp.attention(*own, sharding=s, plan=plan, mask=mask, return_lse=True)
                found = torch.autograd.grad(mine, own, s.shard(do))
                close(mine, s.shard(o), f"{plan} {name} o")
                close(own_lse, s.shard(lse, 2), f"{plan} {name} lse", 1e-4)
                for grad, true in zip(found, s.shard(grads), strict=True):
                    close(grad, true, f"{plan} {name} gradient")
    s, (*x, _) = tp.Zigzag(dist.group.WORLD), operands(device)
    dropped = tw.attention(*x, mask=tw.Causal(), dropout=0.2, seed=5)
    for plan in PLANS:
        mine = tp.attention(*s.shard(x), sharding=s, plan=plan, mask=tw.Causal(), dropout=0.2, seed=5, backend="triton")
        close(mine, s.shard(dropped), f"{plan} dropout")
    dist.destroy_process_group()


@pytest.mark.parametrize("count", COUNTS or [pytest.param(2, marks=pytest.mark.skip(reason="it needs two GPUs"))])
def test_every_plan_on_several_gpus(count, tmp_path):
    mp.spawn(rank_main, (count, str(tmp_path)), nprocs=count)


@pytest.mark.parametrize("backend", [None, "triton"])
def test_results_in_fp32_are_those_before_they_were_rounded(backend):
    *x, do = operands("cuda")
    o, lse = tw.attention(*x, mask=tw.Causal(), return_lse=True, out_dtype=torch.float32, backend=backend)
    rounded = tw.attention(*x, mask=tw.Causal(), backend="triton")
    assert torch.equal(o.bfloat16(), rounded)
    delta = (do.float() * o).sum(-1).transpose(1, 2)
    given = {"mask": tw.Causal(), "delta": delta, "backend": "triton"}
    wide = tw.attention_backward(do, *x, o, lse, out_dtype=torch.float32, **given)
    for mine, theirs in zip(wide, tw.attention_backward(do, *x, rounded, lse, **given), strict=True):
        assert torch.equal(mine.bfloat16(), theirs)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_places_and_spans_are_those_of_the_whole(backend):
    *x, do = operands("cuda")
    if tw.explain(*x, backend=backend).backend is None:
        pytest.skip(f"{backend} does not run here")
    slopes = torch.linspace(0.01, 0.1, H, device="cuda")
    whole = tw.attention(*x, score=tw.Alibi(slopes), backend=backend)
    given = {"score": tw.Alibi(slopes), "return_lse": True, "backend": backend}
    ends = ((0, N // 2), (N // 2, N))
    halves = [tw.attention(x[0], *(t[:, a:b] for t in x[1:3]), place=tw.Origin(0, a), **given) for a, b in ends]
    close(tw.merge(halves)[0], whole, "alibi at a place")
    given = {"dropout": 0.2, "seed": 5, "backend": "triton"}
    dropped = tw.attention(*x, **given)
    close(
        tw.attention(*[t[:, :, 4:] for t in x[:3]], place=tw.Origin(head=4, heads=H), **given),
        dropped[:, :, 4:],
        "heads",
    )
    ids = (torch.arange(N, device="cuda") // 700)[None]
    spans = tw.Spans((ids * 700).int(), ((ids + 1) * 700).clamp(max=N).int())
    own = [t.clone().requires_grad_() for t in x]
    for mask in (spans, spans & tw.Causal()):
        listed = tw.Documents(ids, ids) & (tw.Causal() if mask is not spans else tw.Full())
        a, b = (tw.attention(*own, mask=m, backend=backend) for m in (mask, listed))
        close(a, b, "spans")
        for mine, theirs in zip(torch.autograd.grad(a, own, do), torch.autograd.grad(b, own, do), strict=True):
            close(mine, theirs, "gradients of spans")
