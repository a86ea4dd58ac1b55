"""A sweep that was killed or interrupted goes on where it was, on the same code, and touches nothing that is done."""

import json
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cbexp.errors import ConfigError, ResultsError
from cbexp.sweep.folder import claim_folder
from cbexp.sweep.manifest import Provenance, build_manifest, find_provenance, read_manifest, write_manifest
from cbexp.sweep.resume import list_differences
from tests.sweep.conftest import is_running, wait_until


def read_files(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "sweep.json"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


# Killed and stopped sweeps


def test_killed_sweep_takes_its_cell_with_it_and_resumes_what_is_missing(sweeps):
    sweeps.ends = {2: "hang"}
    process = sweeps.start("-m", "seed=1,2,3")
    pid = sweeps.wait_for_call(2)["pid"]
    assert is_running(pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not is_running(pid))
    assert sweeps.statuses() == {0: "completed", 1: "running"}
    before = read_files(sweeps.cell_folder(0))

    sweeps.ends = {}
    done = sweeps.run("-m", "seed=1,2,3", "resume=latest")
    assert done.code == 0, done.err
    assert sweeps.seeds == [1, 2, 2, 3]
    assert sweeps.statuses() == {0: "completed", 1: "completed", 2: "completed"}
    assert read_files(sweeps.cell_folder(0)) == before
    earlier = json.loads((sweeps.cell_folder(1) / "attempts" / "1" / "status.json").read_text())
    assert earlier["status"] == "running"
    assert done.out.startswith(f"resuming outputs/default/{sweeps.sweep_folder.name}: 2 of 3 cells to run")
    assert "not_started" not in done.out
    assert done.out.count("completed ") >= 3


def test_stopped_sweep_ends_its_cell_and_says_what_is_left(sweeps):
    sweeps.ends = {2: "hang"}
    process = sweeps.start("-m", "seed=1,2,3")
    pid = sweeps.wait_for_call(2)["pid"]
    process.send_signal(signal.SIGHUP)
    done = sweeps.finish(process)
    assert (done.code, done.err) == (130, "")
    assert not is_running(pid)
    assert sweeps.statuses() == {0: "completed", 1: "interrupted"}
    assert all(words in done.out for words in ("1 of 3 cells are done", "not_started", "resume="))


def test_sweep_that_goes_on_is_left_alone_and_a_second_interrupt_kills_what_does_not_end(sweeps):
    sweeps.ends = {1: "ignore_signals"}
    process = sweeps.start("-m", "seed=1,2")
    pid = sweeps.wait_for_call(1)["pid"]
    done = sweeps.run_here("-m", "seed=1,2", "resume=latest", "resume_force=true")
    assert done.code == 1
    assert "is going on in another process" in done.err
    assert sweeps.seeds == [1]

    wait_until(lambda: "ignoring" in (sweeps.cell_folder(0) / "log.txt").read_text())
    process.send_signal(signal.SIGINT)
    while "1 running cell(s) are ending" not in process.stdout.readline():
        assert process.poll() is None
    assert is_running(pid)
    process.send_signal(signal.SIGINT)
    assert sweeps.finish(process).code == 130
    assert not is_running(pid)
    assert sweeps.status(0)["message"] == "stopped by Ctrl-C"


def test_interrupt_of_a_sweep_in_one_process(sweeps):
    sweeps.ends = {2: "hang"}
    process = sweeps.start("-m", "seed=1,2,3", "isolation=none")
    sweeps.wait_for_call(2)
    process.send_signal(signal.SIGINT)
    assert sweeps.finish(process).code == 130
    assert sweeps.statuses() == {0: "completed", 1: "interrupted"}
    sweeps.ends = {}
    assert sweeps.run_here("-m", "seed=1,2,3", "resume=latest").code == 0
    assert sweeps.seeds == [1, 2, 2, 3]


# What counts as missing


def test_failed_and_half_recorded_cells_are_run_again_and_their_records_kept(sweeps):
    sweeps.ends = {1: "fail", 2: "not_applicable"}
    command = ["-m", "seed=1,2,3,4,5,6"]
    assert sweeps.run_here(*command).code == 1
    (sweeps.cell_folder(3) / "status.json").write_text('{"status": "compl')
    (sweeps.cell_folder(4) / "summary.json").unlink()
    shutil.rmtree(sweeps.cell_folder(5))
    assert sweeps.run_here(*command, "resume=latest").code == 1
    sweeps.ends = {}
    assert sweeps.run_here(*command, "resume=latest").code == 0
    assert sweeps.seeds == [1, 2, 3, 4, 5, 6, 1, 4, 5, 6, 1]
    attempts = sweeps.cell_folder(0) / "attempts"
    assert sorted(os.listdir(attempts)) == ["1", "2"]
    assert json.loads((attempts / "2" / "status.json").read_text())["message"] == "there are no rows"
    before = read_files(sweeps.sweep_folder)
    assert sweeps.run_here(*command, "resume=latest").code == 0  # nothing is left
    assert read_files(sweeps.sweep_folder) == before


def test_cells_are_known_by_what_they_do_and_not_by_order_or_outputs(sweeps):
    paths = "stats_path=s_${hydra:job.num}.json"
    sweeps.run_here("-m", "seed=1,2", paths)
    sweeps.ends = {4: "fail"}
    done = sweeps.run_here("-m", "seed=3,2,1,4", paths, "tracking.tags=[again]", "resume=latest")
    assert done.code == 1, done.err
    assert sweeps.seeds == [1, 2, 3, 4]
    cells = [(cell["index"], cell["overrides"][0]) for cell in sweeps.manifest()["cells"]]
    assert cells == [(0, "seed=1"), (1, "seed=2"), (2, "seed=3"), (3, "seed=4")]
    assert sorted(path.name for path in sweeps.folder.glob("s_*.json")) == [f"s_{i}.json" for i in range(3)]
    assert [call["sweep"][1:] for call in sweeps.calls] == [[2, 0], [2, 1], [4, 2], [4, 3]]
    # Cells that a command does not have are counted as they stand.
    done = sweeps.run_here("-m", "seed=1", paths, "resume=latest")
    assert done.code == 0
    assert "3 of 4 cells are done" in done.out
    assert "sweep.json has the command of the others" in done.out


# Which sweep


def test_latest_is_the_newest_of_the_same_name_or_folder(sweeps):
    for arguments in (["seed=1"], ["seed=1,2"], ["seed=1", "name=other"]):
        sweeps.run_here("-m", *arguments)
    (newest,) = [path for path in sweeps.folder.glob("outputs/default/*") if len(list(path.iterdir())) == 4]
    done = sweeps.run_here("-m", "seed=1,2,3", "resume=latest")
    assert done.out.startswith(f"resuming outputs/default/{newest.name}: 1 of 3 cells to run")

    named = "hydra.sweep.dir=outputs/runs/"
    for folder in ("A", "A", "A_B"):
        sweeps.run_here("-m", "seed=1", f"{named}{folder}")
    done = sweeps.run_here("-m", "seed=1,2", f"{named}A", "resume=latest")
    assert done.out.startswith("resuming outputs/runs/A_2: 1 of 2 cells to run")


def test_folder_is_claimed_once_however_many_ask(tmp_path):
    with ThreadPoolExecutor(20) as pool:
        claimed = list(pool.map(claim_folder, [tmp_path / "deep" / "sweep"] * 20))
    assert len(set(claimed)) == 20


def test_folder_that_a_sweep_cannot_have_for_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for path, error in ((".", ConfigError), ("..", ConfigError), ("file/x", ResultsError)):
        with pytest.raises(error, match=r"hydra\.sweep\.dir"):
            claim_folder(Path(path))


# Refusals


@pytest.mark.parametrize("damage", ["{", '{"format": 2}', '{"format": 1}'])
def test_damaged_manifest_is_one_message(tmp_path, damage):
    write_manifest(tmp_path, build_manifest("name", ["-m"], [], tmp_path, find_provenance()))
    assert read_manifest(tmp_path).name == "name"
    (tmp_path / "sweep.json").write_text(damage)
    with pytest.raises(ConfigError, match=r"sweep\.json is damaged"):
        read_manifest(tmp_path)


def test_another_host_other_code_and_another_command_are_refused_unless_forced(sweeps):
    command = ["-m", "seed=1,2", "resume=latest"]
    sweeps.run_here(*command[:2])
    done = sweeps.run_here("-m", "seed=3,4", "resume=latest")
    assert done.code == 2
    assert "none of this command's cells" in done.err
    assert "python -m cbexp -m seed=1,2 tracking=disabled" in done.err

    status = sweeps.status(1) | {"status": "running", "host": "elsewhere"}
    (sweeps.cell_folder(1) / "status.json").write_text(json.dumps(status))
    done = sweeps.run_here(*command)
    assert done.code == 1
    assert "cell 1 is still running" in done.err
    assert "on elsewhere" in done.err

    manifest = sweeps.manifest()
    manifest["versions"]["torch"] = "1.0"
    (sweeps.sweep_folder / "sweep.json").write_text(json.dumps(manifest))
    done = sweeps.run_here(*command)
    assert done.code == 2
    assert "torch 1.0 (now 2" in done.err
    assert "resume_force=true" in done.err

    assert sweeps.seeds == [1, 2]
    assert sweeps.run_here(*command, "resume_force=true").code == 0
    assert sweeps.seeds == [1, 2, 2]
    assert len(sweeps.manifest()["resumed"]) == 1
    assert sweeps.manifest()["versions"]["torch"] == "1.0"


def test_every_difference_of_code_is_named():
    current = find_provenance()
    assert list(list_differences(current, current)) == []
    begun = Provenance("0123456789abcdef", False, "0123", {"torch": "1.0", "gone": "2"})
    now = Provenance(None, None, None, {"torch": "2.0"})
    assert list(list_differences(begun, now)) == [
        "commit 0123456789ab (now unknown)",
        "other uncommitted changes than there are now",
        "torch 1.0 (now 2.0)",
        "gone 2 (now not installed)",
    ]


# The whole promise at once, with real cells


NUM_CELLS = 24
SMALL = "num_rounds: 1\nnum_warmup_rounds: 0\nsampling: {max_new_tokens: 4}\ndataset: {num_prompts: 2}\n"
LONG = SMALL.replace("num_rounds: 1\n", "num_rounds: 60\n")
KILLED_CELL, LAST_CELL_BEFORE_THE_END = 5, 12
# In the places where three fail: an exception, more memory than there is, a time-out.
SETTINGS = {
    3: SMALL + "model: {name_or_path: /no/such/folder}\n",
    KILLED_CELL: LONG,
    9: SMALL + "cache: {num_tokens: 100000000000}\n",
    LAST_CELL_BEFORE_THE_END: LONG,
    20: LONG.replace("60", "1000000") + "cell_timeout_s: 6\n",
}
BAD_ENDS = {3: "failed", 9: "out_of_memory", 20: "timed_out"}


@pytest.mark.slow
def test_24_cells_of_which_three_fail_through_two_kills(sweeps):
    conf = sweeps.folder / "conf"
    (conf / "experiment").mkdir(parents=True)
    for index in range(NUM_CELLS):
        text = f"# @package _global_\nseed: {index}\n{SETTINGS.get(index, SMALL)}"
        (conf / "experiment" / f"cell_{index:02}.yaml").write_text(text)
    sweeps.fake_path = None  # real cells
    command = ["-m", "--config-dir", str(conf), "experiment=glob(cell_*)", "model=tiny"]
    process = sweeps.start(*command, stdout=None, stderr=None)
    os.kill(wait_for_running(sweeps, KILLED_CELL), signal.SIGKILL)
    pid = wait_for_running(sweeps, LAST_CELL_BEFORE_THE_END)
    process.kill()
    process.communicate()
    wait_until(lambda: not is_running(pid))
    before = sweeps.statuses()
    assert before == {
        index: {3: "failed", 5: "killed", 9: "out_of_memory", 12: "running"}.get(index, "completed")
        for index in range(13)
    }
    assert "SIGKILL" in sweeps.status(KILLED_CELL)["message"]
    kept = {index: read_summary(sweeps, index) for index, status in before.items() if status == "completed"}

    done = sweeps.run(*command, "resume=latest")
    assert (done.code, done.err) == (1, "")
    expected = {index: BAD_ENDS.get(index, "completed") for index in range(NUM_CELLS)}
    assert sweeps.statuses() == expected
    assert {index: read_summary(sweeps, index) for index in kept} == kept
    assert f"resuming outputs/default/{sweeps.sweep_folder.name}: 15 of 24 cells to run" in done.out
    assert "21 of 24 cells are done" in done.out
    table = re.findall(r"^ *\d+ .*experiment=cell_(\d+) +(\w+)", done.out, re.MULTILINE)
    assert {int(index): status for index, status in table} == expected


def wait_for_running(sweeps, index):
    """Wait until a cell has written a round, and return its process."""
    pattern = f"outputs/default/*/{index}_*/rounds.jsonl"
    sweeps.wait_for(lambda: any(path.stat().st_size for path in sweeps.folder.glob(pattern)))
    return sweeps.status(index)["pid"]


def read_summary(sweeps, index):
    path = sweeps.cell_folder(index) / "summary.json"
    return json.loads(path.read_text()), path.stat().st_mtime_ns
