"""Whatever becomes of a cell is in its folder, the sweep goes on, and its table and exit code say so."""

import json
import os
import re

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import register_schema
from tests.sweep.conftest import is_running

QUIET = "tracking=disabled"


def test_every_way_to_end_is_recorded_and_the_sweep_goes_on(sweeps):
    hows = [
        "complete", "fail", "out_of_memory", "not_applicable", "sigkill", "die_before_status", "no_place", "bug",
        "hang", "complete",
    ]  # fmt: skip
    sweeps.ends = dict(enumerate(hows))
    done = sweeps.run("-m", f"seed=range(0,{len(hows)})", "cell_timeout_s=4", QUIET)
    assert done.code == 1, done.err
    assert done.err == ""
    assert sweeps.statuses() == {
        0: "completed", 1: "failed", 2: "out_of_memory", 3: "not_applicable", 4: "killed", 5: "failed", 6: "failed",
        7: "failed", 8: "timed_out", 9: "completed",
    }  # fmt: skip
    messages = {index: sweeps.status(index).get("message", "") for index in range(10)}
    assert messages[1] == "there are no rows"
    assert "SIGKILL" in messages[4]
    assert "no memory left" in messages[4]
    assert "exit code 3" in messages[5]
    assert "cell of seed 5: die_before_status" in messages[5]
    assert "no place to write to" in messages[6]
    assert "ZeroDivisionError: a bug" in messages[7]
    assert messages[8] == "not done after cell_timeout_s=4 seconds"
    assert "cell of seed 8: hang" in (sweeps.cell_folder(8) / "log.txt").read_text()
    assert "Traceback" in (sweeps.cell_folder(7) / "log.txt").read_text()
    assert read_table(done.out) == {f"seed={i}": status for i, status in sweeps.statuses().items()}
    assert "3 of 10 cells are done" in done.out
    for message in messages.values():
        assert message in done.out


def read_table(out):
    """Status by label, of the rows of the final table."""
    return dict(re.findall(r"^ *\d+ +(seed=\d+) +(\w+)", out, re.MULTILINE))


def test_what_cannot_run_here_is_no_failure(sweeps):
    sweeps.ends = {1: "not_applicable"}
    assert sweeps.run("-m", "seed=1,2", QUIET).code == 0


def test_each_cell_has_a_process_and_session_of_its_own_and_none_has_torch(sweeps):
    done = sweeps.run("-m", "seed=1,2,3", QUIET)
    assert done.code == 0
    assert len({call["pid"] for call in sweeps.calls}) == 3
    assert all(call["session"] == call["pid"] for call in sweeps.calls)
    # Neither does the sweep's own process load it.
    loaded = [line.split() for line in (sweeps.folder / "calls.jsonl.modules").read_text().splitlines()]
    assert len(loaded) == 4
    assert all(len(modules) == 1 for modules in loaded)


def test_cells_know_their_place(sweeps):
    sweeps.run("-m", "seed=5,6", QUIET)
    group = f"default_{sweeps.sweep_folder.name}"
    assert [call["sweep"] for call in sweeps.calls] == [[group, 2, 0], [group, 2, 1]]
    assert [call["overrides"] for call in sweeps.calls] == [["seed=5", QUIET], ["seed=6", QUIET]]
    assert {call["cwd"] for call in sweeps.calls} == {str(sweeps.folder)}


def test_records_say_what_a_cell_is_and_how_to_run_it_again(sweeps, monkeypatch):
    sweeps.run("-m", "sampling.max_new_tokens=4,8", "cell_timeout_s=100", QUIET)
    cell = json.loads((sweeps.cell_folder(1) / "cell.json").read_text())
    assert cell["overrides"] == ["sampling.max_new_tokens=8", QUIET]
    assert cell["command"] == f"python -m cbexp sampling.max_new_tokens=8 {QUIET}"
    listed = sweeps.manifest()["cells"][1]
    assert {key: listed[key] for key in ("index", "cell_hash", "overrides", "command")} == {
        key: cell[key] for key in ("index", "cell_hash", "overrides", "command")
    }
    assert listed["folder"] == sweeps.cell_folder(1).name
    assert compose_hashes(cell["command"].split()[3:]) == [cell["cell_hash"]]


def test_a_cell_of_an_experiment_that_lists_its_sweep_can_be_run_alone(sweeps):
    sweeps.run("experiment=batch_shapes", QUIET)
    for index in range(3):
        cell = json.loads((sweeps.cell_folder(index) / "cell.json").read_text())
        assert compose_hashes(cell["command"].split()[3:]) == [cell["cell_hash"]]


