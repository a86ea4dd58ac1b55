"""The parts of a sweep by themselves: identity, ends, claims, provenance, slots, and a scheduler in bad weather."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest

from cbexp.cli import sweep_command
from cbexp.cli.composer import name_job_folder
from cbexp.cli.exit_codes import choose_sweep_exit_code
from cbexp.cli.launching import quote
from cbexp.config import (
    ArtifactsConfig,
    CacheConfig,
    ExperimentConfig,
    TrackingConfig,
    from_plain_dict,
    to_plain_dict,
)
from cbexp.errors import ConfigError, ResultsError
from cbexp.run_status import begin_status, find_live_owner, write_status
from cbexp.sweep import slots
from cbexp.sweep.cells import Cell, hash_config, read_cell, write_cell
from cbexp.sweep.ends import CellEnd, conclude_end, describe_signal, read_end, record_end
from cbexp.sweep.folder import claim_folder, find_sweep
from cbexp.sweep.manifest import Provenance, build_manifest, find_provenance, read_manifest, write_manifest
from cbexp.sweep.process import CellProcess
from cbexp.sweep.resume import list_differences, list_missing, set_aside
from cbexp.sweep.scheduler import Scheduler
from cbexp.sweep.stop_signals import StopRequests, counting_stop_signals
from tests.sweep.conftest import HERE, REPOSITORY, is_running, wait_until

EARLIER = "2026-01-02T03:04:05+00:00"


def build_cell(folder, seed=0, **settings):
    return Cell(
        seed,
        folder / f"{seed}_cell",
        (f"seed={seed}",),
        "command",
        ExperimentConfig(seed=seed, **settings),
        None,
    )


# Identity


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"stats_path": "s.json"},
        {"tracking": TrackingConfig(mode="disabled", tags=["a"])},
        {"isolation": "none"},
        {"cell_timeout_s": 5.0},
        {"resume": "latest", "resume_force": True},
    ],
)
def test_where_results_go_is_no_part_of_a_cell(changes):
    assert hash_config(ExperimentConfig(**changes)) == hash_config(ExperimentConfig())


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"num_rounds": 3},
        {"cache": CacheConfig(num_tokens=4096)},
        {"artifacts": ArtifactsConfig("none")},
    ],
)
def test_what_is_run_and_recorded_is_the_cell(changes):
    assert hash_config(ExperimentConfig(**changes)) != hash_config(ExperimentConfig())


def test_cell_survives_its_files(tmp_path):
    config = ExperimentConfig(seed=3, cell_timeout_s=1.5)
    config.model.architecture = {
        "id2label": {0: "a", 1: "ü ${x}"},
        "eps": 1e-06,
        "none": None,
        "text": "1e-06",
    }
    config.dataset.chat_template = "line\n\ttab 'quote' \"double\" \x07 日本"
    cell = Cell(3, tmp_path / "cell", ("a=1",), "python -m cbexp a=1", config, None)
    write_cell(cell)
    assert read_cell(cell.folder) == cell
    assert from_plain_dict(to_plain_dict(config)) == config
    assert read_cell(cell.folder).cell_hash == cell.cell_hash


def test_folder_of_a_job_is_cut_by_bytes():
    name = name_job_folder(7, "tracking.tags=" + "語" * 100)
    assert len(name.encode()) <= 80
    assert name.startswith("7_tags=語")


@pytest.mark.parametrize(
    "text", ["a b,c", "it's", "back\\", "q\\'x", "ü/ö=1", "a${now:x}b", "[1]", "null", "{a:b}"]
)
def test_quoted_value_means_itself(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    value = OverridesParser.create().parse_override(f"key={quote(text)}").value()
    assert OmegaConf.create({"key": value}).key == text


# Ends


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


def test_completed_cell_stays_completed_whatever_ended_its_process(tmp_path):
    mark(tmp_path, "completed")
    (tmp_path / "summary.json").write_text('{"decode_tps": 12}')
    end = conclude_end(tmp_path, -11, EARLIER, "timed_out", "late")
    assert (end.status, end.output_tokens_per_s, end.message) == ("completed", 12.0, None)


def test_stop_between_last_record_and_end_keeps_the_cell_completed(tmp_path):
    mark(tmp_path, "completed")
    (tmp_path / "summary.json").write_text('{"decode_tps": 12}')
    end = record_end(tmp_path, CellEnd("interrupted", "stopped by Ctrl-C"))
    assert (end.status, end.output_tokens_per_s) == ("completed", 12.0)
    assert read_end(tmp_path).status == "completed"


def test_cell_that_wrote_no_status_began_when_its_process_did(tmp_path):
    conclude_end(tmp_path, -9, EARLIER, "timed_out", "late")
    assert json.loads((tmp_path / "status.json").read_text())["started_at"] == EARLIER


def test_cell_that_wrote_its_status_knows_best_when_it_began(tmp_path):
    mark(tmp_path, "running", started_at="2026-01-02T03:04:09+00:00", pid=2**22 + 1)
    conclude_end(tmp_path, -9, EARLIER, "timed_out", "late")
    assert json.loads((tmp_path / "status.json").read_text())["started_at"] == "2026-01-02T03:04:09+00:00"


def test_last_line_of_a_log_is_its_last_words_and_short(tmp_path):
    (tmp_path / "log.txt").write_text("loading 10%\rloading 20%\n\n")
    assert conclude_end(tmp_path, 0, EARLIER, None, "").message.endswith("log.txt: loading 20%")
    (tmp_path / "status.json").unlink()
    (tmp_path / "log.txt").write_text("z" * 10_000)
    assert len(conclude_end(tmp_path, 0, EARLIER, None, "").message) < 500


def test_end_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    def full(folder, values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("cbexp.sweep.ends.write_status", full)
    end = record_end(tmp_path, CellEnd("killed", "by a signal"))
    assert end.message == "by a signal (and the status could not be written: No space left on device)"


def test_owner_of_a_status_lives_only_if_it_is_the_same_process():
    mine = begin_status()
    assert find_live_owner(mine) is not None
    assert find_live_owner(mine | {"status": "completed"}) is None
    assert find_live_owner(mine | {"pid": 2**22 + 1}) is None
    assert find_live_owner(mine | {"host": "elsewhere"}) is not None
    # The number of this process, at a time before it was born: it is another's now.
    assert find_live_owner(mine | {"started_at": "2020-01-01T00:00:00+00:00"}) is None
    assert find_live_owner({"status": "running"}) is None


def test_zombie_is_no_owner(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: not is_running(process.pid))
    assert find_live_owner(begin_status() | {"pid": process.pid}) is None
    process.wait()


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


# Folders and manifests


def test_folder_is_claimed_once_however_many_ask(tmp_path):
    claimed = []
    threads = [
        threading.Thread(target=lambda: claimed.append(claim_folder(tmp_path / "deep" / "sweep")))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(claimed)) == 20


def test_unwritable_place_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"hydra\.sweep\.dir"):
        claim_folder(tmp_path / "file" / "sweep")


@pytest.mark.parametrize("path", [".", "..", "/"])
def test_folder_that_a_sweep_cannot_have_for_itself_is_refused(path):
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir"):
        claim_folder(Path(path))


def test_damaged_sweep_does_not_let_an_older_one_pass_for_the_latest(tmp_path):
    for name, content in (("a", '{"created_at": "2020-01-01T00:00:00+00:00"}'), ("b", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").write_text(content)
    assert find_sweep("latest", tmp_path) == tmp_path / "b"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "cells": [{}]}']
)
def test_damaged_manifest_is_one_message(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ConfigError, match=r"sweep\.json is damaged"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("commit", 1),
        ("versions", None),
        ("resumed", None),
        ("argv", 3),
        ("name", 3),
        ("cells", [{"index": None, "cell_hash": "a", "folder": "a", "overrides": [], "command": ""}]),
        ("cells", [{"index": 0, "cell_hash": [], "folder": "a", "overrides": [], "command": ""}]),
        ("cells", [{"index": 0, "cell_hash": "a", "folder": None, "overrides": [], "command": ""}]),
    ],
)
def test_manifest_of_other_types_is_one_message(tmp_path, key, value):
    write_manifest(tmp_path, build_manifest("name", ["-m"], [], tmp_path, find_provenance()))
    path = tmp_path / "sweep.json"
    assert read_manifest(tmp_path).name == "name"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=r"sweep\.json is damaged"):
        read_manifest(tmp_path)


def test_every_difference_of_code_is_named():
    current = find_provenance()
    assert list(list_differences(current, current)) == []
    begun = Provenance("0123456789abcdef", False, "0123", current.versions | {"torch": "1.0", "gone": "2"})
    now_without = dataclasses.replace(current, commit=None, changes_hash=None)
    told = list(list_differences(begun, now_without))
    assert told[0] == "commit 0123456789ab (now unknown)"
    assert told[1] == "other uncommitted changes than there are now"
    assert told[2].startswith("torch 1.0 (now 2")
    assert told[3] == "gone 2 (now not installed)"


def test_completed_cell_is_never_set_aside(tmp_path):
    cell = build_cell(tmp_path)
    mark(cell.folder, "completed")
    (cell.folder / "summary.json").write_text("{}")
    with pytest.raises(ResultsError, match="never overwritten"):
        set_aside(cell.folder)
    assert list_missing([cell], is_forced=False) == []


def test_running_cell_of_this_host_is_refused_even_when_forced(tmp_path):
    cell = build_cell(tmp_path)
    mark(cell.folder, "running")
    with pytest.raises(ResultsError, match=f"process {os.getpid()}"):
        list_missing([cell], is_forced=True)


# Slots


@pytest.mark.parametrize(
    ("visible", "printed", "devices", "expected"),
    [
        (None, None, ["auto"], [None]),
        (None, "0\n", ["auto"], [None]),
        (None, "0\n1\n", ["auto", "cuda"], ["0", "1"]),
        (None, "0\n1\n", ["cpu"], [None]),
        (None, "0\n1\n", ["auto", "cuda:1"], [None]),
        ("2, 5", "0\n1\n", ["auto"], ["2", "5"]),
        ("3", "0\n1\n", ["auto"], [None]),
        ("", "0\n1\n", ["auto"], [None]),
        ("0,1,-1,2", None, ["auto"], ["0", "1"]),
        ("1,1,0", None, ["auto"], ["1", "0"]),
        ("GPU-aa,GPU-bb", None, ["auto"], ["GPU-aa", "GPU-bb"]),
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
    sweeps.ends = dict.fromkeys(range(4), "slow")
    sweeps.variables = {"CUDA_VISIBLE_DEVICES": "4,6"}
    done = sweeps.run("-m", "seed=0,1,2,3", "tracking=disabled")
    assert done.code == 0, done.err
    assert sorted(call["gpus"] for call in sweeps.calls) == ["4", "4", "6", "6"]
    first, second, *_ = sweeps.calls
    assert abs(first["started_s"] - second["started_s"]) < 1.4  # a cell takes longer
    assert first["gpus"] != second["gpus"]
    assert "on GPU 6" in done.out


# The scheduler


class SilentObserver:
    def on_start(self, cell, slot):
        pass

    def on_progress(self, process):
        pass

    def on_end(self, cell, end, elapsed_s):
        pass

    def on_stop(self, why, num_running):
        pass


@pytest.fixture
def fake_job(tmp_path, monkeypatch):
    """Let cells that are started from here run the fake job; returns how to say their ends."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(REPOSITORY)]))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls.jsonl"))
    return lambda ends: monkeypatch.setenv("FAKE_ENDS", json.dumps(ends))


