"""The progress of a running round."""

from __future__ import annotations

from cbexp.display.units import format_number, format_seconds, format_share
from cbexp.engine.types import StepInfo


class RoundProgress:
    """Counts the steps of a running round. Output tokens are an estimate until its completions are counted."""

    def __init__(self, name: str, num_requests: int, start_s: float) -> None:
        self._name = name
        self._num_requests = num_requests
        self._start_s = start_s
        self._num_finished = 0
        self._num_tokens = 0
        self._cache_used_fraction = 0.0
        self._has_steps = False

    def add_step(self, info: StepInfo) -> None:
        """Count a step: a decode step gives all its tokens, any other at most one a request."""
        self._has_steps = True
        self._num_finished += info.num_finished
        self._num_tokens += info.num_tokens if info.kind == "decode" else info.num_requests
        self._cache_used_fraction = info.cache_used_fraction

    def describe(self, now_s: float) -> str:
        """One line: requests done, tokens per second, cache use. Without steps, only that the round runs."""
        if not self._has_steps:
            return f"{self._name}: {self._num_requests:,} requests are running"
        elapsed_s = now_s - self._start_s
        return (
            f"{self._name}: {self._num_finished:,} of {self._num_requests:,} requests done, "
            f"about {format_number(self._num_tokens / elapsed_s)} output tokens/s, "
            f"cache {format_share(self._cache_used_fraction)}, {format_seconds(elapsed_s)}"
        )
