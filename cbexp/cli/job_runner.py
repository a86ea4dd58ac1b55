"""Runs jobs in this process when Hydra calls: a single run, or the dry runs of a sweep."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from cbexp.cli.checked_jobs import CheckedCommand
from cbexp.cli.exit_codes import BAD_CONFIG
from cbexp.cli.objective import find_objective
from cbexp.cli.preflight import convert_config
from cbexp.cli.terminal import report_error, say
from cbexp.config import ExperimentConfig
from cbexp.errors import CbexpError, ConfigError, NotApplicableError
from cbexp.sweep.cells import CELL, Cell, write_cell


class JobRunner:
    """The jobs of one command line and how they ended (`statuses`, in order)."""

    def __init__(self, command: CheckedCommand) -> None:
        self._command = command
        self.statuses: list[str] = []

    def run(self, settings: DictConfig) -> float | None:
        """Run one job in the folder that Hydra made for it; return the objective, None unless it completed.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        job = self._command.jobs[len(self.statuses)]
        if self._command.is_multirun:
            say(f"\njob {job.index} of {len(self._command.jobs)}: {' '.join(job.own_overrides)}")
        status, objective = self._run_guarded(convert_config(settings), job.own_overrides, job.command)
        self.statuses.append(status)
        if status == "interrupted":
            raise KeyboardInterrupt
        return objective

    def _run_guarded(
        self, config: ExperimentConfig, overrides: list[str], command: str
    ) -> tuple[str, float | None]:
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        try:
            return _run(Cell(0, run_dir, tuple(overrides), command, config, None))
        except KeyboardInterrupt:
            return "interrupted", None
        except CbexpError as error:
            report_error(error)
            return _name_end(error), None
        except Exception:  # noqa: BLE001 - a bug: shown, and in the exit code
            traceback.print_exc()
            return "failed", None
        finally:
            if config.dry_run:
                _remove_traces(run_dir)
                if self._command.is_multirun:
                    (run_dir.parent / "multirun.yaml").unlink(missing_ok=True)
                    _remove_if_empty(run_dir.parent)


def _name_end(error: CbexpError) -> str:
    if isinstance(error, NotApplicableError):
        return "not_applicable"
    return BAD_CONFIG if isinstance(error, ConfigError) else "failed"


def _run(cell: Cell) -> tuple[str, float | None]:
    # Late, because it loads torch, for which --help and an error in the configuration need not wait.
    from cbexp.experiment import run_experiment

    if not cell.config.dry_run and not (cell.folder / CELL).exists():  # a used folder is refused by the run
        write_cell(cell)
    outcome = run_experiment(cell.config, cell.folder, list(cell.overrides), None)
    return outcome.status, find_objective(cell.config, outcome.summary)


def _remove_traces(run_dir: Path) -> None:
    """Hydra makes a folder for every job; a dry run has nothing to put there."""
    shutil.rmtree(run_dir / ".hydra", ignore_errors=True)
    _remove_if_empty(run_dir)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
