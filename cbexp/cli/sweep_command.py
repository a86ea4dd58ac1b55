"""Runs a multirun: its cells in processes of their own, here or where a cluster puts them, or all in this one."""

from __future__ import annotations

import shlex
import time
import traceback
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cbexp.cli.cell_task import CellTask, start_cell
from cbexp.cli.checked_jobs import CheckedCommand
from cbexp.cli.composer import open_composer
from cbexp.cli.exit_codes import EXIT_INTERRUPTED, choose_sweep_exit_code
from cbexp.cli.launching import CellLauncher
from cbexp.cli.preflight import PRIMARY_CONFIG
from cbexp.cli.sweep_display import SweepDisplay, say_report
from cbexp.cli.sweep_plan import PlannedCell, SweepPlan, begin_sweep, resume_sweep
from cbexp.cli.terminal import report_error, say
from cbexp.display.units import format_path
from cbexp.errors import CbexpError
from cbexp.sweep.cells import Cell, write_cell
from cbexp.sweep.ends import CellEnd, read_end, record_end
from cbexp.sweep.folder import claim_folder, find_sweep, locked
from cbexp.sweep.process import CellProcess
from cbexp.sweep.resume import set_aside
from cbexp.sweep.scheduler import Scheduler
from cbexp.sweep.slots import find_slots
from cbexp.sweep.stop_signals import counting_stop_signals, interrupting_by_stop_signals


def run_sweep(command: CheckedCommand, args: Namespace, argv: Sequence[str], conf_dir: Path) -> int:
    """Run the cells of a checked multirun, say how they ended, and return the exit code.

    Raises:
        CbexpError: the sweep cannot be begun or resumed.
    """
    resume = command.jobs[0].config.resume
    if resume is None:
        sweep_folder = claim_folder(command.output_dir).absolute()
    else:
        name = None if command.has_dated_dir else command.output_dir.name
        sweep_folder = find_sweep(resume, command.output_dir.parent, name).absolute()
    with locked(sweep_folder):
        if resume is None:
            plan = begin_sweep(command, argv, sweep_folder)
            say(f"sweep of {plan.num_cells} cells: {format_path(sweep_folder)}")
        else:
            plan = resume_sweep(command, args, conf_dir, sweep_folder)
            say(f"resuming {format_path(sweep_folder)}: {len(plan.to_run)} of {plan.num_cells} cells to run")
        with open_composer(conf_dir, args.config_dir, args.config_name or PRIMARY_CONFIG) as composer:
            launcher = CellLauncher(composer, args.overrides, sweep_folder)
            with launcher.opened():
                ran = _run_cells(plan, command, launcher)
        return _conclude_unless_stopped(plan, command, sweep_folder, ran)


@dataclass(frozen=True)
class _Ran:
    """How cells ended by their index, as far as this process knows, and whether the sweep was stopped."""

    ends: Mapping[int, CellEnd]
    is_stopped: bool


def _run_cells(plan: SweepPlan, command: CheckedCommand, launcher: CellLauncher) -> _Ran:
    if not plan.to_run:
        return _Ran({}, is_stopped=False)
    if not command.is_local:
        return _submit(plan, launcher)
    if command.jobs[0].config.isolation == "none":
        return _run_in_this_process(plan, launcher)
    return _run_in_processes(plan, launcher)


def _run_in_processes(plan: SweepPlan, launcher: CellLauncher) -> _Ran:
    planned = {item.cell.index: item for item in plan.to_run}

    def start(cell: Cell, slot: Mapping[str, str]) -> CellProcess:
        set_aside(cell.folder)
        overrides = planned[cell.index].composed_from
        return launcher.run_here(cell.index, overrides, cell.folder, lambda: start_cell(cell, slot))

    slots = find_slots(item.cell.config.model.device for item in plan.to_run)
    with counting_stop_signals() as stops:
        ends = Scheduler(slots, start, _build_display(plan), stops).run([item.cell for item in plan.to_run])
    return _Ran(ends, is_stopped=stops.count > 0)


def _run_in_this_process(plan: SweepPlan, launcher: CellLauncher) -> _Ran:
    display, ends = _build_display(plan), {}
    with interrupting_by_stop_signals():
        for item in plan.to_run:
            display.on_start(item.cell, {})
            started_s = time.monotonic()
            end, is_stopped = _run_one_unless_stopped(item, launcher)
            ends[item.cell.index] = end
            display.on_end(item.cell, end, time.monotonic() - started_s)
            if is_stopped:
                return _Ran(ends, is_stopped=True)
    return _Ran(ends, is_stopped=False)


