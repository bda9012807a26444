"""Rates of tilewise.parallel on this machine's GPUs, against one GPU with its share of the work.

    python -m torch.distributed.run --standalone --nproc-per-node gpu \\
        -m studies.bench.parallel --results benchmarks/results
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m studies.bench.parallel --quick   # on a CPU

Each row: plan, sharding, mask, tokens, GPUs, milliseconds of forward and backward on the slowest rank, efficiency, and
peak bytes of memory; and whether plan=None has this plan there. On one GPU it measures what fp32 parts cost beside
16-bit ones. Rounds of plan and baseline alternate; medians count. It begins no case after --minutes, and keeps every
row as soon as it is there. At the end it says which bars hold, and which ranks hold more than the model says. --quick
rehearses all of it with gloo and short sequences, and keeps nothing.
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
from tilewise.parallel.plans import NAMES

from .results import file_of

QUERY_HEADS, KEY_HEADS, D = (32, 64), 8, 128
LENGTHS = tuple(1 << power for power in (16, 17, 18, 19))
WINDOW = 8192
MASKS = ("causal", "documents", "window")
ROUNDS, SECONDS = 5, 4.0
"""Rounds of a case, fewer if they would take longer than that."""
BARS = {
    (4, "causal"): (0.95, 0.95, 0.95, 0.95),
    (4, "window"): (0.92, 0.92, 0.92, 0.92),
    (4, "documents"): (0.92, 0.92, 0.92, 0.92),
    (8, "causal"): (0.90, 0.95, 0.97, 0.98),
    (8, "window"): (0.90, 0.90, 0.90, 0.90),
    (8, "documents"): (0.90, 0.90, 0.90, 0.90),
    (8, "causal, gather"): (0.80, 0.88, 0.93, 0.96),
    (8, "causal, ring"): (0.82, 0.90, 0.94, 0.97),
}
"""Efficiencies to reach by GPUs and LENGTHS: of the best plan with a mask, or of the plan named beside it."""
DEFAULT = 0.97
"""Of the best plan's speed, what plan=None is to have on the same sharding."""
BYTES = 40
"""About what a rank holds of each number of q: q, do, o and dq in two types, and parts of both."""


def device() -> torch.device:
    """Return this rank's, a GPU with NCCL."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the time of one run on the current stream, that of the slowest rank."""
    if device().type == "cpu":
        slowest(0.0)
        start = time.perf_counter()
        run()
        return slowest(1e3 * (time.perf_counter() - start))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    slowest(0.0)  # all ranks begin together
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return slowest(begin.elapsed_time(end))


def slowest(taken: float) -> float:
    """Return the largest number of all ranks, on each of them."""
    found = torch.tensor([taken], dtype=torch.float64, device=device())
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


def allocated() -> int:
    """Return the bytes that are allocated on a GPU; 0 on a CPU, which counts none."""
    return torch.cuda.memory_allocated() if device().type == "cuda" else 0


