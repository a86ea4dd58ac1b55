"""Slots, and a scheduler in bad weather: time-outs, signals, and processes that are not to be had."""

import errno
import os
import signal
from types import SimpleNamespace

import pytest

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


def test_cells_that_cannot_start_do_not_keep_the_next_one_and_one_that_does_not_end_is_killed(
    tmp_path, monkeypatch
):
    variables = {"PYTHONPATH": f"{HERE}{os.pathsep}{REPOSITORY}", "FAKE_LOG": str(tmp_path / "calls.jsonl")}
    for name, value in (variables | {"FAKE_ENDS": "{}"}).items():
        monkeypatch.setenv(name, value)

    def start(cell, slot):
        if cell.index == 0:
            raise ResultsError("0 MiB free there")  # no folder either
        write_cell(cell)
        if cell.index == 1:
            raise OSError(errno.EAGAIN, "no process to be had")
        return CellProcess(cell, slot)

    observer = SimpleNamespace(on_progress=lambda process: os.kill(process.pid, signal.SIGSTOP))
    observer.on_start = observer.on_end = observer.on_stop = lambda *event: None
    config = ExperimentConfig(cell_timeout_s=1.5)
    cells = [Cell(index, tmp_path / f"{index}_cell", (), "command", config, None) for index in range(3)]
    ends = Scheduler([{}], start, observer, StopRequests(), stop_grace_s=0.2).run(cells)
    assert "0 MiB free there (and the status could not be written" in ends[0].message
    assert "could not be started: [Errno 11] no process" in read_end(cells[1].folder).message
    assert ends[2] == CellEnd("timed_out", "not done after cell_timeout_s=1.5 seconds")
    assert [read_end(cell.folder).status for cell in cells[1:]] == ["failed", "timed_out"]


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
