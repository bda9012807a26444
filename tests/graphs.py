"""CUDA graphs of calls, for tests on a GPU."""

import torch


def captured(function):
    """A graph of a call, warmed up on a side stream as PyTorch wants it, and the call's results in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results
