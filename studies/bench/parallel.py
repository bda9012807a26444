"""Rates of tilewise.parallel on this machine's GPUs, against one GPU with its share of the work.

    python -m torch.distributed.run --standalone --nproc-per-node gpu \\
        -m studies.bench.parallel --results benchmarks/results

Each row: plan, sharding, mask, tokens, GPUs, milliseconds of forward and backward on the slowest rank, efficiency, and
peak bytes of memory. On one GPU it measures what fp32 parts cost beside 16-bit ones. Rounds of plan and baseline
alternate; medians count. It begins no case after --minutes, and keeps every row as soon as it is there. What misses a
bar, or holds more than the model says, is named at the end.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tilewise as tw
import tilewise.parallel as tp
from tilewise.parallel.costs import Sizes, cost

from .results import file_of

HEADS = ((32, 8), (64, 8))
D = 128
LENGTHS = tuple(1 << power for power in (16, 17, 18, 19))
DEVICE = "cuda"
MASKS = ("causal", "documents", "window")
ROUNDS, SECONDS = 5, 4.0
"""Rounds of a case, fewer if they would take longer than that."""
BARS = {
    "ulysses": (0.90, 0.95, 0.97, 0.98),
    "gather": (0.80, 0.88, 0.93, 0.96),
    "ring": (0.82, 0.90, 0.94, 0.97),
    "documents": (0.80, 0.80, 0.88, 0.88),
    "window": (0.85, 0.85, 0.85, 0.85),
}
"""Efficiencies to reach on 8 GPUs, by LENGTHS: of each plan with a causal mask, of the best plan with another."""
BYTES = 40
"""About what a rank holds of each number of q: q, do, o and dq in two types, and parts of both."""


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the time of one run on the current stream, that of the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    slowest(0.0)  # all ranks begin together
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return slowest(begin.elapsed_time(end))


def slowest(taken: float) -> float:
    """Return the largest number of all ranks, on each of them."""
    found = torch.tensor([taken], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def in_turns(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return medians of rounds in which each runs once, after one that sets how many there are."""
    for run in runs.values():
        run()
    first = sum(milliseconds(run) for run in runs.values())
    rounds = range(max(1, min(ROUNDS, int(SECONDS * 1e3 / first))))
    found = [{name: milliseconds(run) for name, run in runs.items()} for _ in rounds]
    return {name: statistics.median(times[name] for times in found) for name in runs}


def both_passes(call: Callable[..., Any], *x: torch.Tensor) -> Callable[[], Any]:
    """Return forward and backward of a call."""
    own = [t.detach().requires_grad_() for t in x]
    do = torch.randn_like(own[0])

    def run() -> None:
        torch.autograd.grad(call(*own), own, do)

    return run