def _run_one_unless_stopped(item: PlannedCell, launcher: CellLauncher) -> tuple[CellEnd, bool]:
    """Run a cell in this process; return its end, and whether it is the last: a stop may come once it is completed."""
    try:
        end = _run_one_here(item, launcher)
        return end, end.status == "interrupted"
    except KeyboardInterrupt as stop:
        why = str(stop) or "stopped by Ctrl-C"
        return record_end(item.cell.folder, CellEnd("interrupted", why)), True


def _build_display(plan: SweepPlan) -> SweepDisplay:
    return SweepDisplay([item.cell for item in plan.cells], plan.num_cells)


def _run_one_here(item: PlannedCell, launcher: CellLauncher) -> CellEnd:
    """Run a cell in this process; whatever it raises but a stop is recorded, and does not end the sweep."""
    cell = item.cell
    try:
        set_aside(cell.folder)
        return launcher.run_here(cell.index, item.composed_from, cell.folder, lambda: _run(cell))
    except (CbexpError, OSError) as error:
        report_error(error)
        return record_end(cell.folder, CellEnd("failed", str(error)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one cell's must not hide the rest of the sweep
        traceback.print_exc()
        return record_end(cell.folder, CellEnd("failed", f"{type(error).__name__}: {error}"))


def _run(cell: Cell) -> CellEnd:
    from cbexp.experiment import run_experiment  # late: it loads torch

    write_cell(cell)
    outcome = run_experiment(cell.config, cell.folder, list(cell.overrides), cell.sweep)
    # `bad_config` matters only to the exit code of a single run, and a sweep has no `dry_run`.
    if outcome.status == "bad_config" or outcome.status == "dry_run":
        return CellEnd("failed", outcome.message)
    return CellEnd(outcome.status, outcome.message, outcome.summary)


def _submit(plan: SweepPlan, launcher: CellLauncher) -> _Ran:
    """Hand the cells to a cluster and wait for them."""
    say(f"submitting {len(plan.to_run)} cells; each one's folder has its log and status")
    cells = [item.cell for item in plan.to_run]
    for cell in cells:
        set_aside(cell.folder)
    jobs = [(item.composed_from, item.cell.folder) for item in plan.to_run]
    try:
        with interrupting_by_stop_signals():
            launcher.submit(jobs, CellTask(cells, plan.num_cells))
    except KeyboardInterrupt as stop:
        say(f"{stop}: jobs that were submitted go on; end them with the cluster's means, or resume later.")
        return _Ran({}, is_stopped=True)
    except Exception as error:  # noqa: BLE001 - submitit's own: it could not submit, or a job ended without a word
        say(f"the launcher gave up ({type(error).__name__}: {error}): jobs that it has submitted go on")
    return _Ran({}, is_stopped=False)


def _conclude_unless_stopped(plan: SweepPlan, command: CheckedCommand, sweep_folder: Path, ran: _Ran) -> int:
    try:
        with interrupting_by_stop_signals():
            return _conclude(plan, command, sweep_folder, ran)
    except KeyboardInterrupt as stop:
        say(
            f"{str(stop) or 'stopped by Ctrl-C'} after the last cell: all cells' records are in {sweep_folder}"
        )
        return EXIT_INTERRUPTED


def _conclude(plan: SweepPlan, command: CheckedCommand, sweep_folder: Path, ran: _Ran) -> int:
    ends = [ran.ends.get(item.cell.index) or read_end(item.cell.folder) for item in plan.cells]
    say_report(sweep_folder, ends, [read_end(folder) for folder in plan.others])
    _track_sweep(plan, command, sweep_folder)
    _say_upload(sweep_folder)
    return choose_sweep_exit_code(ends, ran.is_stopped)


def _say_upload(sweep_folder: Path) -> None:
    """Say how to upload what was logged offline; earlier attempts of cells have runs of their own."""
    if next(sweep_folder.rglob("offline-run-*"), None) is not None:
        where = shlex.quote(str(format_path(sweep_folder)))
        say(f"W&B offline; upload with: find {where} -name 'offline-run-*' | xargs wandb sync")


def _track_sweep(plan: SweepPlan, command: CheckedCommand, sweep_folder: Path) -> None:
    """Log the sweep as one run where its cells do not track themselves."""
    config = command.jobs[0].config.tracking
    if config.per_cell:
        return
    from cbexp.report import load_runs, run_rows
    from cbexp.tracking import log_sweep

    for warning in log_sweep(config, plan.name, sweep_folder, run_rows(load_runs([sweep_folder]))):
        say(f"warning: {warning}")
