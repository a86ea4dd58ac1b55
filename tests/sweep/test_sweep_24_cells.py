"""The whole promise at once, with real cells: 24 of them, three that fail, one killed, the sweep killed and resumed."""

import json
import os
import re
import signal

import pytest

from tests.sweep.conftest import is_running, wait_until

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