def peak(run: Callable[[], Any], before: int) -> int:
    """Return the most bytes that are allocated in a run, beyond those before."""
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def mask_of(name: str, tokens: int) -> tw.Mask:
    """Return a mask by name; documents have log-normal lengths, at most a quarter of the sequence."""
    if name == "causal":
        return tw.Causal()
    if name == "window":
        return tw.Causal() & tw.Window(8191, 0)
    drawn = torch.randn(tokens // 512, generator=torch.Generator().manual_seed(0))
    ends = torch.exp(drawn * 1.5 + 8.0).long().clamp(64, tokens // 4).cumsum(0)
    ids = torch.bucketize(torch.arange(tokens), ends, right=True)[None].to(DEVICE)
    return tp.fixed(tw.Causal() & tw.Documents(ids, ids))


def rows(deadline: float, backend: str | None, masks: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Measure all cases of some masks, until the time has come."""
    P, group, room = dist.get_world_size(), dist.group.WORLD, torch.cuda.get_device_properties(0).total_memory
    for heads, tokens, name in product(HEADS, LENGTHS, masks):
        if BYTES * tokens // P * heads[0] * D > 0.9 * room:
            continue
        mask = mask_of(name, tokens)
        even = tp.Zigzag(group) if name == "causal" else tp.Contiguous(group)
        cases: list[tuple[str, tp.Sharding]] = [("ulysses", tp.Contiguous(group)), ("ring", even), ("gather", even)]
        cases += [("ring", tp.Balanced(group, mask, tokens, 1024))] if name == "documents" else []
        common = {"mask": name, "tokens": tokens, "heads": heads, "gpus": P}
        for plan, s in cases:
            if slowest(time.monotonic() - deadline) > 0:
                return
            yield common | of_plan(plan, s, mask, tokens, heads, backend)


def of_plan(
    plan: str, s: tp.Sharding, mask: tw.Mask, tokens: int, heads: tuple[int, int], backend: str | None
) -> dict[str, Any]:
    """Measure a plan beside one GPU with its share of the heads of the whole sequence."""
    counts = (heads[0], heads[1], heads[1])
    before = torch.cuda.memory_allocated()
    share = [random(tokens, max(1, count // s.ranks)) for count in counts]
    base = both_passes(lambda q, k, v: tw.attention(q, k, v, mask=mask, backend=backend), *share)
    held = peak(base, before)
    before = torch.cuda.memory_allocated()
    own = [random(len(s.positions(tokens)), count) for count in counts]
    call = both_passes(
        lambda q, k, v: tp.attention(q, k, v, sharding=s, plan=plan, mask=mask, backend=backend),  # type: ignore[arg-type]
        *own,
    )
    most = peak(call, before)
    times = in_turns({"plan": call, "base": base})
    return {
        "plan": plan,
        "sharding": type(s).__name__,
        "backend": backend,
        "milliseconds": times["plan"],
        "milliseconds_of_share": times["base"],
        "efficiency": times["base"] / times["plan"],
        "peak_bytes": slowest(most),
        "peak_bytes_of_share": held,
        "bytes_of_model": cost(plan, 1, Sizes(tokens, s.ranks, *heads, D)).memory,
    }


def random(rows: int, heads: int) -> torch.Tensor:
    """Return a bf16 operand of a batch of one."""
    return torch.randn(1, rows, heads, D, device=DEVICE, dtype=torch.bfloat16)


def parts() -> Iterator[dict[str, Any]]:
    """Measure on one GPU what parts in fp32, and their merge, cost beside a 16-bit call."""
    x = [random(8192, heads) for heads in (32, 8, 8)]
    pair = [tw.attention(*x, return_lse=True, out_dtype=torch.float32) for _ in range(2)]
    runs: dict[str, Callable[[], Any]] = {
        "16-bit": lambda: tw.attention(*x), "16-bit, triton": lambda: tw.attention(*x, backend="triton"),
        "fp32 parts": lambda: tw.attention(*x, out_dtype=torch.float32), "merge of two": lambda: tw.merge(pair),
        "merge of two, kernel": lambda: tw.merge(pair[:1], into=pair[1], backend="triton"),
    }  # fmt: skip
    if tw.explain(*x, out_dtype=torch.float32, backend="hopper").backend:
        runs["fp32 parts, hopper"] = lambda: tw.attention(*x, out_dtype=torch.float32, backend="hopper")
    for name, taken in in_turns(runs).items():
        yield {"plan": name, "tokens": 8192, "gpus": 1, "milliseconds": taken}


def below(rows: list[dict[str, Any]]) -> list[str]:
    """Return what misses its bar, of rows of 8 GPUs, and which ranks hold more than the model says."""
    best: dict[tuple[Any, ...], float] = {}
    missed = []
    for row in (row for row in rows if row["gpus"] > 1):
        name = row["plan"] if row["mask"] == "causal" else row["mask"]
        at = name, row["tokens"], tuple(row["heads"]), row["gpus"]
        best[at] = max(best.get(at, 0.0), row["efficiency"])
        if row["peak_bytes"] > row["peak_bytes_of_share"] + 1.01 * row["bytes_of_model"]:
            missed.append(
                f"{row['plan']} {at} holds {row['peak_bytes'] - row['peak_bytes_of_share']:.3g} bytes besides"
            )
    for (name, tokens, heads, gpus), found in best.items():
        if gpus == 8 and found < (bar := BARS[name][LENGTHS.index(tokens)]):
            missed.append(f"{name} {tokens} {heads}: {found:.3f} of ideal, below {bar}")
    return missed


def fitted(folder: Path) -> None:
    """Write for each file of rows the cluster whose modelled costs come closest, for TILEWISE_CLUSTER."""
    for path in sorted(folder.glob("*/parallel-x*.json")):
        rows = json.loads(path.read_text())
        if any(row["gpus"] > 1 for row in rows):
            to = path.with_name(path.name.replace("parallel-", "cluster-"))
            to.write_text(json.dumps(tp.fit(rows)._asdict(), indent=1) + "\n")
            print(f"{to}: {to.read_text()}")


def main() -> None:
    """Measure, and write the rows of the first rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--backend", help="the kernels of all calls; left out, tilewise chooses")
    parser.add_argument("--mask", choices=MASKS, help="measure this one alone; other rows of the file stay")
    parser.add_argument("--fit", action="store_true", help="measure nothing; fit the model to the rows of --results")
    given = parser.parse_args()
    if given.fit:
        fitted(given.results)
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    deadline = time.monotonic() + 60 * given.minutes
    path = file_of(given.results, torch.cuda.get_device_name(), f"parallel-x{dist.get_world_size()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    if given.mask and path.exists():
        found = [row for row in json.loads(path.read_text()) if row.get("mask") != given.mask]
    masks = (given.mask,) if given.mask else MASKS
    for row in rows(deadline, given.backend, masks) if dist.get_world_size() > 1 else parts():
        found.append(row)
        if dist.get_rank() == 0:
            path.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n")
            print(json.dumps(row), flush=True)
    if dist.get_rank() == 0:
        print("\n".join(below(found)) or "no bar is missed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
