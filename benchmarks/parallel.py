"""Rates of tilewise.parallel on this machine's GPUs, against one GPU with its share of the work.

    python -m torch.distributed.run --standalone --nproc-per-node gpu benchmarks/parallel.py --results benchmarks/seen

Each row: plan, sharding, mask, tokens, GPUs, milliseconds of forward and backward, efficiency, bytes of peak memory. On
one GPU it measures what fp32 parts cost beside 16-bit ones. Rounds of plan and baseline alternate; medians count.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tilewise as tw
import tilewise.parallel as tp

HEADS = ((32, 8), (64, 8))
D = 128
LENGTHS = tuple(1 << power for power in (16, 17, 18, 19))
ROUNDS = 5


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the time of one run on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def in_turns(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return medians of rounds in which each runs once, after one round that does not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for count in range(ROUNDS + 1):
        for name, run in runs.items():
            taken = milliseconds(run)
            if count:
                found[name].append(taken)
    return {name: statistics.median(times) for name, times in found.items()}


def both_passes(call: Callable[..., Any], *x: torch.Tensor) -> Callable[[], Any]:
    """Return forward and backward of a call."""
    own = [t.detach().requires_grad_() for t in x]
    do = torch.randn_like(own[0])

    def run() -> Any:
        return torch.autograd.grad(call(*own), own, do)

    return run


def packed_documents(tokens: int, device: torch.device) -> tw.Mask:
    """Return documents of log-normal lengths, at most a quarter of the sequence."""
    drawn = torch.randn(tokens // 512, generator=torch.Generator().manual_seed(0))
    ends = torch.exp(drawn * 1.5 + 8.0).long().clamp(64, tokens // 4).cumsum(0)
    ids = torch.bucketize(torch.arange(tokens), ends, right=True)[None].to(device)
    return tw.Causal() & tw.Documents(ids, ids)


def rows(device: torch.device) -> list[dict[str, Any]]:
    """Measure all cases."""
    found = []
    for tokens in LENGTHS:
        masks = {
            "causal": tw.Causal(),
            "window": tw.Causal() & tw.Window(8191, 0),
            "documents": packed_documents(tokens, device),
        }
        for name, mask in masks.items():
            for heads in HEADS:
                told = {"mask": name, "tokens": tokens, "heads": heads, "gpus": dist.get_world_size()}
                found += [told | row for row in of_mask(name, mask, tokens, heads, device)]
    return found


def of_mask(
    name: str, mask: tw.Mask, tokens: int, heads: tuple[int, int], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Measure the plans of one mask, length and number of heads."""
    P, group = dist.get_world_size(), dist.group.WORLD
    even = tp.Zigzag(group) if name == "causal" else tp.Contiguous(group)
    cases: list[tuple[str, tp.Sharding]] = [("ulysses", tp.Contiguous(group)), ("gather", even), ("ring", even)]
    cases += [("ring", tp.Balanced(group, mask, tokens, 1024))] if name == "documents" else []
    H, H_k = heads
    share = [random(tokens, max(1, count // P), device) for count in (H, H_k, H_k)]
    base = both_passes(lambda q, k, v: tw.attention(q, k, v, mask=mask), *share)
    for plan, s in cases:
        own = [random(len(s.positions(tokens)), count, device) for count in (H, H_k, H_k)]

        def call(q: Any, k: Any, v: Any, s: Any = s, plan: Any = plan) -> Any:
            return tp.attention(q, k, v, sharding=s, plan=plan, mask=mask)

        torch.cuda.reset_peak_memory_stats()
        times = in_turns({"plan": both_passes(call, *own), "base": base})
        yield {
            "plan": plan,
            "sharding": type(s).__name__,
            "milliseconds": times["plan"],
            "efficiency": times["base"] / times["plan"],
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }


def random(rows: int, heads: int, device: torch.device) -> torch.Tensor:
    """Return a bf16 operand of a batch of one."""
    return torch.randn(1, rows, heads, D, device=device, dtype=torch.bfloat16)


def parts(device: torch.device) -> list[dict[str, Any]]:
    """Measure on one GPU what parts in fp32, and their merge, cost beside a 16-bit call."""
    x = [torch.randn(1, 8192, heads, D, device=device, dtype=torch.bfloat16) for heads in (32, 8, 8)]
    pair = [tw.attention(*x, return_lse=True, out_dtype=torch.float32) for _ in range(2)]
    times = in_turns({
        "16-bit": lambda: tw.attention(*x), "16-bit, triton": lambda: tw.attention(*x, backend="triton"),
        "fp32 parts": lambda: tw.attention(*x, out_dtype=torch.float32), "merge of two": lambda: tw.merge(pair),
    })  # fmt: skip
    return [{"plan": name, "tokens": 8192, "gpus": 1, "milliseconds": taken} for name, taken in times.items()]


def main() -> None:
    """Measure, and write the rows of the first rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=Path("benchmarks/seen"))
    given = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    measured = rows(device) if dist.get_world_size() > 1 else parts(device)
    if dist.get_rank() == 0:
        card = torch.cuda.get_device_name().lower().replace(" ", "-")
        given.results.mkdir(parents=True, exist_ok=True)
        path = given.results / f"parallel-{card}-x{dist.get_world_size()}.json"
        path.write_text("[\n" + ",\n".join(json.dumps(row) for row in measured) + "\n]\n")
        print(f"{len(measured)} rows in {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
