"""Short calls, where the host's time counts: python -m studies.bench.eager --results benchmarks/results

Every row is one call of a model or a variant, by tilewise and by each of SDPA's kernels. `eager` is the time of a call
in a loop that makes call after call: the host's or the device's, whichever is longer. `graph` is the device's alone,
replayed from a CUDA graph. `host` is what the calling thread spends on a call so small that the device never falls
behind. Contenders run in turns, medians count, of the host the least. A bar is a ratio to the fastest SDPA: above 1
means that tilewise takes less time. Without a GPU there is a rehearsal: --quick --device cpu.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw

from . import results
from .engine import excuse

ROUNDS, CALLS, REPEATS, WARM = 5, 50, 10, 0.02
KERNELS = {
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Call = Callable[[], Any]


class Size(NamedTuple):
    """Self-attention: q (B, N, H, D), k and v (B, N, H_k, D)."""

    B: int
    N: int
    H: int
    D: int = 64
    causal: bool = False
    H_k: int = 0


MODELS = {
    "ViT-B 197": Size(64, 197, 12),
    "BERT 128": Size(64, 128, 12),
    "BERT 512": Size(16, 512, 12),
    "Swin 49, without its bias": Size(2048, 49, 4, 32),
    "32 tokens, causal": Size(1024, 32, 16, 64, causal=True),
    "CLIP text 77": Size(128, 77, 8, causal=True),
    "GPT-2 1k": Size(8, 1024, 12, causal=True),
    "16k tokens, D 64, full 512": Size(32, 512, 32),
    "16k tokens, D 64, causal 1k": Size(16, 1024, 32, causal=True),
    "16k tokens, D 128, full 2k": Size(8, 2048, 16, 128),
    "16k tokens, D 256, causal 512": Size(32, 512, 8, 256, causal=True),
    "GQA 4, D 128, causal 1k": Size(4, 1024, 32, 128, causal=True, H_k=8),
}
SMALL = Size(1, 128, 16, 128, causal=True)
"""A call that costs the device next to nothing."""
BARS = {
    ("eager", "forward"): 1.0, ("eager", "backward"): 1.1, ("graph", "forward"): 1.0, ("graph", "backward"): 1.0,
    ("host", "forward"): 1 / 0.75, ("host", "forward, learning"): 1 / 0.75, ("host", "step"): 1 / 0.9,
}  # fmt: skip
"""The least ratios of SDPA's time to ours that we want."""
MOST = {"window, softcap, sink": 35.0, "Cached, one query": 20.0, "append_": 20.0}
"""Microseconds of the host in a call that SDPA cannot make."""


def operands(size: Size, device: str, learn: bool) -> list[Tensor]:
    """Return random q, k and v in bf16."""
    heads = size.H, *(size.H_k or size.H,) * 2
    shapes = [(size.B, size.N, H, size.D) for H in heads]
    return [torch.randn(s, dtype=torch.bfloat16, device=device, requires_grad=learn) for s in shapes]


def attends(size: Size, device: str) -> dict[str, Callable[..., Tensor]]:
    """Return tilewise's call and SDPA's, of q, k, v (B, N, H, D)."""
    mask = tw.Causal() if size.causal else tw.Full()

    def sdpa(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads: Any = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(*heads, is_causal=size.causal, enable_gqa=size.H_k > 0).transpose(1, 2)

    kernels = KERNELS if device == "cuda" else {"sdpa": SDPBackend.FLASH_ATTENTION}
    ours = {"tilewise": None, "tilewise triton": "triton"} if device == "cuda" else {"tilewise": None}
    return {name: partial(tw.attention, mask=mask, backend=backend) for name, backend in ours.items()} | {
        name: partial(sdpa, kernel) for name, kernel in kernels.items()
    }


def passes(attend: Callable[..., Tensor], size: Size, device: str) -> dict[str, Call]:
    """Return the calls that are timed."""
    x, learning = operands(size, device, False), operands(size, device, True)
    do = torch.randn_like(x[0])
    o = attend(*learning)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*x)

    return {
        "forward": forward,
        "forward, learning": lambda: attend(*learning),
        "backward": lambda: torch.autograd.grad(o, learning, do, retain_graph=True),
        "step": lambda: torch.autograd.grad(attend(*learning), learning, do),
    }


