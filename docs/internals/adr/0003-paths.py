"""What a call costs on the host, by either path: python docs/internals/adr/0003-paths.py."""

import statistics
import time

import torch

import tilewise as tw
from tilewise.call.recipe import Recipe

ROUNDS, CALLS = 15, 300


def microseconds(call):
    """One call, the mean of many."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


torch.set_num_threads(1)
q, k, v = (torch.randn(1, 1, 1, 16, requires_grad=True) for _ in range(3))
text = Recipe().encode()
paths = {
    "eager": lambda: tw.attention(q, k, v),
    "operator": lambda: torch.ops.tilewise.attention(q, k, v, [], None, text, 0, 0),
}
rounds = [{path: microseconds(call) for path, call in paths.items()} for _ in range(ROUNDS)]
for path in paths:
    print(f"{path:<10}{statistics.median(r[path] for r in rounds[2:]):.0f} us")
