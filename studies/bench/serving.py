"""Ratios that a serving engine asks for, on this machine: python -m studies.bench.serving --results benchmarks/results

On a GPU each call is replayed from a CUDA graph, in turns with its peers; medians count. `reads` is a kernel that only
reads the same pages. On a CPU one query a sequence is compared with SDPA over keys that are gathered already. A ratio
above 1 means that tilewise takes less time; a peer that cannot run is listed with its reason. Each line states its bar.
"""

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw

from . import results

H, H_K, D = 32, 8, 128
ROUNDS, REPEATS = 9, 10
Calls = dict[str, Callable[[], Any]]
Found = dict[str, float | str]


def timed(calls: Calls) -> Found:
    """Return microseconds of each call, or why it cannot run. Rounds alternate, so that all see the same clocks."""
    made = {name: prepared(call) for name, call in calls.items()}
    found: Found = {name: each for name, each in made.items() if isinstance(each, str)}
    runs = {name: each for name, each in made.items() if not isinstance(each, str)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name, run in runs.items():
            taken = once(run)
            if turn:
                times[name].append(taken)
    return found | {name: statistics.median(each) for name, each in times.items()}


def prepared(call: Callable[[], Any]) -> Callable[[], Any] | str:
    """Return what runs a call, or why it cannot: a peer that this PyTorch lacks is listed, and the others go on."""
    try:
        call()
        return graphed(call) if torch.cuda.is_available() else call
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a graph of REPEATS calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return graph.replay


def once(run: Callable[[], Any]) -> float:
    """Return microseconds of one call."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPEATS


def host(call: Callable[[], Any], count: int = 200) -> float:
    """Return microseconds of this thread in one call, where the GPU never falls behind."""
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e6


@triton.jit
def read(K, V, pages, out, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum pages of SIZE entries, BLOCK at a time."""
    PARTS: tl.constexpr = SIZE // BLOCK
    total = tl.zeros([BLOCK], tl.float32)
    for n in range(tl.program_id(0), count * PARTS, tl.num_programs(0)):
        page = tl.load(pages + n // PARTS).to(tl.int64)
        entries = page * SIZE + n % PARTS * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(K + entries).to(tl.float32) + tl.load(V + entries).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def reader(k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Callable[[], Any]:
    """Return a call that reads the keys and values of all sequences, page by page, and does nothing else.

    Of the numbers of programs, warps and entries that were tried on an H200, these read fastest.
    """
    P, size = k.shape[1], k[0].numel()
    used = [own[: -(-n // P)] for own, n in zip(table, lengths.tolist(), strict=True)]
    pages, programs = torch.cat(used), 16 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs, device="cuda")
    start: Any = read[(programs,)]
    return lambda: start(k, v, pages, out, len(pages), SIZE=size, BLOCK=min(size, 4096), num_warps=4)


class Served:
    """Sequences whose keys are in shuffled pages, and the same keys side by side."""

    def __init__(self, lengths: list[int], page: int = 64, queries: int = 1, device: str = "cuda") -> None:
        torch.manual_seed(0)
        B, width = len(lengths), -(-max(lengths) // page)
        count = sum(-(-n // page) for n in lengths)
        self.page, self.most = page, max(lengths)
        self.q = torch.randn(B, queries, H, D, dtype=torch.bfloat16, device=device)
        self.k, self.v = (torch.randn(count, page, H_K, D, dtype=torch.bfloat16, device=device) for _ in range(2))
        order, first = torch.randperm(count, device=device).int(), 0
        self.table = torch.zeros(B, width, dtype=torch.int32, device=device)
        for b, n in enumerate(lengths):
            used = -(-n // page)
            self.table[b, :used] = order[first : first + used]
            first += used
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)

    def layout(self, **changes: Any) -> tw.Cached:
        """Return the pages as a layout."""
        return tw.Cached(self.lengths, self.table, **changes)

    def pages(self, k: Any = None, v: Any = None, backend: Any = None, **changes: Any) -> Callable[[], Tensor]:
        """Return a causal call on the pages, or on others in their place."""
        keys, values, layout = self.k if k is None else k, self.v if v is None else v, self.layout(**changes)
        return lambda: tw.attention(self.q, keys, values, mask=tw.Causal(), layout=layout, backend=backend)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, N, H_k, D) of sequences of one length."""
        k, v = (t[self.table.long()].flatten(1, 2)[:, : self.most] for t in (self.k, self.v))
        return k, v

    def read(self) -> Callable[[], Any]:
        """Return a call that only reads the pages."""
        return reader(self.k, self.v, self.table, self.lengths)


def ours_of(s: Served) -> Calls:
    """Return tilewise's calls on the same keys, by default and by the portable kernels: contiguous and in pages."""
    k, v = s.gathered()
    calls: Calls = {}
    for name, backend in (("tilewise", None), ("tilewise, triton", "triton")):
        calls[name] = lambda backend=backend: tw.attention(s.q, k, v, backend=backend)
        calls[f"{name}, pages"] = s.pages(backend=backend)
    return calls


def peers(s: Served) -> Calls:
    """Return what PyTorch has for queries of one number and keys of one length; all see every key, or are causal."""
    k, v = s.gathered()
    heads: Any = [t.transpose(1, 2) for t in (s.q, k, v)]
    B, M, N = len(s.q), s.q.shape[1], s.most

    def sdpa(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*heads, enable_gqa=True)

        return call

    def flex() -> Callable[[], Any]:
        from torch.nn.attention.flex_attention import flex_attention

        compiled: Any = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(*heads, enable_gqa=True)

    def varlen(paged: bool) -> Callable[[], Any]:
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        if paged and "block_table" not in known:
            raise NotImplementedError("this varlen_attn has no block_table")
        cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32, device="cuda") * n for n in (M, N))
        more: Any = {"enable_gqa": True} if "enable_gqa" in known else {}
        q: Any = s.q.flatten(0, 1)
        if paged:
            more |= {"seqused_k": s.lengths, "block_table": s.table}
            return lambda: varlen_attn(q, s.k, s.v, cu_q, None, M, N, **more)
        rows = k.flatten(0, 1), v.flatten(0, 1)
        return lambda: varlen_attn(q, *rows, cu_q, cu_k, M, N, **more)

    def later(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        """Make a peer where its errors are listed."""
        made: list[Callable[[], Any]] = []

        def call() -> Any:
            if not made:
                made.append(make())
            return made[0]()

        return call

    return {
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "flex": later(flex), "varlen_attn": later(lambda: varlen(False)),
        "varlen_attn, pages": later(lambda: varlen(True)),
    }  # fmt: skip


def row(name: str, bar: float, times: Found, ours: str, than: str | None = None) -> dict[str, Any]:
    """Return a comparison with a peer; without a name, with the fastest of those that are not tilewise."""
    others = {n: t for n, t in times.items() if not n.startswith("tilewise") and isinstance(t, float)}
    than = than or min(others, key=lambda n: others[n], default="nothing")
    of, mine = times.get(than), times[ours]
    ratio = of / mine if isinstance(of, float) and isinstance(mine, float) else None
    return {"what": name, "bar": bar, "ratio": ratio, "ours": ours, "than": than, "microseconds": times}


def absolute(name: str, most: float, times: Found, ours: str) -> dict[str, Any]:
    """Return microseconds, of which there are to be no more than `most`."""
    found = times[ours] if isinstance(times[ours], float) else None
    return {"what": name, "most": most, "ratio": found, "ours": ours, "than": "microseconds", "microseconds": times}


def line(each: dict[str, Any]) -> str:
    """Return a row as a line, with its bar and whether it is reached."""
    found, least = each["ratio"], "bar" in each
    bar = each["bar" if least else "most"]
    what = f"{each['ours']} against {each['than']}" if least else f"{each['than']} of {each['ours']}"
    if found is None:
        return f"{each['what']}: not measured, {what}"
    verdict = "reached" if (found >= bar if least else found <= bar) else "MISSED"
    return f"{each['what']}: {found:.3f} ({'at least' if least else 'at most'} {bar}: {verdict}), {what}"


def reading_row(s: Served, what: str, bar: float) -> dict[str, Any]:
    """Return the share of reading that tilewise reaches; the portable kernels' time stands beside it."""
    times = timed({"tilewise": s.pages(), "tilewise, triton": s.pages(backend="triton"), "reads": s.read()})
    return row(f"{what}, share of reading", bar, times, "tilewise", "reads")


def decode_rows() -> Iterator[dict[str, Any]]:
    """Yield what one query a sequence takes."""
    sizes = ((1, 32768, 0.88), (8, 4096, 0.88), (32, 4096, 0.95), (128, 1024, 0.95), (8, 32768, 0.95), (64, 8192, 0.95))
    for B, n, bar in sizes:
        s, what = Served([n] * B), f"{B} sequences of {n} keys"
        yield reading_row(s, what, bar)
        times = timed(ours_of(s) | peers(s))
        for kind, ours in (("contiguous", "tilewise"), ("pages", "tilewise, pages")):
            yield row(f"{what}, {kind}", 1.0, times, ours)
    s = Served([1024])
    times = timed(ours_of(s) | peers(s))
    yield row("1 sequence of 1024 keys", 1.0, times, "tilewise")
    yield absolute("1 sequence of 1024 keys", 7.5, times, "tilewise")
    made = torch.Generator().manual_seed(0)
    mixed = Served(torch.randint(128, 32768, (64,), generator=made).tolist())
    yield reading_row(mixed, "64 mixed lengths", 0.88)
    yield reading_row(Served([131072, *[1024] * 15]), "one of 128k keys among 15 of 1k", 0.85)
    sizes = {page: Served([8192] * 32, page) for page in (1, 16, 128)}
    times = timed({f"pages of {page}": s.pages() for page, s in sizes.items()})
    yield row("pages of 16 against 128", 0.95, times, "pages of 16", "pages of 128")
    yield row("pages of 1 against 128", 0.6, times, "pages of 1", "pages of 128")
    s = sizes[128]
    eight: Any = [tw.Quantized(t.to(torch.float8_e4m3fn), torch.ones(H_K, device="cuda")) for t in (s.k, s.v)]
    times = timed({"bf16": s.pages(), "e4m3": s.pages(*eight), "invariant": s.pages(invariant=1024)})
    yield row("e4m3 pages", 1.6, times, "e4m3", "bf16")
    yield row("invariant=1024", 0.93, times, "invariant", "bf16")


def prefill_rows() -> Iterator[dict[str, Any]]:
    """Yield what chunks of a prompt take, alone and beside decoding."""
    for page in (128, 16):
        s = Served([32768], page, queries=2048)
        k, v = s.gathered()
        calls: Calls = {
            "pages": s.pages(),
            "contiguous": lambda s=s, k=k, v=v: tw.attention(s.q, k, v, mask=tw.Causal()),
        }  # fmt: skip
        yield row(f"2k queries on 32k keys, pages of {page}", 0.95, timed(calls), "pages", "contiguous")
    lengths, chunk = [8192] * 32, 2048
    both, decodes, prefill = Served([*lengths, 16384]), Served(lengths), Served([16384], queries=chunk)
    ends = torch.tensor([*range(len(lengths) + 1), len(lengths) + chunk], dtype=torch.int32, device="cuda")
    q = torch.cat([decodes.q[:, 0], prefill.q[0]])
    layout = both.layout(cu_q=ends, max_q=chunk)
    apart = decodes.pages(), prefill.pages()
    times = timed({"one call": lambda: tw.attention(q, both.k, both.v, mask=tw.Causal(), layout=layout),
                   "two calls": lambda: [call() for call in apart]})  # fmt: skip
    yield row("32 decodes and a chunk of 2k in one call", 0.9, times, "one call", "two calls")


def host_rows() -> Iterator[dict[str, Any]]:
    """Yield what the thread that calls spends."""
    s = Served([1024] * 2)
    k, v = s.gathered()
    heads: Any = [t.transpose(1, 2) for t in (s.q, k, v)]
    new, angles = (
        torch.randn(2, 1, H_K, D, dtype=torch.bfloat16, device="cuda"),
        torch.randn(2, 1024, D // 2, device="cuda"),
    )
    layout, cos, sin = s.layout(), *angles.unbind()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        cudnn = host(lambda: scaled_dot_product_attention(*heads, enable_gqa=True))
    found: Found = {
        "sdpa cudnn": cudnn, "plain": host(lambda: tw.attention(s.q, k, v)), "cached": host(s.pages()),
        "append_": host(lambda: tw.append_(s.k, s.v, new, new, layout=layout, cos=cos, sin=sin, q=s.q)),
    }  # fmt: skip
    for name in ("plain", "cached", "append_"):
        yield absolute("the host", 40.0, found, name)


def cpu_rows() -> Iterator[dict[str, Any]]:
    """Yield what one query a sequence takes on a CPU."""
    for dtype in (torch.bfloat16, torch.float32):
        s = Served([4096] * 64, device="cpu")
        s.q, s.k, s.v = (t.to(dtype) for t in (s.q, s.k, s.v))
        heads: Any = [t.transpose(1, 2).contiguous() for t in (s.q, *s.gathered())]
        times = timed({"pages": s.pages(), "sdpa": lambda heads=heads: scaled_dot_product_attention(
            *heads, enable_gqa=True)})  # fmt: skip
        yield row(f"64 sequences of 4k keys in {dtype}", 0.5, times, "pages", "sdpa")


def main() -> None:
    """Measure, print a line for each ratio, and write all of it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="write <device name>/serving.json in this folder")
    parser.add_argument("--only", default="", help="decode, prefill or host")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    parts = {"decode": decode_rows, "prefill": prefill_rows, "host": host_rows} if gpu else {"cpu": cpu_rows}
    found = []
    with torch.no_grad():
        for name, rows in parts.items():
            for each in rows() if given.only in ("", name) else ():
                found.append(each)
                print(line(each), flush=True)
                print("   ", {n: t if isinstance(t, str) else round(t, 1) for n, t in each["microseconds"].items()})
    if given.results:
        env = results.environment(torch.device("cuda" if gpu else "cpu"))
        content = {"device": env["device"], "environment": env, "rows": found}
        results.save_states(content, [env])
        path = results.file_of(given.results, env["device"], "serving.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