def variants(device: str) -> dict[str, Call]:
    """Return small calls, for the host's time alone."""
    q, k, v = operands(SMALL, device, False)
    slopes, sink = torch.rand(SMALL.H, device=device), torch.randn(SMALL.H, device=device)
    learning, do = operands(SMALL, device, True), torch.randn_like(q)
    grouped = operands(SMALL._replace(H_k=4), device, True)
    learned = sink.clone().requires_grad_()
    cache = torch.randn(2, 1024, 8, 128, dtype=torch.bfloat16, device=device)
    one = torch.randn(2, 1, 32, 128, dtype=torch.bfloat16, device=device)
    new = torch.randn(2, 1, 8, 128, dtype=torch.bfloat16, device=device)
    layout = tw.Cached(torch.full((2,), 1000, dtype=torch.int32, device=device))
    ends = torch.tensor([0, 64, 128], dtype=torch.int32, device=device)
    packed = tw.Varlen(ends, ends, 64, 64)
    window = tw.Window(64, 0)

    def step(x: list[Tensor], *more: Tensor, **options: Any) -> Call:
        return lambda: torch.autograd.grad(tw.attention(*x, **options), [*x, *more], do)

    return {
        "window, softcap, sink": lambda: tw.attention(q, k, v, mask=window, score=tw.SoftCap(20.0), sink=sink),
        "ALiBi": lambda: tw.attention(q, k, v, mask=tw.Causal(), score=tw.Alibi(slopes)),
        "Varlen": lambda: tw.attention(q[0], k[0], v[0], layout=packed),
        "Cached, one query": lambda: tw.attention(one, cache, cache, layout=layout),
        "append_": lambda: tw.append_(cache, cache, new, new, layout=layout),
        "step, a sink that learns": step(learning, learned, mask=window, sink=learned),
        "step, grouped heads": step(grouped, mask=tw.Causal()),
        "step, deterministic": step(learning, mask=tw.Causal(), deterministic=True),
        "step, dropout": step(learning, dropout=0.1),
    }


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def eager(call: Call, device: str, calls: int) -> float:
    """Return the seconds of a call among many."""
    start = time.perf_counter()
    while time.perf_counter() - start < (WARM if device == "cuda" else 0.0):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def host(call: Call, device: str, calls: int) -> float:
    """Return the seconds of this thread in a call, where the device has time."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    found = (time.perf_counter() - start) / calls
    synchronize(device)
    return found


def graphed(call: Call) -> Callable[[str, int], float]:
    """Capture REPEATS calls on the current stream, which their forwards ran on, too; return what times a replay."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(REPEATS):
            call()
    return lambda device, calls: eager(graph.replay, device, max(1, calls // REPEATS)) / REPEATS


def race(calls: dict[str, Callable[[], Callable[[str, int], float]]], device: str, pick: Any, count: int) -> Any:
    """Return the seconds of each contender, and why others have none. Each round has another order."""
    timers: dict[str, Callable[[str, int], float]] = {}
    samples: dict[str, list[float]] = {}
    why: dict[str, str] = {}
    for turn in range(ROUNDS if device == "cuda" else 2):
        for name in Random(turn).sample([*calls], len(calls)):
            if name in why:
                continue
            try:
                timers[name] = timers.get(name) or calls[name]()
                samples.setdefault(name, []).append(timers[name](device, count))
            except Exception as error:
                why[name] = excuse(error, ())[1]
    return {name: pick(each) for name, each in samples.items() if name not in why}, why


def rows(device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure, and yield a row for each call and way to time it."""
    models = {"ViT-B 197": Size(1, 197, 2)} if quick else MODELS
    count = 3 if quick else CALLS
    for name, size in models.items():
        made = {who: cache(partial(passes, attend, size, device)) for who, attend in attends(size, device).items()}
        for of in ("forward", "backward"):
            for how in ("eager", "graph")[: 2 if device == "cuda" else 1]:
                timers = {who: partial(TIMERS[how], each, of) for who, each in made.items()}
                yield row(name, how, of, *race(timers, device, statistics.median, count))
    made = {who: cache(partial(passes, attend, SMALL, device)) for who, attend in attends(SMALL, device).items()}
    for of in ("forward", "forward, learning", "step"):
        timers = {who: partial(TIMERS["host"], each, of) for who, each in made.items()}
        yield row("a small call", "host", of, *race(timers, device, min, count))
    for name, call in variants(device).items():
        yield row(name, "host", "", *race({"tilewise": partial(partial, host, call)}, device, min, count))


TIMERS: dict[str, Callable[..., Callable[[str, int], float]]] = {
    "eager": lambda made, of: partial(eager, made()[of]),
    "host": lambda made, of: partial(host, made()[of]),
    "graph": lambda made, of: graphed(made()[of]),
}
"""What makes a timer of a contender's calls and the name of one."""


def row(name: str, how: str, of: str, seconds: dict[str, float], why: dict[str, str]) -> dict[str, Any]:
    """Return a row, with its ratio to the fastest other and its bar, and print it."""
    ours, others = seconds.get("tilewise"), [each for who, each in seconds.items() if who.startswith("sdpa")]
    ratio = min(others) / ours if ours and others else None
    found = {
        "call": name, "how": how, "pass": of, "microseconds": {who: 1e6 * each for who, each in seconds.items()},
        "why": why, "ratio": ratio, "bar": BARS.get((how, of)), "most": MOST.get(name),
    }  # fmt: skip
    times = ", ".join(f"{who} {1e6 * each:.1f}" for who, each in seconds.items())
    what = ", ".join(filter(None, (name, of, how)))
    than = "" if ratio is None else f"; {ratio:.2f}"
    print(f"{what}: {times} us{than} {verdict(found)} {why or ''}".rstrip(), flush=True)
    return found


def verdict(found: dict[str, Any]) -> str:
    """Say whether a row's bar holds."""
    ours = found["microseconds"].get("tilewise")
    if found["bar"] is not None and found["ratio"] is not None:
        return f"of {found['bar']:.2f}: {'holds' if found['ratio'] >= found['bar'] else 'MISSED'}"
    if found["most"] is not None and ours is not None:
        return f"at most {found['most']:g}: {'holds' if ours <= found['most'] else 'MISSED'}"
    return ""


def processor() -> str:
    """Return the name of the host's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="write <device name>/eager.json in this folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one small model, few calls")
    given = parser.parse_args(arguments)
    env, found = results.environment(torch.device(given.device)), []
    with torch.cuda.stream(torch.cuda.Stream() if given.device == "cuda" else None):  # the default one has no graphs
        for one in rows(given.device, given.quick):
            found.append(one)
            if given.results:  # a run that is cut off has its rows
                content = {"device": env["device"], "processor": processor(), "environment": env, "rows": found}
                results.save_states(content, [env])
                results.write(results.file_of(given.results, env["device"], "eager.json"), content)


if __name__ == "__main__":
    main()
