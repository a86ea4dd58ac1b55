"""How the jobs of one command line ended: the exit code that they give together and the table that closes a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXIT_OK = 0
EXIT_JOB_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_NOT_APPLICABLE = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell shows for SIGPIPE

BAD_CONFIG = "bad_config"
_FAILURES = ("failed", "out_of_memory", BAD_CONFIG)
_MAX_COLUMNS = 100


@dataclass(frozen=True)
class JobResult:
    """How one job ended; `status` is `RunOutcome`'s, or `bad_config`. `summary` is there only when it completed."""

    overrides: list[str]
    status: str
    summary: dict[str, Any] | None = None


def choose_exit_code(results: Sequence[JobResult], is_multirun: bool) -> int:
    """Return the process's exit code; in a sweep, jobs that cannot run on this machine do not count as failures."""
    statuses = [result.status for result in results]
    if "interrupted" in statuses:
        return EXIT_INTERRUPTED
    if not is_multirun and BAD_CONFIG in statuses:
        return EXIT_BAD_CONFIG
    if any(status in _FAILURES for status in statuses):
        return EXIT_JOB_FAILED
    if not is_multirun and "not_applicable" in statuses:
        return EXIT_NOT_APPLICABLE
    return EXIT_OK


def format_sweep_table(results: Sequence[JobResult], num_jobs: int) -> str:
    """Return one line a job: number, status, output tokens per second, and the overrides by which the jobs differ."""
    shared = set.intersection(*(set(result.overrides) for result in results)) if len(results) > 1 else set()
    rows = [
        (str(index), result.status, _format_throughput(result), " ".join(_list_own(result, shared)))
        for index, result in enumerate(results)
    ]
    table = [("job", "status", "tok/s", "overrides"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines = [
        f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in table
    ]
    if len(results) < num_jobs:
        lines.append(f"{num_jobs - len(results)} of {num_jobs} jobs were not run.")
    return "\n".join(_cut(line) for line in lines)


def _format_throughput(result: JobResult) -> str:
    tokens_per_s = (result.summary or {}).get("decode_tps")
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def _list_own(result: JobResult, shared: set[str]) -> list[str]:
    return [override for override in result.overrides if override not in shared]


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_COLUMNS else f"{line[: _MAX_COLUMNS - 3]}..."
