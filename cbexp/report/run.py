"""One run or cell as its folder tells it; every figure is None where the records do not have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbexp.report.json_files import lookup, number, text

GOOD_STATUSES = ("completed", "not_applicable")  # of a sweep: nothing to mend
UNFINISHED_STATUSES = ("running", "not_started")


@dataclass(frozen=True)
class TimedRound:
    """A timed round: its seconds and the output tokens that finished requests got in it."""

    wall_s: float
    num_output_tokens: float
    record: Mapping[str, Any]

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of finished requests / wall time."""
        return self.num_output_tokens / self.wall_s


@dataclass(frozen=True)
class Run:
    """The records of one folder. `status` is that of status.json, or what must be said where that one cannot be true.

    Besides the statuses that a job writes: `killed` (its process is gone), `not_started` (a cell of sweep.json without
    records), `unreadable` (records that contradict each other or cannot be read). `status_record` is status.json as it
    is. `remarks` says what was wrong with files. `overrides` are the words of its command line.
    """

    folder: Path
    name: str
    status: str
    message: str | None
    overrides: tuple[str, ...]
    command: str | None
    status_record: Mapping[str, Any]
    summary: Mapping[str, Any]
    engine: Mapping[str, Any]
    environment: Mapping[str, Any]
    rounds: tuple[TimedRound, ...]
    warmup_rounds_s: float
    remarks: tuple[str, ...]

    @property
    def is_completed(self) -> bool:
        """Whether it has figures that count."""
        return self.status == "completed"

    @property
    def is_failure(self) -> bool:
        """Whether it ended badly; not for a cell that cannot run on this machine, that runs still, or is to come."""
        return is_failure(self.status)

    @property
    def workload_hash(self) -> str | None:
        """Identity of the work: only figures of the same work compare."""
        return text(self.summary, "workload_hash")

    @property
    def output_tokens_per_s(self) -> float | None:
        """Output tokens / wall time of the median round."""
        return self.figure("output_tokens_per_s", "median")

    @property
    def error_class(self) -> str | None:
        """The class of the error that ended it."""
        return text(self.status_record, "error_class")

    @property
    def gpu_states(self) -> list[Mapping[str, Any]]:
        """Clocks, power and memory of each of its GPUs when it started; empty without a GPU or in older records."""
        states = lookup(self.environment, "cuda", "gpu_states")
        return [state for state in states if isinstance(state, Mapping)] if isinstance(states, list) else []

    def figure(self, *names: str) -> float | None:
        """A number of the summary."""
        return number(self.summary, *names)

    def fact(self, *names: str) -> Any:
        """Any value of the summary."""
        return lookup(self.summary, *names)


def is_failure(status: str) -> bool:
    """Whether a run of this status ended badly."""
    return status not in (*GOOD_STATUSES, *UNFINISHED_STATUSES)
