"""Time every stage that this machine can run, and torch's own attention, and compare them with a roofline.

A machine has two limits: how many operations its matrix units do in a second, and how many bytes its memory moves.
Operations per byte, the arithmetic intensity, say which of them holds an algorithm back:

    allowed rate = min(matmul rate, intensity * copy bandwidth)

Bytes are counted, not measured: what slow memory moves if all that a stage keeps in a tile stays on the chip.
"""

import argparse
import importlib.util
import sys
import time

import torch

try:
    import triton

    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    triton, INTERPRETED = None, False

GPU = torch.cuda.is_available()
DEVICE, DTYPE, D = ("cuda", torch.float16, 64) if GPU else ("cpu", torch.float32, 64)
WHERE = torch.cuda.get_device_name() if GPU else "one thread of the CPU"
WHY = {
    "naive": "Its lines pass over S twelve times, and only two of these multiply: memory is the limit on a GPU.",
    "online_softmax": "A CPU's cache holds a piece of S; on a GPU each line still passes over memory, and over O too.",
    "flash1": "Its loops read and write O once per key tile, and in torch each line of a small tile is a call.",
    "flash2": "Less traffic than flash1, but a small tile still costs about ten calls, each through memory or cache.",
    "backward": "S and dP are computed twice, which is 7 products for 5, and each tile again is a dozen calls.",
    "triton_forward": "One kernel, no calls between tiles; but products and exponentials wait for each other.",
    "triton_backward": "As the forward, and in 32 x 32 tiles, which fit every head size but read all rows often.",
    "hopper_forward": "Two warpgroups hide each other's exponentials; starts and ends of programs are not hidden.",
}


def can_run(stage):
    """Whether this machine runs a stage."""
    if stage == "hopper_forward":
        return bool(GPU and triton and not INTERPRETED and torch.cuda.get_device_capability() == (9, 0))
    return not stage.startswith("triton") or bool(triton and (GPU or INTERPRETED))


def seconds(call, budget=1.0):
    """The median of as many runs as fit the budget, at least one. The run before them compiles and does not count."""
    times = []
    while len(times) < 2 or (sum(times[1:]) < budget and len(times) <= 50):
        start = time.perf_counter()
        call()
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[len(times[1:]) // 2]


def limits():
    """FLOP/s of a large product and bytes/s of a large copy, on this machine."""
    size = 8192 if GPU else 1024
    a = torch.randn(size, size, dtype=DTYPE, device=DEVICE)
    b = torch.empty(2**28 if GPU else 2**24, dtype=torch.float32, device=DEVICE)
    c = torch.empty_like(b)
    return 2 * size**3 / seconds(lambda: a @ a), 2 * b.nbytes / seconds(lambda: c.copy_(b))


def sdpa(Q, K, V):
    """Torch's own, which wants a batch dimension."""
    return torch.nn.functional.scaled_dot_product_attention(Q[None], K[None], V[None])[0]


def portable(Q, K, V):
    """tilewise's own kernel for every GPU, where the package can be found."""
    q, k, v = (t.transpose(0, 1)[None] for t in (Q, K, V))
    return importlib.import_module("tilewise").attention(q, k, v, backend="triton")


def calls(heads, length):
    """(name, call, FLOP, bytes) of every row; the call is None where this machine cannot run it."""
    Q, K, V, dO = torch.randn(4, heads, length, D, dtype=DTYPE, device=DEVICE)
    shape = heads, length, length, D, Q.element_size()
    leaves = [t.detach().requires_grad_() for t in (Q, K, V)]
    O = sdpa(*leaves)
    forward, backward = 4 * heads * length**2 * D, 10 * heads * length**2 * D
    once = heads * length * D * Q.element_size()
    yield "torch sdpa", lambda: sdpa(Q, K, V), forward, 4 * once
    if GPU and importlib.util.find_spec("tilewise"):
        yield "tilewise, portable", lambda: portable(Q, K, V), forward, 4 * once
    yield "torch sdpa, backward", lambda: torch.autograd.grad(O, leaves, dO, retain_graph=True), backward, 8 * once
    flash2, moved_by_loops = importlib.import_module("flash2"), importlib.import_module("backward").bytes_moved
    for stage in WHY:
        module = importlib.import_module(stage) if can_run(stage) else None
        moved = getattr(module, "bytes_moved", None)
        if stage.endswith("backward"):
            _, lse = flash2.attention(Q.float(), K.float(), V.float())
            given = (Q, K, V, O.detach(), lse if stage.startswith("triton") else lse.to(DTYPE), dO)
            counted = moved(*shape) if moved else moved_by_loops(*shape, B_r=32, B_c=32)
            yield stage, module and (lambda m=module, g=given: m.backward(*g)), backward, counted
        else:
            counted = (
                moved(*shape) if moved else flash2.bytes_moved(*shape, B_r=128 if stage == "hopper_forward" else 64)
            )
            yield stage, module and (lambda m=module: m.attention(Q, K, V)), forward, counted


def measure(heads, length, rate, bandwidth):
    """The table's rows."""
    for name, call, flop, moved in calls(heads, length):
        told(f"timing {name}")
        intensity = flop / moved
        allowed = min(rate, intensity * bandwidth)
        counted = [f"{moved / 1e6:,.0f}", f"{intensity:,.0f}", f"{allowed / 1e9:,.0f}"]
        if call is None:
            reason = "needs an H100 or H200" if name == "hopper_forward" else "needs a GPU, or TRITON_INTERPRET=1"
            yield [name, "-", *counted, "-", "-", reason]
        else:
            took = seconds(call)
            slow = name.startswith("triton") and INTERPRETED
            note = "in the interpreter: a check, no measure" if slow else ""
            reached = f"{flop / took / 1e9:,.1f}", f"{flop / took / allowed:.0%}"
            yield [name, f"{took * 1e3:,.1f}", *counted, *reached, note]
    told("")


def told(text):
    """Progress, on one line."""
    print(f"\r{text:<40}", end="" if text else "\r", file=sys.stderr, flush=True)


def show(rows):
    """The table."""
    rows = [["stage", "ms", "MB", "FLOP/byte", "allowed GFLOP/s", "reached", "share", ""], *rows]
    widths = [max(len(row[x]) for row in rows) for x in range(len(rows[0]))]
    for name, *row in rows:
        print("  ".join([name.ljust(widths[0]), *map(str.rjust, row, widths[1:])]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--length", type=int, default=4096 if GPU else 512 if INTERPRETED else 1024, help="queries and keys"
    )
    parser.add_argument("--heads", type=int, default=32 if GPU else 4, help="over the batch, too")
    given = parser.parse_args()
    torch.set_num_threads(1)  # a tile is too small to share: threads would wait for each other, most of all when busy
    told("measuring the machine")
    rate, bandwidth = limits()
    rows = list(measure(given.heads, given.length, rate, bandwidth))
    what = f"{given.heads} heads, {given.length} queries and keys, head size {D}, full attention"
    print(f"{what}, {str(DTYPE)[6:]}, {WHERE}")
    print(f"roofline: matmul {rate / 1e9:,.0f} GFLOP/s, copy {bandwidth / 1e9:,.1f} GB/s; the lines meet at", end=" ")
    print(f"{rate / bandwidth:.0f} FLOP/byte: below it memory is the limit, above it the matrix units")
    show(rows)
    for stage, why in WHY.items():
        print(f"{stage + ':':<17}{why}")


if __name__ == "__main__":
    main()
