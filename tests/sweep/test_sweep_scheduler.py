"""Slots, and a scheduler in bad weather: time-outs, signals, and processes that are not to be had."""

import errno
import json
import os
import signal
from datetime import datetime
from types import SimpleNamespace

import pytest

from cbexp.cli import sweep_command
from cbexp.config import ExperimentConfig
from cbexp.errors import ResultsError
from cbexp.sweep import slots
from cbexp.sweep.cells import Cell, write_cell
from cbexp.sweep.ends import CellEnd, read_end
from cbexp.sweep.process import CellProcess
from cbexp.sweep.scheduler import Scheduler
from cbexp.sweep.stop_signals import StopRequests, counting_stop_signals
from tests.sweep.conftest import HERE, REPOSITORY


@pytest.mark.parametrize(
    ("visible", "printed", "devices", "expected"),
    [
        (None, "0\n", ["auto"], [None]),
        (None, "0\n1\n", ["auto", "cuda"], ["0", "1"]),
        (None, "0\n1\n", ["auto", "cuda:1"], [None]),
        ("2, 5", "0\n1\n", ["auto"], ["2", "5"]),
        ("", "0\n1\n", ["auto"], [None]),
        ("0,1,1,-1,2", None, ["auto"], ["0", "1"]),
        (None, "No devices were found\n", ["auto"], [None]),
    ],
)
def test_one_slot_a_visible_gpu_and_one_without(monkeypatch, visible, printed, devices, expected):
    monkeypatch.setattr(slots, "output_of", lambda *command: printed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = slots.find_slots(devices)
    assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in found] == expected
    assert all(("CUDA_DEVICE_ORDER" in slot) == (visible is None and bool(slot)) for slot in found)


def test_cells_run_side_by_side_on_their_gpus(sweeps):
    sweeps.ends = {0: "meet", 1: "meet"}
    sweeps.variables = {"CUDA_VISIBLE_DEVICES": "4,6"}
    done = sweeps.run("-m", "seed=0,1,2,3")
    assert done.code == 0, done.err
    gpus = {call["seed"]: call["gpus"] for call in sweeps.calls}
    assert {gpus[0], gpus[1]} == set(gpus.values()) == {"4", "6"}
    assert "on GPU 6" in done.out


# The scheduler


@pytest.fixture
def build_cell(tmp_path, monkeypatch):
    """Builds cells whose processes run the fake job, which ends as `how` says."""
    ends = {}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(REPOSITORY)]))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls.jsonl"))

    def build(how, **settings):
        seed = len(ends)
        ends[seed] = how
        monkeypatch.setenv("FAKE_ENDS", json.dumps(ends))
        config = ExperimentConfig(seed=seed, **settings)
        return Cell(seed, tmp_path / f"{seed}_cell", (f"seed={seed}",), "command", config, None)

    return build


def start(cell, slot):
    write_cell(cell)
    return CellProcess(cell, slot)


def schedule(*cells, start=start, act=lambda process: None):
    observer = SimpleNamespace(on_progress=act)
    observer.on_start = observer.on_end = observer.on_stop = lambda *event: None
    return Scheduler([{}], start, observer, StopRequests(), stop_grace_s=0.2).run(cells)


def test_cell_that_is_held_before_it_wrote_a_status_is_killed_and_its_start_is_known(build_cell):
    cell = build_cell("complete", cell_timeout_s=1.5)
    ends = schedule(cell, act=lambda process: os.kill(process.pid, signal.SIGSTOP))
    assert ends[0] == CellEnd("timed_out", "not done after cell_timeout_s=1.5 seconds")
    status = json.loads((cell.folder / "status.json").read_text())
    started_at, ended_at = (datetime.fromisoformat(status[key]) for key in ("started_at", "ended_at"))
    assert (ended_at - started_at).total_seconds() >= 1
    assert (status["status"], status["pid"]) == ("timed_out", None)


def test_cells_that_cannot_start_say_so_and_do_not_keep_the_next_one(build_cell):
    def start_the_last(cell, slot):
        if cell.index == 0:
            raise ResultsError("0 MiB free there")  # no folder either
        if cell.index == 1:
            write_cell(cell)
            raise OSError(errno.EAGAIN, "no process to be had")
        return start(cell, slot)

    cells = [build_cell("complete") for _ in range(3)]
    ends = schedule(*cells, start=start_the_last)
    assert [ends[index].status for index in range(3)] == ["failed", "failed", "completed"]
    assert "0 MiB free there (and the status could not be written" in ends[0].message
    assert "could not be started: [Errno 11] no process" in read_end(cells[1].folder).message


# Signals


def test_signals_are_counted_but_for_ignored_ones_and_handlers_come_back():
    """Under nohup SIGHUP is ignored."""
    wanted = {signal.SIGHUP: signal.SIG_IGN}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        wanted[number] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        said = []
        with counting_stop_signals() as stops:
            for number in wanted:
                os.kill(os.getpid(), number)
                said.append(stops.why)
        assert {number: signal.getsignal(number) for number in wanted} == wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert said == ["", *(f"stopped by {name}" for name in ("Ctrl-C", "SIGTERM", "SIGUSR1", "SIGUSR2"))]
    assert stops.count == 4


def test_stop_while_the_report_is_made_is_no_crash(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sweep_command, "_conclude", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    ran = sweep_command._Ran({}, is_stopped=False)
    assert sweep_command._conclude_unless_stopped(None, None, tmp_path, ran) == 130
    assert capsys.readouterr().out.startswith("stopped by SIGTERM after the last cell")
