"""What a cell is, how it is run, and what its records say of it."""

import os

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import name_job_folder, parse_arguments, register_job_folder
from cbexp.cli.launching import quote
from cbexp.cli.preflight import check_command
from cbexp.config import ArtifactsConfig, CacheConfig, ExperimentConfig, TrackingConfig, register_schema
from cbexp.sweep.cells import Cell, hash_config, read_cell, write_cell
from tests.sweep.conftest import QUIET, is_running


def test_a_cell_is_what_is_run_and_recorded_and_not_where_results_go():
    elsewhere = {"name": "other", "stats_path": "s.json", "tracking": TrackingConfig("disabled", tags=["a"])}
    how = ({"isolation": "none"}, {"cell_timeout_s": 5.0}, {"resume": "latest", "resume_force": True})
    for settings in (elsewhere, *how):
        assert hash_config(ExperimentConfig(**settings)) == hash_config(ExperimentConfig())
    parts = [{}, {"seed": 1}, {"cache": CacheConfig(num_tokens=4096)}, {"artifacts": ArtifactsConfig("none")}]
    assert len({hash_config(ExperimentConfig(**part)) for part in parts}) == 4


def test_cell_survives_its_files(tmp_path):
    config = ExperimentConfig(seed=3, cell_timeout_s=1.5)
    labels = {0: "a", 1: "ü ${x}"}
    config.model.architecture = {"id2label": labels, "eps": 1e-06, "none": None, "text": "1e-06"}
    config.dataset.chat_template = "line\n\ttab 'quote' \"double\" \x07 日本"
    cell = Cell(3, tmp_path / "cell", ("a=1",), "python -m cbexp a=1", config, None)
    write_cell(cell)
    assert read_cell(cell.folder) == cell
    assert read_cell(cell.folder).cell_hash == cell.cell_hash


@pytest.mark.parametrize(
    ("number", "dirname", "expected"),
    [
        (0, "", "0"),
        (2, "compile=eager,sampling.ignore_eos=true", "2_compile=eager_ignore_eos=true"),
        (1, "model.name_or_path=org/a b:c*?", "1_name_or_path=org-a-b-c"),
        (3, "~tracking", "3_tracking"),
        (7, "tracking.tags=" + "語" * 100, "7_tags=" + "語" * 24),  # at most 80 bytes
    ],
)
def test_folder_of_a_job_is_short_and_safe(number, dirname, expected):
    assert name_job_folder(number, dirname) == expected


@pytest.mark.parametrize(
    "text", ["a b,c", "it's", "back\\", "q\\'x", "ü/ö=1", "a${now:x}b", "[1]", "null", "{a:b}"]
)
def test_quoted_value_means_itself(text):
    value = OverridesParser.create().parse_override(f"key={quote(text)}").value()
    assert OmegaConf.create({"key": value}).key == text


# Records


def compose_hashes(command):
    register_schema()
    register_job_folder()
    arguments = command.split()[3:]
    return [job.cell_hash for job in check_command(parse_arguments(arguments), conf_dir()).jobs]


def test_records_say_what_a_cell_is_and_how_to_run_it_again(sweeps):
    sweeps.run_here("-m", "sampling.max_new_tokens=4,8", "num_rounds=2")
    cell = sweeps.cell(1)
    assert cell["overrides"] == ["sampling.max_new_tokens=8", "num_rounds=2", QUIET]
    assert cell["command"] == f"python -m cbexp sampling.max_new_tokens=8 num_rounds=2 {QUIET}"
    assert compose_hashes(cell["command"]) == [cell["cell_hash"]]
    listed = sweeps.manifest()["cells"][1]
    assert listed.pop("folder") == sweeps.cell_folder(1).name
    assert {key: cell[key] for key in listed} == listed
    group = f"default_{sweeps.sweep_folder.name}"
    assert [call["sweep"] for call in sweeps.calls] == [[group, 2, 0], [group, 2, 1]]
    assert sweeps.calls[1]["overrides"] == cell["overrides"]
    # With isolation=none all cells share this process and its folder.
    assert {(call["pid"], call["cwd"]) for call in sweeps.calls} == {(os.getpid(), str(sweeps.folder))}


def test_a_cell_of_an_experiment_that_lists_its_sweep_can_be_run_alone(sweeps):
    sweeps.run_here("experiment=batch_shapes")
    for index in range(3):
        cell = sweeps.cell(index)
        assert compose_hashes(cell["command"]) == [cell["cell_hash"]]


# Processes


def test_each_cell_has_a_process_of_its_own_that_loads_no_torch_and_leaves_nothing_behind(sweeps):
    sweeps.ends = {1: "leave_child"}
    for name in ("random.py", "yaml.py", "psutil.py"):
        (sweeps.folder / name).write_text("raise ImportError('the wrong one')")
    # As an installed command is started: the launch folder is not on the path.
    start = "import sys; sys.path.remove(''); from cbexp.cli.command_line import main; main(sys.argv[1:])"
    hydra = ["+hydra.job.env_set.FROM_ENV_SET=given", "hydra.job.chdir=true"]
    done = sweeps.run("-m", "seed=1,2", *hydra, command=("-c", start))
    assert done.code == 0, done.err
    assert sweeps.statuses() == {0: "completed", 1: "completed"}
    first, second = sweeps.calls
    assert first["pid"] != second["pid"]
    for index, call in enumerate((first, second)):
        assert call["session"] == call["pid"]
        assert (call["variable"], call["cwd"]) == ("given", str(sweeps.cell_folder(index)))
    assert (sweeps.cell_folder(0) / ".hydra" / "overrides.yaml").exists()
    # Neither does the sweep's own process load torch.
    assert (sweeps.folder / "calls.jsonl.modules").read_text() == "\n\n\n"
    log = (sweeps.cell_folder(0) / "log.txt").read_text()
    assert not is_running(int(log.split("child ")[1].split()[0]))


def test_output_to_a_full_disk_ends_no_sweep_and_is_said_once(sweeps):
    with open("/dev/full", "w") as full:
        done = sweeps.run("-m", "seed=1", stdout=full)
    assert done.code == 0
    assert done.err.count("standard output cannot be written (") == len(done.err.splitlines()) == 1
    assert sweeps.statuses() == {0: "completed"}
