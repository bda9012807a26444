"""ring-flash-attn and yunchang beside tilewise.parallel, on the same processes: errors and bytes sent, as JSON.

Arguments: the client, the number of ranks, a file to meet at.
"""

import json
import os
import sys
from datetime import timedelta

import forked
import torch
import torch.distributed as dist

import tilewise as tw
import tilewise.parallel as tp
from tilewise.attention import reference
from tilewise.compat import install

install("flash_attn")
CLIENT, WORLD, MEET = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if CLIENT == "ring_flash_attn":
    import transformers.modeling_flash_attention_utils as utils

    if not hasattr(utils, "is_flash_attn_greater_or_equal_2_10"):  # newer transformers have it elsewhere
        utils.is_flash_attn_greater_or_equal_2_10 = lambda: True
    import ring_flash_attn as ring
else:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType
N, H, D = 512, 4, 32
SENT = [0]
send_all = dist.batch_isend_irecv


def counting(operations):
    SENT[0] += sum(one.tensor.numel() * one.tensor.element_size() for one in operations if one.op is dist.isend)
    return send_all(operations)


dist.batch_isend_irecv = counting  # peers send through it, or through all_to_all, which is counted below
swap = dist.all_to_all_single


def counting_swap(output, given, *arguments, **options):
    SENT[0] += given.numel() * given.element_size() * (WORLD - 1) // WORLD
    return swap(output, given, *arguments, **options)


dist.all_to_all_single = counting_swap
torch.manual_seed(0)
q, k, v, do = (torch.randn(1, N, H, D, dtype=torch.bfloat16) for _ in range(4))
EXACT = [t.double() for t in (q, k, v, do)]
O, _ = reference.attention(*EXACT[:3], mask=tw.Causal())
TRUE = (O, *reference.gradients(*EXACT, mask=tw.Causal())[:3])


def measured(name, call, sharding):
    """Relative RMS errors over all ranks of o, dq, dk and dv, and the bytes that this rank sent, as a line of JSON."""
    x = [sharding.shard(t).requires_grad_() for t in (q, k, v)]
    SENT[0] = 0
    o = call(*x)
    found = (o, *torch.autograd.grad(o, x, sharding.shard(do)))
    sent, errors = SENT[0], []
    for mine, true in zip(found, TRUE, strict=True):
        sums = torch.stack(
            [(mine.detach().double() - sharding.shard(true)).square().sum(), sharding.shard(true).square().sum()]
        )
        dist.all_reduce(sums)
        errors.append(float((sums[0] / sums[1]).sqrt()))
    return json.dumps({"name": name, "errors": errors, "bytes": sent}) + "\n"


def ours(plan, sharding):
    return lambda q, k, v: tp.attention(q, k, v, sharding=sharding, plan=plan, mask=tw.Causal())


def main(rank):
    options = {"rank": rank, "world_size": WORLD, "timeout": timedelta(minutes=4)}
    dist.init_process_group("gloo", init_method=f"file://{MEET}", **options)
    zigzag, contiguous = tp.Zigzag(dist.group.WORLD), tp.Contiguous(dist.group.WORLD)
    if CLIENT == "ring_flash_attn":
        lines = [
            measured("peer", lambda *x: ring.zigzag_ring_flash_attn_func(*x, causal=True), zigzag),
            measured("ours", ours("ring", zigzag), zigzag),
        ]
    else:
        attend = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)
        lines = [
            measured("peer", lambda *x: attend(*x, causal=True), contiguous),
            measured("ours", ours("ulysses", contiguous), contiguous),
        ]
    os.write(1, "".join(lines).encode())  # at once: the ranks share a pipe
    dist.barrier()  # or a rank would leave while another one still sends


sys.exit(forked.run(WORLD, main))
