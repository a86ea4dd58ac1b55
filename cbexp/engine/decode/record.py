"""What decoding took and found over a driver's life, in which decoders and runners come and go."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from cbexp.engine.decode.self_check import SelfCheckResult, summarize_errors
from cbexp.engine.decode.step import CompileStats
from cbexp.engine.decode.timing import DeviceIdle


@dataclass
class DecodeRecord:
    """One for all decoders of a driver. `checks`: every self-check that was passed, in order."""

    counts: CompileStats = field(default_factory=CompileStats)
    idle: DeviceIdle = field(default_factory=DeviceIdle)
    checks: list[SelfCheckResult] = field(default_factory=list)

    def summarize(self) -> dict[str, Any]:
        """`CompileStats`, `device_idle_share`, and what self-checks found.

        The idle share is of drives, between bursts and batches of prompts. It is None without a GPU, and in modes
        without graphs: there the device also waits for the host inside a burst, which is not measured.
        `mean_logprob_error`, `max_logprob_error` (of the forward run eagerly), `mean_logit_error` and `max_logit_error`
        (of steps as they run) are over the rows of all self-checks (None: nothing was checked).
        """
        return asdict(self.counts) | {"device_idle_share": self.idle.share} | summarize_errors(self.checks)