def start(cell, slot):
    write_cell(cell)
    return CellProcess(cell, slot)


def test_cell_that_ignores_its_time_out_is_killed(tmp_path, fake_job):
    fake_job({0: "ignore_signals"})
    cell = build_cell(tmp_path, cell_timeout_s=1.5)
    started_s = time.monotonic()
    ends = Scheduler([{}], start, SilentObserver(), StopRequests(), stop_grace_s=0.5).run([cell])
    assert ends[0] == CellEnd("timed_out", "not done after cell_timeout_s=1.5 seconds")
    assert 2.0 <= time.monotonic() - started_s < 10
    assert read_end(cell.folder).status == "timed_out"


def test_cell_that_is_held_before_it_wrote_a_status_is_killed_and_its_start_is_known(tmp_path, fake_job):
    class HoldingObserver(SilentObserver):
        def on_progress(self, process):
            os.kill(process.pid, signal.SIGSTOP)

    fake_job({})
    cell = build_cell(tmp_path, cell_timeout_s=2.0)
    ends = Scheduler([{}], start, HoldingObserver(), StopRequests(), stop_grace_s=0.2).run([cell])
    assert ends[0].status == "timed_out"
    status = json.loads((cell.folder / "status.json").read_text())
    started_at, ended_at = (datetime.fromisoformat(status[key]) for key in ("started_at", "ended_at"))
    assert 1 <= (ended_at - started_at).total_seconds() < 20
    assert status["pid"] is None


