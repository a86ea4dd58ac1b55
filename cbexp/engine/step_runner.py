"""What runs the decode steps of a burst, and the plain way of doing so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cbexp.engine.decode_buffers import DecodeBuffers
from cbexp.engine.sampling import advance


class DecodeForward(Protocol):
    """One decode step's forward: no host synchronisation, and nothing changes but the cache's pages."""

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Next token ids int64 [rows] for int64 [rows] at int32 [rows] (-1: inactive row)."""

    def logits(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The same step's logits [rows, vocab_size]."""


@dataclass(frozen=True)
class CompileStats:
    """What compiling and capturing came to so far; seconds are the host's."""

    graphs: int = 0
    replays: int = 0
    compile_s: float = 0.0
    capture_s: float = 0.0
    recompiles: int = 0
    skipped_cudagraphs: int = 0
    graph_breaks: int = 0


class StepRunner(Protocol):
    """Runs decode steps over the rows of its `DecodeBuffers`, on the current stream."""

    def prepare(self, bucket: int) -> None:
        """Compile or capture for a batch of `bucket` rows; idempotent. All rows must be inactive."""

    def run(self, bucket: int, num_steps: int) -> None:
        """Enqueue decode steps over the first `bucket` rows, without waiting for the device."""

    @property
    def stats(self) -> CompileStats:
        """Of the runner's whole life."""

    def close(self) -> None:
        """Drop what was captured."""


class EagerStepRunner:
    """Decode steps as plain calls."""

    def __init__(self, forward: DecodeForward, buffers: DecodeBuffers) -> None:
        self._forward = forward
        self._buffers = buffers

    def prepare(self, bucket: int) -> None:
        """Nothing to prepare."""

    def run(self, bucket: int, num_steps: int) -> None:
        """Run the steps."""
        token_ids, positions = self._buffers.token_ids[:bucket], self._buffers.positions[:bucket]
        for _ in range(num_steps):
            advance(self._buffers, self._forward(token_ids, positions))

    @property
    def stats(self) -> CompileStats:
        """Nothing is compiled or captured."""
        return CompileStats()

    def close(self) -> None:
        """Nothing to drop."""
