"""Whatever becomes of a cell is in its folder, the sweep goes on, and its table and exit code say so."""

import errno
import json
import re
import subprocess
import sys

import pytest

from cbexp import tracking
from cbexp.cli.exit_codes import choose_sweep_exit_code
from cbexp.run_status import begin_status, find_live_owner, write_status
from cbexp.sweep.ends import CellEnd, conclude_end, describe_signal, read_end, record_end
from tests.sweep.conftest import is_running, wait_until

EARLIER = "2026-01-02T03:04:05+00:00"


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


def test_cell_that_hangs_is_timed_out(sweeps):
    sweeps.ends = {1: "hang"}
    assert sweeps.run("-m", "seed=1", "cell_timeout_s=1").code == 1
    assert sweeps.statuses() == {0: "timed_out"}
    assert sweeps.status(0)["message"] == "not done after cell_timeout_s=1 seconds"


@pytest.mark.parametrize(
    ("how", "message"), [("exit", "SystemExit: 0"), ("bug", "ZeroDivisionError: a bug"), ("fail", "no rows")]
)
def test_cell_in_the_sweeps_process_ends_no_sweep(sweeps, how, message):
    sweeps.ends = {1: how}
    done = sweeps.run_here("-m", "seed=1,2")
    assert done.code == 1
    assert sweeps.statuses() == {0: "failed", 1: "completed"}
    assert message in sweeps.status(0)["message"]
    assert "log.txt" not in done.out  # there is none
    assert ("Traceback" in done.err) == (how != "fail")


def test_sweep_without_a_run_per_cell_is_logged_as_one(sweeps, monkeypatch):
    logged = []
    monkeypatch.setattr(tracking, "log_sweep", lambda *given: logged.append(given) or ["W&B: it was slow"])
    sweeps.ends = {2: "fail"}
    done = sweeps.run_here("-m", "seed=1,2", "tracking.per_cell=false", tracking="tracking=offline")
    ((config, name, folder, rows),) = logged
    assert (config.mode, folder) == ("offline", sweeps.sweep_folder)
    assert name == f"default_{folder.name}"
    labels = [(row["label"], row["status"]) for row in rows]
    assert sorted(labels) == [("seed=1", "completed"), ("seed=2", "failed")]
    assert "warning: W&B: it was slow" in done.out


@pytest.mark.parametrize(
    ("statuses", "is_stopped", "code"),
    [
        (["completed", "not_applicable"], False, 0),
        (["completed", "killed"], False, 1),
        (["timed_out"], False, 1),
        (["interrupted", "completed"], False, 1),
        (["completed", "not_run"], False, 1),
        (["completed"], True, 130),
    ],
)
def test_exit_code_of_a_sweep(statuses, is_stopped, code):
    assert choose_sweep_exit_code([CellEnd(status) for status in statuses], is_stopped) == code


# What a parent concludes


def mark(folder, status, **more):
    folder.mkdir(parents=True, exist_ok=True)
    write_status(folder, begin_status() | {"status": status, **more})


@pytest.mark.parametrize(
    ("written", "returncode", "reason", "expected"),
    [
        (None, 0, None, "failed"),
        (None, 1, None, "failed"),
        (None, -9, None, "killed"),
        (None, 1, "interrupted", "interrupted"),
        (None, -15, "timed_out", "timed_out"),
        ("running", -9, None, "killed"),
        ("running", 1, None, "failed"),
        ("running", -9, "timed_out", "timed_out"),
        ("running", -9, "interrupted", "interrupted"),
        ("failed", 1, None, "failed"),
        ("failed", -11, None, "failed"),
        ("failed", 1, "interrupted", "failed"),
        ("out_of_memory", 0, "timed_out", "out_of_memory"),
        ("interrupted", 0, "timed_out", "timed_out"),
        ("interrupted", 0, None, "interrupted"),
        ("not_applicable", 0, "interrupted", "not_applicable"),
        ("completed", -9, None, "killed"),  # there is no summary.json
    ],
)
def test_end_of_a_cell_is_its_own_word_or_what_is_plain_to_see(
    tmp_path, written, returncode, reason, expected
):
    tmp_path.joinpath("log.txt").write_text("first\nlast words\n\n")
    if written:
        mark(tmp_path, written, message="its own words", pid=2**22 + 1)
    end = conclude_end(tmp_path, returncode, EARLIER, reason, "the reason")
    assert end.status == expected
    assert json.loads((tmp_path / "status.json").read_text())["status"] == expected
    if expected == reason:
        assert end.message == "the reason"
    elif returncode >= 0 and written in (None, "running"):
        assert "last words" in end.message
    elif returncode < 0 and expected == "killed":
        assert end.message == describe_signal(-returncode)


@pytest.mark.parametrize(
    "conclude",
    [
        lambda folder: conclude_end(folder, -11, EARLIER, "timed_out", "late"),
        lambda folder: record_end(
            folder, CellEnd("interrupted", "stopped between its last record and its end")
        ),
    ],
)
def test_completed_cell_stays_completed_whatever_ended_its_process(tmp_path, conclude):
    mark(tmp_path, "completed")
    (tmp_path / "summary.json").write_text('{"decode_tps": 12}')
    end = conclude(tmp_path)
    assert (end.status, end.output_tokens_per_s, end.message) == ("completed", 12.0, None)
    assert read_end(tmp_path).status == "completed"


@pytest.mark.parametrize("own", [None, "2026-01-02T03:04:09+00:00"])
def test_cell_knows_best_when_it_began(tmp_path, own):
    if own is not None:
        mark(tmp_path, "running", started_at=own, pid=2**22 + 1)
    conclude_end(tmp_path, -9, EARLIER, "timed_out", "late")
    assert json.loads((tmp_path / "status.json").read_text())["started_at"] == (own or EARLIER)


def test_last_line_of_a_log_is_its_last_words_and_short(tmp_path):
    (tmp_path / "log.txt").write_text("loading 10%\rloading 20%\n\n")
    assert conclude_end(tmp_path, 0, EARLIER, None, "").message.endswith("log.txt: loading 20%")
    (tmp_path / "status.json").unlink()
    (tmp_path / "log.txt").write_text("z" * 10_000)
    assert len(conclude_end(tmp_path, 0, EARLIER, None, "").message) < 500


def test_end_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    def full(folder, values):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("cbexp.sweep.ends.write_status", full)
    end = record_end(tmp_path, CellEnd("killed", "by a signal"))
    assert end.message == "by a signal (and the status could not be written: no room)"


def test_owner_of_a_status_lives_only_if_it_is_the_same_process():
    mine = begin_status()
    assert find_live_owner(mine) is not None
    assert find_live_owner(mine | {"status": "completed"}) is None
    assert find_live_owner(mine | {"pid": 2**22 + 1}) is None
    assert find_live_owner(mine | {"host": "elsewhere"}) is not None
    # The number of this process, at a time before it was born: it is another's now.
    assert find_live_owner(mine | {"started_at": "2020-01-01T00:00:00+00:00"}) is None
    assert find_live_owner({"status": "running"}) is None


def test_zombie_is_no_owner():
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: not is_running(process.pid))
    assert find_live_owner(begin_status() | {"pid": process.pid}) is None
    process.wait()
