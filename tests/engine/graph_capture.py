"""Captures calls as a CUDA graph, as torch's notes on graphs have it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(step: Callable[[], object], num_calls: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of `num_calls` calls of `step`, after two calls of it on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            step()
    return graph
