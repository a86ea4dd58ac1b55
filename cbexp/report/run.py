"""The records of one run or cell. A figure is None where the records lack it."""

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
    """A timed round: its wall time, and the output tokens of the requests that finished in it."""

    wall_s: float
    num_output_tokens: float
    record: Mapping[str, Any]

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of finished requests / wall time."""
        return self.num_output_tokens / self.wall_s


@dataclass(frozen=True)
class Run:
    """The records of one folder.

    `status` is that of status.json, or the true one where that cannot be right: `killed` (its process is gone),
    `not_started` (a cell of sweep.json without records), or `unreadable` (records that contradict each other or cannot
    be read). `status_record` is status.json as it is. `remarks` says what was wrong with files.
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
        """Whether its figures count."""
        return self.status == "completed"

    @property
    def is_failure(self) -> bool:
        """Whether it ended badly. Cells that are not applicable, running or not started are no failures."""
        return is_failure(self.status)

    @property
    def workload_hash(self) -> str | None:
        """Identity of the workload: only figures of one workload are compared."""
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
        """Clocks, power and memory of each of its GPUs at its start; empty without a GPU or in older records."""
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
