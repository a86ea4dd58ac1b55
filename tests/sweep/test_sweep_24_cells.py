"""The whole promise at once, with real cells: 24 of them, three that fail, one killed, the sweep killed and resumed."""

import json
import os
import signal

import psutil
import pytest

from tests.sweep.conftest import is_running, wait_until

NUM_CELLS = 24
# In the places where they fail: an exception, a time-out, more memory than there is.
BAD_CELLS = {
    3: ("model.name_or_path: /no/such/folder", "failed"),
    9: ("cache.num_tokens: 100000000000", "out_of_memory"),
    20: ("num_rounds: 1000000\ncell_timeout_s: 6", "timed_out"),
}
KILLED_CELL, LAST_CELL_BEFORE_THE_END = 5, 12
SMALL = {"num_rounds": 1, "num_warmup_rounds": 0, "dataset.num_prompts": 2, "sampling.max_new_tokens": 4}


@pytest.fixture
def conf(sweeps):
    """One experiment a cell: a list, and no grid."""
    folder = sweeps.folder / "conf" / "experiment"
    folder.mkdir(parents=True)
    for index in range(NUM_CELLS):
        lines = ["# @package _global_", f"seed: {index}"]
        settings = SMALL | {"num_rounds": 60} if index in (KILLED_CELL, LAST_CELL_BEFORE_THE_END) else SMALL
        extra = BAD_CELLS.get(index, ("", ""))[0].splitlines()
        lines += [to_yaml(key, value) for key, value in settings.items() if f"{key}:" not in " ".join(extra)]
        lines += [to_yaml(*line.split(": ")) for line in extra]
        (folder / f"cell_{index:02}.yaml").write_text("\n".join(lines) + "\n")
    return folder.parent


def to_yaml(key, value):
    group, _, setting = key.rpartition(".")
    return f"{group}: {{{setting}: {value}}}" if group else f"{key}: {value}"


@pytest.mark.slow
def test_24_cells_of_which_three_fail_through_two_kills(sweeps, conf):
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
    assert done.code == 1, done.err
    assert done.err == ""
    expected = {
        index: BAD_CELLS[index][1] if index in BAD_CELLS else "completed" for index in range(NUM_CELLS)
    }
    assert sweeps.statuses() == expected
    assert list(expected.values()).count("completed") == 21
    assert {index: read_summary(sweeps, index) for index in kept} == kept
    assert f"resuming outputs/default/{sweeps.sweep_folder.name}: 15 of 24 cells to run" in done.out
    assert "21 of 24 cells are done" in done.out
    assert read_table(done.out) == {f"cell_{index:02}": status for index, status in expected.items()}


def wait_for_running(sweeps, index):
    """Wait until a cell has written a round, and return its process."""
    pattern = f"outputs/default/*/{index}_*/rounds.jsonl"
    sweeps.wait_for(lambda: any(path.stat().st_size for path in sweeps.folder.glob(pattern)))
    pid = sweeps.status(index)["pid"]
    assert psutil.pid_exists(pid)
    return pid


def read_summary(sweeps, index):
    path = sweeps.cell_folder(index) / "summary.json"
    return json.loads(path.read_text()), path.stat().st_mtime_ns


def read_table(out):
    """Status by experiment, of the rows of the final table; the cells' works stand before their names."""
    words = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    cells = [
        (row, index) for row in words for index, word in enumerate(row) if word.startswith("experiment=cell_")
    ]
    return {row[index].removeprefix("experiment="): row[index + 1] for row, index in cells}
