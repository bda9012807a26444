"""Time the kernels that split keys beside a kernel that only reads the pages, and beside SDPA, on a GPU.

    python benchmarks/decode_probe.py [tiles]
"""

import statistics
import sys

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


def main():
    print(torch.cuda.get_device_name(0), torch.__version__, triton.__version__, flush=True)
    cells = [(1, 1024), (1, 4096), (1, 32768), (8, 4096), (32, 4096), (8, 32768), (64, 8192), (128, 1024)]
    variants = [
        (Tiles(16, 64, 4, 5), 2), (Tiles(16, 64, 4, 5), 1), (Tiles(16, 64, 4, 7), 2), (Tiles(16, 32, 4, 5), 2),
        (Tiles(16, 32, 4, 7), 3), (Tiles(16, 64, 4, 5, registers=168), 3), (Tiles(16, 128, 4, 5), 1), (Tiles(16, 128, 8, 5), 1),
    ]
    for B, n in cells:
        size = B * n * H_k * D * 4
        line = [f"{B} x {n} {size / 1e6:.0f} MB"]
        q, k, v, layout = batch(B, n, 64)
        out = torch.empty(2048, device="cuda")
        read_us = min(timed(lambda: read[(132 * c,)](k, v, out, k.numel() // w, BLOCK=w, num_warps=8), [()])
                      for c, w in ((4, 4096), (8, 2048), (2, 8192)))
        line.append(f"read {read_us:.1f} us {size / read_us / 1e6:.2f} TB/s |")
        for tiles, per in variants:
            for page in (64, 16):
                if page == 16 and (tiles.stages, per) != (5, 2):
                    continue
                paged = layout
                pk, pv = k, v
                if page != 64:
                    q2, pk, pv, paged = batch(B, n, page)
                try:
                    run = planned(q, pk, pv, paged, tiles, per)
                    us = timed(run, [()])
                    line.append(f"{tiles.B_c}/{tiles.warps}/{tiles.stages} x{per} p{page} {read_us / us:.2f}({us:.1f})")
                except Exception as error:
                    line.append(f"{tiles} {type(error).__name__}")
        print(" ".join(line), flush=True)
        kc, vc = (t.view(B, n, H_k, D).transpose(1, 2) for t in (k, v))
        line = ["   sdpa"]
        for name, backend in {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}.items():
            try:
                with sdpa_kernel(backend):
                    us = timed(lambda: torch.nn.functional.scaled_dot_product_attention(
                        q.transpose(1, 2), kc, vc, enable_gqa=True), [()])
                line.append(f"{name} {read_us / us:.2f}({us:.1f})")
            except Exception as error:
                line.append(f"{name} {type(error).__name__}")
        contiguous = tw.Cached(layout.lengths)
        us = timed(lambda: tw.attention(q, k.view(B, n, H_k, D), v.view(B, n, H_k, D), mask=tw.Causal(), layout=contiguous), [()])
        line.append(f"ours contiguous {read_us / us:.2f}({us:.1f})")
        for least in (128, 512):
            us = timed(planned(q, k, v, layout, Tiles(16, 64, 4, 5), 2, least), [()])
            line.append(f"least {least} {read_us / us:.2f}({us:.1f})")
        invariant = tw.Cached(layout.lengths, layout.table, invariant=1024)
        us = timed(lambda: tw.attention(q, k, v, mask=tw.Causal(), layout=invariant), [()])
        line.append(f"invariant {read_us / us:.2f}({us:.1f})")
        print(" ".join(line), flush=True)
        del q, k, v, kc, vc, pk, pv
    mixed = torch.randint(128, 32768, (64,), dtype=torch.int32, device="cuda")
    q, k, v, layout = batch(64, 32768, 64, mixed)
    us = timed(lambda: tw.attention(q, k, v, mask=tw.Causal(), layout=layout), [()])
    print(f"mixed 64 in [128, 32k]: {int(mixed.sum()) * H_k * D * 4 / us / 1e6:.2f} TB/s")
    one = torch.full((16,), 1024, dtype=torch.int32, device="cuda")
    one[5] = 32768
    layout = tw.Cached(one, layout.table[:16])
    us = timed(lambda: tw.attention(q[:16], k, v, mask=tw.Causal(), layout=layout), [()])
    print(f"one 32k among 15 of 1k: {int(one.sum()) * H_k * D * 4 / us / 1e6:.2f} TB/s, {us:.1f} us")


if __name__ == "__main__":
    main()