def test_cell_that_ignores_a_stop_is_killed_after_its_grace(tmp_path, fake_job):
    fake_job({0: "ignore_signals"})
    cell = build_cell(tmp_path)
    with counting_stop_signals() as stops:
        scheduler = Scheduler([{}], start, SilentObserver(), stops, stop_grace_s=0.5)
        waiter = threading.Thread(
            target=interrupt_when, args=(lambda: "ignoring" in read(cell.folder / "log.txt"),)
        )
        waiter.start()
        ends = scheduler.run([cell, build_cell(tmp_path, 1)])
        waiter.join()
    assert ends == {0: CellEnd("interrupted", "stopped by SIGTERM")}


def read(path):
    return path.read_text() if path.exists() else ""


def interrupt_when(condition):
    wait_until(condition)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ResultsError("0 MiB free there")]
)
def test_cell_that_cannot_start_does_not_keep_the_next_one(tmp_path, fake_job, error):
    fake_job({})

    def start_or_fail(cell, slot):
        if cell.index == 0:
            raise error
        return start(cell, slot)

    cells = [build_cell(tmp_path, seed) for seed in (0, 1)]
    ends = Scheduler([{}], start_or_fail, SilentObserver(), StopRequests()).run(cells)
    assert ends[0].status == "failed"
    assert str(error) in ends[0].message
    assert "the status could not be written" in ends[0].message  # there is no folder
    assert ends[1].status == "completed"


