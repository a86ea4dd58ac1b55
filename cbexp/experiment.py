"""Runs one job inside its frame: run directory, tracking, display; every end, good or bad, gets its status."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cbexp.artifacts import RunDirectory, check_writable
from cbexp.config import ExperimentConfig, SweepInfo, to_plain_dict
from cbexp.display import ProgressDisplay
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.sizing import format_gib
from cbexp.engine.types import CacheMemoryError, EngineError
from cbexp.environment import (
    collect_environment,
    limit_threads,
    quiet_libraries,
    release_memory,
    seed_everything,
)
from cbexp.errors import CbexpError, ConfigError, MemoryBudgetError, NotApplicableError, ResultsError
from cbexp.job import Job
from cbexp.planning.dry_run import summarize_dry_run
from cbexp.planning.plan import RunPlan, build_plan, what_to_lower
from cbexp.tracking import start_tracking

BadEnd = Literal["failed", "out_of_memory", "interrupted", "not_applicable"]
Status = Literal["completed", "dry_run", "bad_config"] | BadEnd
MEMORY_ERRORS = (MemoryBudgetError, CacheMemoryError, torch.OutOfMemoryError)
# Errors that are messages to the user; anything else is a bug, whose traceback goes to a file.
ENDS_WITHOUT_MESSAGE: dict[type[BaseException], str] = {KeyboardInterrupt: "stopped by Ctrl-C"}
EXPECTED_ERRORS = (CbexpError, EngineError, *MEMORY_ERRORS)


@dataclass(frozen=True)
class RunOutcome:
    """How a job ended. `summary` is there only when it completed, `message` only when it did not.

    `bad_config` is a failure that only the machine or the model's files could show; status.json calls it failed.
    """

    status: Status
    run_dir: Path | None
    summary: dict[str, Any] | None = None
    message: str | None = None


def run_experiment(
    config: ExperimentConfig, run_dir: Path, overrides: list[str], sweep: SweepInfo | None = None
) -> RunOutcome:
    """Run one job and write its records to `run_dir`; shows progress and outcome on the terminal.

    What ends a job badly is caught, recorded and returned. Only a run directory or a `stats_path` that cannot be
    written raises: `ResultsError`, since there is no place to record it.
    """
    display = ProgressDisplay()
    quiet_libraries()
    if config.dry_run:
        display.print_dry_run(summarize_dry_run(config))
        return RunOutcome("dry_run", None)
    if config.stats_path is not None:
        check_writable(Path(config.stats_path))
    directory = RunDirectory.create(run_dir, config.artifacts)
    outcome = _run_recorded(config, directory, display, overrides, sweep)
    with deferring_interrupts():
        display.print_outcome(outcome.status, outcome.summary, outcome.message, directory)
        release_memory()
    return outcome


def _run_recorded(
    config: ExperimentConfig,
    directory: RunDirectory,
    display: ProgressDisplay,
    overrides: list[str],
    sweep: SweepInfo | None,
) -> RunOutcome:
    """Run the job and turn every way to end into a status on disk and an outcome."""
    try:
        summary = _run_tracked(config, directory, display, overrides, sweep)
    except NotApplicableError as error:
        return _end_badly(directory, "not_applicable", error)
    except ConfigError as error:
        return _end_badly(directory, "failed", error, reported_as="bad_config")
    except KeyboardInterrupt as error:
        return _end_badly(directory, "interrupted", error)
    except MEMORY_ERRORS as error:
        return _end_badly(directory, "out_of_memory", error)
    except EXPECTED_ERRORS as error:
        return _end_badly(directory, "failed", error)
    except Exception as error:  # noqa: BLE001 - a bug: recorded with its traceback, and the sweep goes on
        return _end_badly(directory, "failed", error)
    return RunOutcome("completed", directory.path, summary)


def _run_tracked(
    config: ExperimentConfig,
    directory: RunDirectory,
    display: ProgressDisplay,
    overrides: list[str],
    sweep: SweepInfo | None,
) -> dict[str, Any]:
    start_s = time.perf_counter()
    seed_everything(config.seed)
    limit_threads(config.model.num_threads)
    directory.write_environment(collect_environment())
    name = " ".join(overrides) or config.name
    with start_tracking(config.tracking, name, sweep, to_plain_dict(config), directory.path) as tracker:
        plan = build_plan(config)  # in here, so that what does not fit is seen, and avoided by a search
        tracker.log_resolved(plan.to_dict())
        display.print_plan(plan)
        display.print_line(tracker.description)
        prepared_s = time.perf_counter()
        with Job(plan, directory, tracker, display) as job, _explaining_memory(plan):
            summary = _run_job(job, display)
        summary["tracking"] = tracker.description
        summary["durations_s"] |= {"prepare": prepared_s - start_s, "total": time.perf_counter() - start_s}
        tracker.log_summary(summary)
    # Only now: closing the run is where an upload fails.
    summary["warnings"] += tracker.warnings
    directory.write_summary(summary, None if config.stats_path is None else Path(config.stats_path))
    return summary


@contextmanager
def _explaining_memory(plan: RunPlan) -> Iterator[None]:
    """Turn PyTorch's out-of-memory error into one that says what was asked for and what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        cache = f"{plan.cache_tokens:,} tokens" if plan.cache_tokens is not None else "sized for the round"
        raise MemoryBudgetError(
            f"{plan.device} ran out of memory with {format_gib(plan.weights.num_bytes)} of weights, a cache {cache}, "
            f"{plan.max_requests_per_batch} requests and {plan.config.cache.max_batch_tokens} tokens a step. "
            f"Lower {what_to_lower(plan)}. PyTorch says: {str(error).splitlines()[0]}"
        ) from error


def _run_job(job: Job, display: ProgressDisplay) -> dict[str, Any]:
    """Run it; when a round is broken off, what it had finished is written before the error goes on."""
    try:
        return job.run()
    except BaseException:
        with deferring_interrupts():
            num_saved = job.save_interrupted_round()
            if num_saved:
                display.print_line(
                    f"{num_saved} finished requests of the broken round are in requests.jsonl."
                )
        raise


def _end_badly(
    directory: RunDirectory, status: BadEnd, error: BaseException, reported_as: Status | None = None
) -> RunOutcome:
    """Record how the job ended. When even that fails, the message is still about the first error."""
    message = str(error) or ENDS_WITHOUT_MESSAGE.get(type(error), type(error).__name__)
    try:
        directory.mark(status, error)
    except ResultsError as lost:
        message = f"{message} (and the status could not be written: {lost})"
    return RunOutcome(reported_as or status, directory.path, message=message)