def peak(run: Callable[[], Any], before: int) -> int:
    """Return the most bytes that are allocated in a run, beyond those before."""
    if device().type == "cpu":
        run()
        return 0
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def mask_of(name: str, tokens: int) -> tw.Mask:
    """Return a mask by name; documents have log-normal lengths, at most a quarter of the sequence."""
    if name == "causal":
        return tw.Causal()
    if name == "window":
        return tw.Causal() & tw.Window(WINDOW - 1, 0)
    drawn = torch.randn(tokens // 512, generator=torch.Generator().manual_seed(0))
    ends = torch.exp(drawn * 1.5 + 8.0).long().clamp(64, tokens // 4).cumsum(0)
    ids = torch.bucketize(torch.arange(tokens), ends, right=True)[None].to(device())
    return tp.fixed(tw.Causal() & tw.Documents(ids, ids))


def balanced(group: Any, mask: tw.Mask, tokens: int) -> tp.Balanced:
    """Return the sharding that deals out packed documents, in chunks of at most 1024 tokens."""
    return tp.Balanced(group, mask, tokens, max(1, min(1024, tokens // 64)))


def rows(
    deadline: float, backend: str | None, masks: tuple[str, ...], tokens: tuple[int, ...], heads: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Measure all cases of some masks, lengths and numbers of query heads, until the time has come."""
    P, group = dist.get_world_size(), dist.group.WORLD
    room = torch.cuda.get_device_properties(0).total_memory if device().type == "cuda" else float("inf")
    for H, N, name in product(heads, tokens, masks):
        if BYTES * N // P * H * D > 0.9 * room:
            continue
        mask = mask_of(name, N)
        dealt = balanced(group, mask, N) if name == "documents" else tp.Zigzag(group)
        first, second = (dealt, tp.Contiguous(group)) if name == "causal" else (tp.Contiguous(group), dealt)
        cases: list[tuple[str, tp.Sharding]] = [(plan, first) for plan in NAMES]
        cases += {"causal": [("ulysses", second)], "documents": [("ring", second), ("halo", second)]}.get(name, [])
        common = {"mask": name, "tokens": N, "heads": (H, KEY_HEADS), "gpus": P}
        for plan, s in cases:
            if slowest(time.monotonic() - deadline) > 0:
                return
            yield common | of_plan(plan, s, mask, N, (H, KEY_HEADS), backend)


def of_plan(
    plan: str, s: tp.Sharding, mask: tw.Mask, tokens: int, heads: tuple[int, int], backend: str | None
) -> dict[str, Any]:
    """Measure a plan beside one GPU with its share of the heads of the whole sequence."""
    counts = (heads[0], heads[1], heads[1])
    before = allocated()
    share = [random(tokens, max(1, count // s.ranks)) for count in counts]
    base = both_passes(lambda q, k, v: tw.attention(q, k, v, mask=mask, backend=backend), *share)
    held = peak(base, before)
    before = allocated()
    own = [random(len(s.positions(tokens)), count) for count in counts]
    call = both_passes(
        lambda q, k, v: tp.attention(q, k, v, sharding=s, plan=plan, mask=mask, backend=backend),  # type: ignore[arg-type]
        *own,
    )
    most = peak(call, before)
    times = in_turns({"plan": call, "base": base})
    explained = tp.explain(*own, sharding=s, mask=mask, backend=backend)  # type: ignore[arg-type]
    return {
        "plan": plan,
        "by_default": explained.plan == plan,
        "sharding": type(s).__name__,
        "backend": backend,
        "milliseconds": times["plan"],
        "milliseconds_of_share": times["base"],
        "efficiency": times["base"] / times["plan"],
        "peak_bytes": slowest(most),
        "peak_bytes_of_share": held,
        "bytes_of_model": explained.costs[plan].memory,
    }


def random(rows: int, heads: int) -> torch.Tensor:
    """Return a bf16 operand of a batch of one."""
    return torch.randn(1, rows, heads, D, device=device(), dtype=torch.bfloat16)


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


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each bar, "held" or "missed", and for each row whose ranks hold more than the model says."""
    several = [row for row in rows if row["gpus"] > 1]
    lines = [line for plan in (None, *NAMES) for line in _of_bars(several, plan)]
    lines += _of_defaults([row for row in several if "by_default" in row])
    for row in several:
        besides, model = row["peak_bytes"] - row["peak_bytes_of_share"], row["bytes_of_model"]
        if besides > 1.01 * model:
            lines.append(f"missed  {row['plan']} holds {besides:.3g} bytes besides, the model says {model:.3g}: {row}")
    return lines


def _of_bars(rows: list[dict[str, Any]], plan: str | None) -> Iterator[str]:
    """Yield a line for each bar of a plan, or of the best one if that is None."""
    for (mask, gpus, tokens, heads), some in alike(rows, "mask", "gpus", "tokens", "heads").items():
        best = max((row for row in some if plan in (None, row["plan"])), key=efficiency, default=None)
        bars = BARS.get((gpus, f"{mask}, {plan}" if plan else mask))
        if best and bars and tokens in LENGTHS:
            bar = bars[LENGTHS.index(tokens)]
            what = f"{mask} {tokens} {heads} on {gpus}: {best['plan']} has {efficiency(best):.3f} of ideal"
            yield verdict(f"{what}, the bar is {bar}", efficiency(best) >= bar)


def _of_defaults(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each sharding of a case: whether plan=None, if measured, has one as fast as the best."""
    for (mask, sharding, gpus, *at), some in alike(rows, "mask", "sharding", "gpus", "tokens", "heads").items():
        best = max(some, key=efficiency)
        for chosen in (row for row in some if row["by_default"]):
            share, case = (
                efficiency(chosen) / efficiency(best),
                f"{mask} {' '.join(map(str, at))} on {gpus}, {sharding}",
            )
            what = f"{case}: plan=None has {chosen['plan']}, {share:.3f} of the best, {best['plan']}"
            yield verdict(f"{what}, the bar is {DEFAULT}", share >= DEFAULT)


def alike(rows: list[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return the rows by what they have of some names."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        at = tuple(tuple(row[name]) if name == "heads" else row[name] for name in names)
        found.setdefault(at, []).append(row)
    return found


def efficiency(row: dict[str, Any]) -> float:
    """Return the share of ideal speed."""
    return row["efficiency"]


def verdict(what: str, holds: bool) -> str:
    """Return a line of the table."""
    return f"{'held' if holds else 'missed':<8}{what}"


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
    parser.add_argument("--mask", choices=MASKS, help="measure this one alone; all")
    parser.add_argument("--tokens", type=int, nargs="+", choices=[n >> 10 for n in LENGTHS], help="in thousands; all")
    parser.add_argument("--heads", type=int, nargs="+", choices=QUERY_HEADS, help="of queries, over 8 of keys; all")
    parser.add_argument("--fit", action="store_true", help="measure nothing; fit the model to the rows of --results")
    parser.add_argument("--quick", action="store_true", help="rehearse on a CPU with gloo; keep nothing")
    given = parser.parse_args()
    if given.fit:
        fitted(given.results)
        return
    if given.quick:
        rehearse()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if given.quick else "nccl")
    deadline = time.monotonic() + 60 * given.minutes
    tokens = tuple(n << 10 for n in given.tokens) if given.tokens else LENGTHS
    heads, masks = tuple(given.heads or QUERY_HEADS), (given.mask,) if given.mask else MASKS
    path, found = None, []
    if not given.quick:
        path = file_of(given.results, torch.cuda.get_device_name(), f"parallel-x{dist.get_world_size()}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        found = others(path, masks, tokens, heads)
    for row in rows(deadline, given.backend, masks, tokens, heads) if dist.get_world_size() > 1 else parts():
        found.append(row)
        if dist.get_rank() == 0:
            if path:
                path.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n")
            print(json.dumps(row), flush=True)
    if dist.get_rank() == 0:
        print("\n".join(verdicts(found)))
    dist.destroy_process_group()


def others(path: Path, masks: tuple[str, ...], tokens: tuple[int, ...], heads: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the rows of a file that are not measured now; none where all are, or on one GPU."""
    kept = json.loads(path.read_text()) if path.exists() and dist.get_world_size() > 1 else []
    now = set(product(masks, tokens, heads))
    return [row for row in kept if (row["mask"], row["tokens"], row["heads"][0]) not in now]


def rehearse() -> None:
    """Make all sizes those of a CPU."""
    sizes = {"QUERY_HEADS": (4,), "KEY_HEADS": 2, "D": 16, "LENGTHS": (1 << 10, 1 << 11), "WINDOW": 128, "ROUNDS": 1}
    globals().update(sizes)


if __name__ == "__main__":
    main()
