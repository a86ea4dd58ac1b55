"""Runs the engine's work on the stream that transformers' batching computes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_compute_stream(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Run the body on `stream`, after the caller's work (new weights) and before whatever follows it.

    Upstream writes a batch's inputs on the current stream and reads them on its own with no event between the two.
    None (no CUDA): there is one order anyway.
    """
    if stream is None:
        yield
        return
    callers_stream = torch.cuda.current_stream(device)
    stream.wait_stream(callers_stream)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        callers_stream.wait_stream(stream)
