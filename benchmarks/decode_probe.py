"""Time the kernels that split keys beside a kernel that only reads the pages, and beside SDPA, on a GPU.

python benchmarks/decode_probe.py [tiles]
"""

import statistics

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise as tw
from tilewise.check import check_arguments, describe
from tilewise.host.launch import empty_saved
from tilewise.triton import decode_launch
from tilewise.triton.tiles import Tiles

H, H_k, D = 32, 8, 128


@triton.jit
def read(K, V, out, n, BLOCK: tl.constexpr):
    """Sum both pools, each program a strided share."""
    total = tl.zeros([BLOCK], tl.float32)
    for x in tl.range(tl.program_id(0), n, tl.num_programs(0), num_stages=4):
        at = x.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(K + at).to(tl.float32) + tl.load(V + at).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def timed(run, sets, repeats=15):
    """Microseconds of a replayed graph of one call, over several sets of operands so that the L2 cache holds none."""
    graphs = []
    for each in sets:
        run(*each)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1):
                run(*each)
        graphs.append(graph)
    times = []
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    for n in range(repeats):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20000)
        start.record()
        graphs[n % len(graphs)].replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def batch(B, n, page, lengths=None):
    k, v = (torch.randn(B * n // page, page, H_k, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.randperm(B * n // page, device="cuda").int().view(B, -1)
    lengths = torch.full((B,), n, dtype=torch.int32, device="cuda") if lengths is None else lengths
    return torch.randn(B, 1, H, D, dtype=torch.bfloat16, device="cuda"), k, v, tw.Cached(lengths, table)


def planned(q, k, v, layout, tiles, per, least=256):
    x, recipe, longest = check_arguments(q, k, v, tw.Causal(), (), None, None, 0.0, layout, None, False, None)
    p = describe(x, recipe, longest)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    pl = decode_launch.planned(p, tiles, max(1, int(count * per) // H_k), least)
    return lambda: [one.run() for one in decode_launch.launches(p, pl, x, empty_saved(p, x, None))]


def combined(q, k, v, layout, tiles, per, least, warps, width):
    run = planned(q, k, v, layout, tiles, per, least)
    launches = run.__closure__
    return run


def main():
    print(torch.cuda.get_device_name(0), torch.__version__, triton.__version__, flush=True)
    for B, n in [(1, 1024), (1, 4096), (8, 4096), (32, 4096)]:
        size = B * n * H_k * D * 4
        q, k, v, layout = batch(B, n, 64)
        out = torch.empty(2048, device="cuda")
        read_us = timed(lambda: read[(528,)](k, v, out, k.numel() // 4096, BLOCK=4096, num_warps=8), [()])
        empty = timed(lambda: q.add_(0), [()])
        line = [f"{B} x {n} {size / 1e6:.0f} MB read {read_us:.1f} us, one empty launch {empty:.1f} |"]
        for per in (2, 1):
            for least in (64, 128, 256):
                us = timed(planned(q, k, v, layout, Tiles(16, 64, 4, 5), per, least), [()])
                line.append(f"x{per} least {least} {us:.1f}")
        pl = planned(q, k, v, layout, Tiles(16, 64, 4, 5), 2, 64)
        decode_only = lambda: planned_launches(q, k, v, layout)[0].run()
        line.append(f"without combine {timed(decode_only, [()]):.1f}")
        for warps, width in ((1, 16), (2, 16), (4, 8), (8, 32), (4, 32)):

            def both(warps=warps, width=width):
                first, second = planned_launches(q, k, v, layout)
                first.run()
                second._replace(constants={**second.constants, "num_warps": warps, "B_X": width}, compiled={}).run()

            line.append(f"combine {warps}w {width} {timed(both, [()]):.1f}")
        kc, vc = (t.view(B, n, H_k, D) for t in (k, v))
        for backend in ("triton", "hopper"):
            us = timed(lambda: tw.attention(q, kc, vc, mask=tw.Causal(), backend=backend), [()])
            line.append(f"plain {backend} {us:.1f}")
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            us = timed(
                lambda: torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), kc.transpose(1, 2), vc.transpose(1, 2), enable_gqa=True
                ),
                [()],
            )
        line.append(f"cudnn {us:.1f}")
        print(" ".join(line), flush=True)
    for M, G_heads in ((4, 8), (8, 8), (16, 8), (4, 32), (16, 32), (64, 32)):
        q = torch.randn(8, M, 32, D, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(8, 8192, G_heads, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        us = [timed(lambda: tw.attention(q, k, v, mask=tw.Causal(), backend=b), [()]) for b in ("triton", "hopper")]
        print(f"8 x {M} queries, 8k keys, {G_heads} key heads: split {us[0]:.1f}, hopper {us[1]:.1f}", flush=True)
    import time

    q, k, v, layout = batch(1, 1024, 64)
    x = [(tw.attention(q, k, v, mask=tw.Causal(), layout=layout), torch.cuda.synchronize())[0] for _ in range(3)]
    start = time.perf_counter()
    for _ in range(300):
        tw.attention(q, k, v, mask=tw.Causal(), layout=layout)
    print(f"host {(time.perf_counter() - start) / 300 * 1e6:.0f} us")
    mixed = torch.randint(128, 32768, (64,), dtype=torch.int32, device="cuda")
    k = v = None
    q, k, v, layout = batch(64, 32768, 64, mixed)
    us = timed(lambda: tw.attention(q, k, v, mask=tw.Causal(), layout=layout), [()])
    print(f"mixed 64 in [128, 32k]: {int(mixed.sum()) * H_k * D * 4 / us / 1e6:.2f} TB/s")
    one = torch.full((16,), 1024, dtype=torch.int32, device="cuda")
    one[5] = 32768
    layout = tw.Cached(one, layout.table[:16])
    us = timed(lambda: tw.attention(q[:16], k, v, mask=tw.Causal(), layout=layout), [()])
    print(f"one 32k among 15 of 1k: {int(one.sum()) * H_k * D * 4 / us / 1e6:.2f} TB/s, {us:.1f} us")


def planned_launches(q, k, v, layout):
    x, recipe, longest = check_arguments(q, k, v, tw.Causal(), (), None, None, 0.0, layout, None, False, None)
    p = describe(x, recipe, longest)
    return list(decode_launch.launches(p, decode_launch.plan(p), x, empty_saved(p, x, None)))


if __name__ == "__main__":
    main()
