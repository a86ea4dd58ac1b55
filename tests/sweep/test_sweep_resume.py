"""A sweep that was killed or interrupted goes on where it was, on the same code, and touches nothing that is done."""

import json
import os
import shutil
import signal
import time

import pytest

from tests.sweep.conftest import is_running, wait_until

QUIET = "tracking=disabled"


def read_files(folder):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }


def interrupt_at_second(sweeps, *arguments):
    """Start a sweep of seeds 1 to 3 of which 2 hangs, and interrupt it there."""
    sweeps.ends = {2: "hang"}
    process = sweeps.start("-m", "seed=1,2,3", QUIET, *arguments)
    sweeps.wait_for_call(2)
    process.send_signal(signal.SIGINT)
    done = sweeps.finish(process)
    sweeps.ends = {}
    return done


# Killed and stopped sweeps


def test_killed_sweep_takes_its_cell_with_it_and_resumes_what_is_missing(sweeps):
    sweeps.ends = {2: "hang"}
    process = sweeps.start("-m", "seed=1,2,3", QUIET)
    pid = sweeps.wait_for_call(2)["pid"]
    assert is_running(pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not is_running(pid), 5)
    assert sweeps.statuses() == {0: "completed", 1: "running"}
    before = read_files(sweeps.cell_folder(0))

    sweeps.ends = {}
    done = sweeps.run("-m", "seed=1,2,3", QUIET, "resume=latest")
    assert done.code == 0, done.err
    assert sweeps.seeds == [1, 2, 2, 3]
    assert sweeps.statuses() == {0: "completed", 1: "completed", 2: "completed"}
    assert read_files(sweeps.cell_folder(0)) == before
    earlier = json.loads((sweeps.cell_folder(1) / "attempts" / "1" / "status.json").read_text())
    assert earlier["status"] == "running"
    assert done.out.startswith(f"resuming outputs/default/{sweeps.sweep_folder.name}: 2 of 3 cells to run")
    assert "not_started" not in done.out
    assert done.out.count("completed ") >= 3


def test_resuming_a_finished_sweep_runs_nothing(sweeps):
    sweeps.run("-m", "seed=1,2", QUIET)
    before = {
        path: content
        for path, content in read_files(sweeps.sweep_folder).items()
        if path.name != "sweep.json"
    }
    done = sweeps.run("-m", "seed=1,2", QUIET, "resume=latest")
    assert (done.code, sweeps.seeds) == (0, [1, 2])
    after = {
        path: content
        for path, content in read_files(sweeps.sweep_folder).items()
        if path.name != "sweep.json"
    }
    assert after == before


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda s: s.name
)
def test_stopped_sweep_ends_its_cell_and_says_what_is_left(sweeps, sent):
    sweeps.ends = {2: "hang"}
    process = sweeps.start("-m", "seed=1,2,3", QUIET)
    pid = sweeps.wait_for_call(2)["pid"]
    started_s = time.monotonic()
    process.send_signal(sent)
    done = sweeps.finish(process)
    assert time.monotonic() - started_s < 10
    assert done.code == 130
    assert done.err == ""
    assert not is_running(pid)
    assert sweeps.statuses() == {0: "completed", 1: "interrupted"}
    assert "1 of 3 cells are done" in done.out
    assert "not_started" in done.out
    assert "resume=" in done.out


def test_second_interrupt_kills_what_does_not_end(sweeps):
    sweeps.ends = {1: "ignore_signals"}
    process = sweeps.start("-m", "seed=1,2", QUIET)
    pid = sweeps.wait_for_call(1)["pid"]
    wait_until(lambda: "ignoring" in (sweeps.cell_folder(0) / "log.txt").read_text())
    process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    assert process.poll() is None
    assert is_running(pid)
    process.send_signal(signal.SIGINT)
    done = sweeps.finish(process)
    assert done.code == 130
    assert not is_running(pid)
    assert sweeps.status(0)["status"] == "interrupted"
    assert sweeps.status(0)["message"] == "stopped by Ctrl-C"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_stop_is_heeded_while_libraries_are_imported_that_swallow_it(sweeps, sent):
    sweeps.variables = {"FAKE_STUBBORN_IMPORT": "1"}
    process = sweeps.start("-m", "seed=1,2", QUIET)
    wait_until(
        lambda: any("importing" in log.read_text() for log in sweeps.folder.glob("outputs/*/*/*/log.txt"))
    )
    process.send_signal(sent)
    done = sweeps.finish(process, 10)
    assert done.code == 130
    assert sweeps.statuses() == {0: "interrupted"}
    assert "going on" not in (sweeps.cell_folder(0) / "log.txt").read_text()
    assert sweeps.calls == []