def test_cell_without_a_process_has_that_in_its_folder(tmp_path):
    def no_process(cell, slot):
        write_cell(cell)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    cell = build_cell(tmp_path)
    Scheduler([{}], no_process, SilentObserver(), StopRequests()).run([cell])
    assert read_end(cell.folder).status == "failed"
    assert "could not be started" in read_end(cell.folder).message


def test_error_of_the_sweep_itself_leaves_no_cell_behind(tmp_path, fake_job):
    fake_job({0: "hang"})
    pids = []

    class BrokenObserver(SilentObserver):
        def on_progress(self, process):
            pids.append(process.pid)
            if (process.cell.folder / "status.json").exists():
                raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Scheduler([{}], start, BrokenObserver(), StopRequests()).run([build_cell(tmp_path)])
    assert not is_running(pids[0])
    assert read_end(tmp_path / "0_cell").status == "interrupted"


def test_handlers_of_signals_come_back_and_ignored_ones_stay_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with counting_stop_signals() as stops:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGHUP)
            assert (stops.count, stops.why) == (1, "stopped by SIGHUP")
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_stop_while_the_report_is_made_is_told_and_is_no_crash(monkeypatch, capsys, tmp_path):
    def conclude(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sweep_command, "_conclude", conclude)
    ran = sweep_command._Ran({}, is_stopped=False)
    assert sweep_command._conclude_unless_stopped(None, None, tmp_path, ran) == 130
    assert capsys.readouterr().out.startswith("stopped by SIGTERM after the last cell")
