"""Whatever becomes of a cell is in its folder, the sweep goes on, and its table and exit code say so."""

import json
import re
import subprocess
import sys

import pytest

from cbexp import tracking
from cbexp.run_status import begin_status, find_live_owner, write_status
from cbexp.sweep.ends import CellEnd, conclude_end, describe_signal, read_end, record_end
from tests.sweep.conftest import is_running, wait_until

EARLIER, LATER = "2026-01-02T03:04:05+00:00", "2026-01-02T03:04:09+00:00"
GONE = 2**22 + 1  # no process has such an id


def test_every_way_to_end_is_recorded_and_the_sweep_goes_on(sweeps):
    expected = {
        "complete": ("completed", ""),
        "fail": ("failed", "there are no rows"),
        "out_of_memory": ("out_of_memory", "asked for too much"),
        "not_applicable": ("not_applicable", "there is no GPU"),
        "sigkill": ("killed", "SIGKILL"),
        "die_before_status": ("failed", "exit code 3"),
        "no_place": ("failed", "no place to write to"),
        "bug": ("failed", "ZeroDivisionError: a bug"),
    }
    sweeps.ends = dict(enumerate([*expected, "complete"]))
    done = sweeps.run("-m", "seed=range(0,9)")
    assert (done.code, done.err) == (1, "")
    statuses = {index: status for index, (status, _) in enumerate(expected.values())} | {8: "completed"}
    assert sweeps.statuses() == statuses
    for index, (_, message) in enumerate(expected.values()):
        written = sweeps.status(index).get("message", "")
        assert message in written
        assert written in done.out
    assert "no memory left" in sweeps.status(4)["message"]
    assert "cell of seed 5: die_before_status" in sweeps.status(5)["message"]
    assert "Traceback" in (sweeps.cell_folder(7) / "log.txt").read_text()
    table = re.findall(r"^ *\d+ +(seed=\d+) +(\w+)", done.out, re.MULTILINE)
    assert dict(table) == {f"seed={index}": status for index, status in statuses.items()}
    assert "3 of 9 cells are done" in done.out


def test_cell_in_the_sweeps_process_ends_no_sweep(sweeps):
    sweeps.ends = {1: "exit", 2: "fail", 3: "bug"}
    done = sweeps.run_here("-m", "seed=1,2,3,4")
    assert done.code == 1
    assert sweeps.statuses() == {0: "failed", 1: "failed", 2: "failed", 3: "completed"}
    for index, message in enumerate(["SystemExit: 0", "no rows", "ZeroDivisionError: a bug"]):
        assert message in sweeps.status(index)["message"]
    assert "log.txt" not in done.out  # there is none
    assert done.err.count("Traceback") == 2  # an error that is foreseen has none


def test_sweep_without_a_run_per_cell_is_logged_as_one(sweeps, monkeypatch):
    logged = []
    monkeypatch.setattr(tracking, "log_sweep", lambda *given: logged.append(given) or ["W&B: it was slow"])
    sweeps.ends = {2: "fail"}
    done = sweeps.run_here("-m", "seed=1,2", "tracking.per_cell=false", tracking="tracking=offline")
    ((config, name, folder, rows),) = logged
    assert (config.mode, name, folder) == ("offline", f"default_{folder.name}", sweeps.sweep_folder)
    labels = [(row["label"], row["status"]) for row in rows]
    assert sorted(labels) == [("seed=1", "completed"), ("seed=2", "failed")]
    assert "warning: W&B: it was slow" in done.out


# What a parent concludes


def mark(folder, status, **more):
    write_status(folder, begin_status() | {"status": status, "pid": GONE, **more})


@pytest.mark.parametrize(
    ("written", "returncode", "reason", "expected"),
    [
        (None, 0, None, "failed"),
        (None, -9, None, "killed"),
        (None, 1, "interrupted", "interrupted"),
        (None, -15, "timed_out", "timed_out"),
        ("running", -9, None, "killed"),
        ("failed", -11, None, "failed"),
        ("out_of_memory", 0, "timed_out", "out_of_memory"),
        ("interrupted", 0, "timed_out", "timed_out"),
        ("interrupted", 0, None, "interrupted"),
        ("completed", -9, None, "killed"),  # there is no summary.json
    ],
)
def test_end_of_a_cell_is_its_own_word_or_what_is_plain_to_see(
    tmp_path, written, returncode, reason, expected
):
    tmp_path.joinpath("log.txt").write_text("first\nloading 10%\rlast words\n\n")
    if written:
        mark(tmp_path, written, message="its own words", started_at=LATER)
    end = conclude_end(tmp_path, returncode, EARLIER, reason, "the reason")
    recorded = json.loads((tmp_path / "status.json").read_text())
    assert end.status == recorded["status"] == expected
    assert recorded["started_at"] == (LATER if written else EARLIER)  # the cell knows best when it began
    if expected == reason:
        assert end.message == "the reason"
    elif returncode >= 0 and written in (None, "running"):
        assert end.message.endswith("log.txt: last words")
    elif returncode < 0 and expected == "killed":
        assert end.message == describe_signal(-returncode)


def test_completed_cell_stays_completed_whatever_ended_its_process(tmp_path):
    mark(tmp_path, "completed")
    (tmp_path / "summary.json").write_text('{"decode_tps": 12}')
    stopped = CellEnd("interrupted", "stopped between its last record and its end")
    for end in (conclude_end(tmp_path, -11, EARLIER, "timed_out", "late"), record_end(tmp_path, stopped)):
        assert (end.status, end.output_tokens_per_s, end.message) == ("completed", 12.0, None)
        assert read_end(tmp_path).status == "completed"


def test_owner_of_a_status_lives_only_if_it_is_the_same_process():
    mine = begin_status()
    assert find_live_owner(mine) is not None
    assert find_live_owner(mine | {"status": "completed"}) is None
    assert find_live_owner(mine | {"pid": GONE}) is None
    assert find_live_owner(mine | {"host": "elsewhere"}) is not None
    # The number of this process, at a time before it was born: it is another's now.
    assert find_live_owner(mine | {"started_at": "2020-01-01T00:00:00+00:00"}) is None
    assert find_live_owner({"status": "running"}) is None
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: not is_running(zombie.pid))
    assert find_live_owner(begin_status() | {"pid": zombie.pid}) is None
    zombie.wait()
