"""ring-flash-attn and yunchang on two processes: as one device. Arguments: the client, a file to meet at."""

import sys

import torch
import torch.distributed as dist

from tilewise.compat import install

install("flash_attn")
CLIENT, MEET = sys.argv[1:]
WORLD = 2

import flash_attn  # noqa: E402

from tests.parallel import forked  # noqa: E402

if CLIENT == "ring_flash_attn":
    import transformers.modeling_flash_attention_utils as utils

    if not hasattr(utils, "is_flash_attn_greater_or_equal_2_10"):  # newer transformers have it elsewhere
        utils.is_flash_attn_greater_or_equal_2_10 = lambda: True
    import ring_flash_attn as ring
else:
    from yunchang import LongContextAttention, UlyssesAttention, ring, set_seq_parallel_pg
    from yunchang.kernels import AttnType

torch.manual_seed(0)
q, k, v, do = (torch.randn(1, 64, 4, 16, dtype=torch.bfloat16) for _ in range(4))
STRIPED = torch.arange(64).view(-1, WORLD).T.flatten()
ZIGZAG = torch.cat([c for r in range(WORLD) for c in (torch.arange(64).chunk(4)[r], torch.arange(64).chunk(4)[3 - r])])


def check(name, call, order=None, dim=1, **options):
    """Compare this rank's rows, where the sequence was put in `order` and cut into as many parts as there are ranks."""
    order = torch.arange(64) if order is None else order

    def mine(t):
        return t.index_select(dim, order).chunk(WORLD, dim)[dist.get_rank()]

    whole = [t.squeeze(0) if dim == 0 else t for t in (q, k, v, do)]
    x = [mine(t).clone().requires_grad_() for t in whole[:3]]
    out = call(*x, causal=True, **options)
    grads = torch.autograd.grad(out, x, mine(whole[3]))
    truth = {}
    for kind in (torch.float64, torch.bfloat16):
        one = [t.to(kind).requires_grad_() for t in (q, k, v)]
        o = flash_attn.flash_attn_func(*one, causal=True)
        both = [o, *torch.autograd.grad(o, one, do.to(kind))]
        truth[kind] = [mine(t.squeeze(0) if dim == 0 else t) for t in both]
    for got, single, true in zip((out, *grads), truth[torch.bfloat16], truth[torch.float64], strict=True):
        error, allowed = (got - true).abs().max().item(), 2 * (single - true).abs().max().item() + 2**-8
        assert error <= allowed, (name, dist.get_rank(), error, allowed)
    print(name)


def run_ring_flash_attn(rank):
    check("ring", ring.ring_flash_attn_func)
    check("zigzag", ring.zigzag_ring_flash_attn_func, ZIGZAG)
    check("stripe", ring.stripe_flash_attn_func, STRIPED)
    cu = torch.tensor([0, 64], dtype=torch.int32)
    local = cu // WORLD
    check("ring varlen", ring.ring_flash_attn_varlen_func, dim=0, cu_seqlens=local, max_seqlen=32)
    check("zigzag varlen", ring.zigzag_ring_flash_attn_varlen_func, ZIGZAG, 0, cu_seqlens=local, max_seqlen=32)
    cu_q, cu_k, max_q, max_k, rows = ring.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, WORLD)
    llama3 = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    llama3 |= {"heads_k_stride": 1, "local_k_slice": rows}
    check("llama3", ring.llama3_flash_attn_varlen_func, dim=0, **llama3)


def run_yunchang(rank):
    check("ring", ring.ring_flash_attn_func, attn_type=AttnType.FA)
    check("zigzag", ring.zigzag_ring_flash_attn_func, ZIGZAG, attn_type=AttnType.FA)
    check("stripe", ring.stripe_flash_attn_func, STRIPED, attn_type=AttnType.FA)
    set_seq_parallel_pg(1, WORLD, rank, WORLD)
    check("ring by LongContextAttention", LongContextAttention(ring_impl_type="basic", attn_type=AttnType.FA))
    check("Ulysses", UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA))


def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{MEET}", rank=rank, world_size=WORLD)
    {"ring_flash_attn": run_ring_flash_attn, "yunchang": run_yunchang}[CLIENT](rank)
    dist.barrier()  # or a rank would leave while the other one still receives


sys.exit(forked.run(WORLD, main))
