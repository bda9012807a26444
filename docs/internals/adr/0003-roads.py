"""What a call costs on the host, by either road: python docs/internals/adr/0003-roads.py."""

import statistics
import time

import torch

import tilewise as tw

ROUNDS, CALLS = 15, 300


def microseconds(call):
    """One call, the mean of many."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


torch.set_num_threads(1)
q, k, v = (torch.randn(1, 1, 1, 16, requires_grad=True) for _ in range(3))
text = tw.problem.Recipe().encode()
roads = {
    "eager": lambda: tw.attention(q, k, v),
    "operator": lambda: torch.ops.tilewise.attention(q, k, v, [], None, text, 0, 0),
}
rounds = [{road: microseconds(call) for road, call in roads.items()} for _ in range(ROUNDS)]
for road in roads:
    print(f"{road:<10}{statistics.median(r[road] for r in rounds[2:]):.0f} us")