def compose_hashes(arguments):
    register_schema()
    register_job_folder()
    return [job.cell_hash for job in check_command(parse_arguments(arguments), conf_dir()).jobs]


def test_children_that_a_cell_leaves_behind_end_with_it(sweeps):
    sweeps.ends = {1: "leave_child"}
    sweeps.run("-m", "seed=1,2", QUIET)
    log = (sweeps.cell_folder(0) / "log.txt").read_text()
    pid = int(log.split("child ")[1].split()[0])
    assert not is_running(pid)
    assert sweeps.statuses() == {0: "completed", 1: "completed"}


def test_cells_in_one_process_share_it(sweeps):
    sweeps.run("-m", "seed=1,2", "isolation=none", QUIET)
    assert len({call["pid"] for call in sweeps.calls}) == 1
    assert sweeps.statuses() == {0: "completed", 1: "completed"}


def test_cell_in_the_sweeps_process_that_exits_ends_no_sweep(sweeps):
    sweeps.ends = {1: "exit"}
    done = sweeps.run("-m", "seed=1,2", QUIET, "isolation=none")
    assert done.code == 1
    assert sweeps.statuses() == {0: "failed", 1: "completed"}
    assert "SystemExit: 0" in sweeps.status(0)["message"]
    assert "log.txt" not in done.out  # there is none


def test_hydras_settings_of_a_job_reach_its_process(sweeps):
    sweeps.run("-m", "seed=1,2", "+hydra.job.env_set.FROM_ENV_SET=given", "hydra.job.chdir=true", QUIET)
    assert [call["variable"] for call in sweeps.calls] == ["given", "given"]
    assert [call["cwd"] for call in sweeps.calls] == [str(sweeps.cell_folder(i)) for i in (0, 1)]
    assert (sweeps.cell_folder(0) / ".hydra" / "overrides.yaml").exists()


def test_names_in_the_launch_folder_shadow_no_library(sweeps):
    for name in ("random.py", "yaml.py", "psutil.py"):
        (sweeps.folder / name).write_text("raise ImportError('the wrong one')")
    # As an installed command is started: the launch folder is not on the path.
    start = "import sys; sys.path.remove(''); from cbexp.cli.command_line import main; main(sys.argv[1:])"
    done = sweeps.run("-m", "seed=1,2", QUIET, command=("-c", start))
    assert done.code == 0, done.err
    assert sweeps.statuses() == {0: "completed", 1: "completed"}


def test_texts_of_all_kinds_survive(sweeps):
    long_tag = "x" * 3000
    done = sweeps.run("-m", f"tracking.tags=['日本語','é ü,ö',{long_tag}]", "seed=1,2", QUIET)
    assert done.code == 0, done.err
    assert sweeps.calls[0]["overrides"][0].startswith("tracking.tags=['日本語',")
    assert len(sweeps.cell_folder(0).name.encode()) <= 80
    assert "日本語" in json.loads((sweeps.cell_folder(0) / "cell.json").read_text())["command"]


def test_reader_that_goes_away_ends_no_sweep(sweeps):
    process = sweeps.start("-m", "seed=1,2", QUIET)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert sweeps.statuses() == {0: "completed", 1: "completed"}


def test_output_that_was_closed_from_the_start_ends_no_sweep(sweeps):
    process = sweeps.start("-m", "seed=1,2", QUIET, stdout=None, preexec_fn=lambda: os.close(1))
    assert process.wait(timeout=60) == 0
    assert sweeps.statuses() == {0: "completed", 1: "completed"}


def test_output_to_a_full_disk_ends_no_sweep_and_is_told_once(sweeps):
    with open("/dev/full", "w") as full:
        done = sweeps.run("-m", "seed=1,2", QUIET, stdout=full)
    assert done.code == 0
    assert done.err.splitlines() == [
        "standard output cannot be written (No space left on device): going on without it"
    ]
    assert sweeps.statuses() == {0: "completed", 1: "completed"}


def test_overrides_do_not_steer_the_terminal(sweeps):
    long = "x" * 3000
    done = sweeps.run("-m", f"dataset.system_prompt='\x1b[31m\nred','{long}'", QUIET)
    assert "\x1b" not in done.out
    assert "cell 0 of 2 starts: dataset.system_prompt='?[31m red'" in done.out
    (start,) = [line for line in done.out.splitlines() if line.startswith("cell 1 of 2 starts")]
    assert len(start) < 600
