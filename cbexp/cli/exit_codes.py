"""What the process's exit code says of the jobs of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from cbexp.sweep.ends import CellEnd

EXIT_OK = 0
EXIT_JOB_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_NOT_APPLICABLE = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell shows for SIGPIPE

BAD_CONFIG = "bad_config"
_OF_STATUS = {
    "failed": EXIT_JOB_FAILED,
    "out_of_memory": EXIT_JOB_FAILED,
    BAD_CONFIG: EXIT_BAD_CONFIG,
    "not_applicable": EXIT_NOT_APPLICABLE,
    "interrupted": EXIT_INTERRUPTED,
}


def choose_exit_code(status: str) -> int:
    """Return the exit code of a single run that ended with `status`."""
    return _OF_STATUS.get(status, EXIT_OK)


def choose_dry_runs_exit_code(statuses: Sequence[str]) -> int:
    """Return the exit code of a sweep's dry runs; what cannot run on this machine is no failure."""
    codes = [choose_exit_code(status) for status in statuses if status != "not_applicable"]
    return max(codes, default=EXIT_OK)


def choose_sweep_exit_code(ends: Sequence[CellEnd], is_stopped: bool) -> int:
    """Return the exit code of a sweep; cells that cannot run on this machine do not count as failures."""
    if is_stopped:
        return EXIT_INTERRUPTED
    return EXIT_OK if all(end.is_done for end in ends) else EXIT_JOB_FAILED