def test_interrupt_of_a_sweep_in_one_process(sweeps):
    done = interrupt_at_second(sweeps, "isolation=none")
    assert done.code == 130
    assert sweeps.statuses() == {0: "completed", 1: "interrupted"}
    assert sweeps.run("-m", "seed=1,2,3", "isolation=none", QUIET, "resume=latest").code == 0
    assert sweeps.seeds == [1, 2, 2, 3]


# What counts as missing


def test_failures_are_run_again_and_their_records_kept(sweeps):
    sweeps.ends = {1: "fail", 2: "not_applicable", 3: "hang"}
    command = ["-m", "seed=1,2,3", QUIET]
    assert sweeps.run(*command, "cell_timeout_s=2").code == 1
    assert sweeps.statuses() == {0: "failed", 1: "not_applicable", 2: "timed_out"}
    assert sweeps.run(*command, "cell_timeout_s=1", "resume=latest").code == 1
    sweeps.ends = {}
    assert sweeps.run(*command, "resume=latest").code == 0
    assert sweeps.seeds == [1, 2, 3, 1, 3, 1, 3]
    assert sorted(os.listdir(sweeps.cell_folder(0) / "attempts")) == ["1", "2"]
    kept = json.loads((sweeps.cell_folder(0) / "attempts" / "2" / "status.json").read_text())
    assert kept["message"] == "there are no rows"


def test_cell_with_half_its_records_is_run_again(sweeps):
    sweeps.run("-m", "seed=1,2,3", QUIET)
    (sweeps.cell_folder(1) / "status.json").write_text('{"status": "compl')
    (sweeps.cell_folder(2) / "summary.json").unlink()
    assert sweeps.run("-m", "seed=1,2,3", QUIET, "resume=latest").code == 0
    assert sweeps.seeds == [1, 2, 3, 2, 3]


def test_cell_whose_folder_is_gone_is_run_again(sweeps):
    sweeps.run("-m", "seed=1,2", QUIET)
    shutil.rmtree(sweeps.cell_folder(0))
    assert sweeps.run("-m", "seed=1,2", QUIET, "resume=latest").code == 0
    assert sweeps.seeds == [1, 2, 1]


