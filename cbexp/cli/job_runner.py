"""Runs the jobs that Hydra calls with, one after another; none of them takes the others down."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from cbexp.cli.composer import list_overrides
from cbexp.cli.preflight import CheckedCommand, convert_config
from cbexp.cli.sweep import BAD_CONFIG, JobResult
from cbexp.config import SweepInfo
from cbexp.errors import CbexpError, ConfigError


class JobRunner:
    """The jobs of one command line and how they ended (`results`, in order)."""

    def __init__(self, command: CheckedCommand) -> None:
        self._command = command
        self.results: list[JobResult] = []

    def run(self, settings: DictConfig) -> None:
        """Run one job in the folder that Hydra made for it; raises KeyboardInterrupt to stop a sweep."""
        overrides = list_overrides(HydraConfig.get(), "task")
        if self._command.is_multirun:
            say(f"\njob {len(self.results)} of {len(self._command.jobs)}: {' '.join(overrides)}")
        result = self._run_guarded(settings, overrides)
        self.results.append(result)
        if result.status == "interrupted":
            raise KeyboardInterrupt

    def _run_guarded(self, settings: DictConfig, overrides: list[str]) -> JobResult:
        try:
            return self._run(settings, overrides)
        except KeyboardInterrupt:
            return JobResult(overrides, "interrupted")
        except CbexpError as error:
            report_error(error)
            return JobResult(overrides, BAD_CONFIG if isinstance(error, ConfigError) else "failed")
        except Exception:  # noqa: BLE001 - a bug in one job must not hide the rest of the sweep
            traceback.print_exc()
            return JobResult(overrides, "failed")

    def _run(self, settings: DictConfig, overrides: list[str]) -> JobResult:
        # Late, because it loads torch, for which --help and an error in the configuration need not wait.
        from cbexp.experiment import run_experiment

        config = convert_config(settings)
        node = HydraConfig.get()
        sweep = None
        if self._command.is_multirun:
            group = config.tracking.group or f"{config.name}_{Path(node.sweep.dir).name}"
            sweep = SweepInfo(group, len(self._command.jobs), node.job.num)
        run_dir = Path(node.runtime.output_dir)
        try:
            outcome = run_experiment(config, run_dir, overrides, sweep)
        finally:
            if config.dry_run:
                _remove_traces(run_dir)
        return JobResult(overrides, outcome.status, outcome.summary)


def _remove_traces(run_dir: Path) -> None:
    """Hydra makes a folder for every job; a dry run has nothing to put there."""
    shutil.rmtree(run_dir / ".hydra", ignore_errors=True)
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()


def say(text: str) -> None:
    """Write a line for the user, at once; when its reader has gone (`| head`), the sweep goes on unseen."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


def silence_stdout() -> None:
    """Write nothing more to standard output, whose reader has gone."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def report_error(error: CbexpError) -> None:
    """Write an error for the user as its message alone; with `HYDRA_FULL_ERROR=1` the traceback comes first."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    sys.stderr.write(f"cbexp: {error}\n")