def test_cells_are_known_by_what_they_do_and_not_by_order_or_outputs(sweeps):
    sweeps.run("-m", "seed=1,2", "stats_path=s_${hydra:job.num}.json", QUIET)
    done = sweeps.run(
        "-m", "seed=3,2,1,4", "stats_path=s_${hydra:job.num}.json", "tracking=offline", "tracking.tags=[again]",
        "cell_timeout_s=50", "resume=latest",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert sweeps.seeds == [1, 2, 3, 4]
    assert [(cell["index"], cell["overrides"][0]) for cell in sweeps.manifest()["cells"]] == [
        (0, "seed=1"), (1, "seed=2"), (2, "seed=3"), (3, "seed=4"),
    ]  # fmt: skip
    assert sorted(path.name for path in sweeps.folder.glob("s_*.json")) == [f"s_{i}.json" for i in range(4)]
    assert [call["sweep"][1:] for call in sweeps.calls] == [[2, 0], [2, 1], [4, 2], [4, 3]]
    assert json.loads((sweeps.cell_folder(2) / "cell.json").read_text())["overrides"][0] == "seed=3"


def test_latest_is_the_newest_of_the_same_name(sweeps):
    for seeds in ("1,2", "1,2,3"):
        sweeps.run("-m", f"seed={seeds}", QUIET)
    sweeps.run("-m", "seed=1,2", "name=other", QUIET)
    (newest,) = [path for path in sweeps.folder.glob("outputs/default/*") if len(list(path.iterdir())) == 5]
    done = sweeps.run("-m", "seed=1,2,3,4", QUIET, "resume=latest")
    assert done.out.startswith(f"resuming outputs/default/{newest.name}: 1 of 4 cells to run")


def test_latest_of_a_folder_that_is_named_is_no_sweep_beside_it(sweeps):
    named = "hydra.sweep.dir=outputs/runs/"
    for folder in ("A", "A", "B", "A_B"):
        sweeps.run("-m", "seed=1,2", QUIET, f"{named}{folder}")
    done = sweeps.run("-m", "seed=1,2,3", QUIET, f"{named}A", "resume=latest")
    assert done.out.startswith("resuming outputs/runs/A_2: 1 of 3 cells to run")
    done = sweeps.run("-m", "seed=1,2,3", QUIET, f"{named}C", "resume=latest")
    assert done.code == 2
    assert "there is no sweep in outputs/runs/C, which hydra.sweep.dir names" in done.err


# Refusals


def test_cells_that_a_command_does_not_have_are_counted_as_they_stand(sweeps):
    sweeps.ends = {1: "fail"}
    sweeps.run("-m", "seed=1,2", QUIET)
    done = sweeps.run("-m", "seed=2,3", QUIET, "resume=latest")
    assert done.code == 0
    assert "2 of 3 cells are done" in done.out
    assert "sweep.json has the command of the others" in done.out
    sweeps.ends = {}
    assert "3 of 3 cells are done" in sweeps.run("-m", "seed=1,3", QUIET, "resume=latest").out


def test_new_cell_does_not_take_the_folder_of_another(sweeps):
    sweeps.run("-m", "seed=1,2", QUIET, "hydra.sweep.subdir=at_${hydra.job.num}")
    before = read_files(sweeps.sweep_folder)
    done = sweeps.run("-m", "seed=2,0", QUIET, "hydra.sweep.subdir=at_${seed}", "resume=latest")
    assert done.code == 2
    assert "would share a folder, at_0" in done.err
    assert read_files(sweeps.sweep_folder) == before


def test_sweep_that_goes_on_is_left_alone(sweeps):
    sweeps.ends = {1: "hang"}
    process = sweeps.start("-m", "seed=1,2", QUIET)
    sweeps.wait_for_call(1)
    done = sweeps.run("-m", "seed=1,2", QUIET, "resume=latest", "resume_force=true")
    assert done.code == 1
    assert "is going on in another process" in done.err
    assert sweeps.seeds == [1]
    process.send_signal(signal.SIGINT)
    sweeps.finish(process)


def test_cell_that_may_run_on_another_host_is_left_alone_unless_forced(sweeps):
    interrupt_at_second(sweeps)
    status = sweeps.status(1) | {"status": "running", "host": "elsewhere"}
    (sweeps.cell_folder(1) / "status.json").write_text(json.dumps(status))
    done = sweeps.run("-m", "seed=1,2,3", QUIET, "resume=latest")
    assert done.code == 1
    assert "cell 1 is still running" in done.err
    assert "on elsewhere" in done.err
    assert sweeps.seeds == [1, 2]
    assert sweeps.run("-m", "seed=1,2,3", QUIET, "resume=latest", "resume_force=true").code == 0
    assert sweeps.seeds == [1, 2, 2, 3]


def test_other_code_is_refused_unless_forced_and_then_noted(sweeps):
    interrupt_at_second(sweeps)
    manifest = sweeps.manifest()
    manifest["versions"]["torch"] = "1.0"
    (sweeps.sweep_folder / "sweep.json").write_text(json.dumps(manifest))
    done = sweeps.run("-m", "seed=1,2,3", QUIET, "resume=latest")
    assert done.code == 2
    assert "torch 1.0 (now 2" in done.err
    assert "resume_force=true" in done.err
    assert sweeps.seeds == [1, 2]
    assert sweeps.run("-m", "seed=1,2,3", QUIET, "resume=latest", "resume_force=true").code == 0
    assert len(sweeps.manifest()["resumed"]) == 1
    assert sweeps.manifest()["versions"]["torch"] == "1.0"


def test_another_commands_sweep_is_refused(sweeps):
    sweeps.run("-m", "seed=1,2", QUIET)
    done = sweeps.run("-m", "seed=3,4", QUIET, "resume=latest")
    assert done.code == 2
    assert "none of this command's cells" in done.err
    assert "python -m cbexp -m seed=1,2 tracking=disabled" in done.err


# Two at once


def test_sweeps_of_the_same_instant_have_folders_of_their_own(sweeps):
    processes = [sweeps.start("-m", "seed=1,2", QUIET, "hydra.sweep.dir=outputs/x/same") for _ in range(3)]
    assert [sweeps.finish(process).code for process in processes] == [0, 0, 0]
    folders = sorted(path.name for path in sweeps.folder.glob("outputs/x/*"))
    assert folders == ["same", "same_2", "same_3"]
    assert len(list(sweeps.folder.glob("outputs/x/*/*/summary.json"))) == 6


def test_resuming_twice_at_once_runs_each_cell_once(sweeps):
    interrupt_at_second(sweeps)
    sweeps.ends = {2: "slow"}
    processes = [sweeps.start("-m", "seed=1,2,3", QUIET, "resume=latest") for _ in range(2)]
    assert sorted(sweeps.finish(process).code for process in processes) == [0, 1]
    assert sorted(sweeps.seeds) == [1, 2, 2, 3]
