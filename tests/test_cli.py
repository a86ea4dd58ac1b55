"""The command line in-process over a stubbed experiment: messages, exit codes, sweeps, what is written; no model."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from cbexp.cli.command_line import main
from cbexp.cli.objective import find_objective
from cbexp.config import ExperimentConfig, TrackingConfig
from cbexp.errors import ConfigError, DatasetError, NotApplicableError

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def experiment(monkeypatch):
    """Stands for `run_experiment`: keeps its `calls`; each job has the status `end`, or raises it."""
    stub = SimpleNamespace(calls=[], end="completed")

    def run_experiment(config, run_dir, overrides, sweep):
        call = {"config": config, "run_dir": run_dir, "overrides": overrides, "sweep": sweep}
        stub.calls.append(SimpleNamespace(**call, cwd=Path.cwd()))
        if isinstance(stub.end, BaseException):
            raise stub.end
        if stub.end != "dry_run":
            (run_dir / "status.json").write_text(json.dumps({"status": stub.end}))
            (run_dir / "summary.json").write_text(json.dumps({"decode_tps": 1234.5}))
        if config.tracking.mode == "offline":
            (run_dir / "wandb/offline-run-1").mkdir(parents=True)
        return SimpleNamespace(status=stub.end, run_dir=run_dir, summary=None, message=None)

    module = ModuleType("cbexp.experiment")
    module.run_experiment = run_experiment
    monkeypatch.setitem(sys.modules, "cbexp.experiment", module)
    return stub


@pytest.fixture
def run(experiment, tmp_path, monkeypatch, capsys):
    """Run a command line in an empty folder; returns exit code, stdout and stderr."""
    folder = tmp_path / "launch"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run_command(*arguments):
        # Cells in this process, where the stub is; tests/sweep/ has them in their own.
        words = " ".join(arguments)
        is_free = "-m" in arguments and not re.search("isolation|cell_timeout_s", words)
        try:
            main([*arguments, *(["isolation=none"] if is_free else [])])
            code = 0
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run_command


def test_a_job_returns_the_objective_of_a_search():
    config = ExperimentConfig(tracking=TrackingConfig(max_memory_gib=2.0))
    assert find_objective(config, {"decode_tps": 5, "peak_reserved_gib": 1.5}) == 5.0
    assert find_objective(config, {"decode_tps": 5, "peak_reserved_gib": 2.5}) == 0.0
    assert find_objective(config, {"decode_tps": None}) is find_objective(config, None) is None


# What a good command line does


def test_single_run_has_its_settings_and_a_folder_of_its_own_where_it_was_launched(run, experiment):
    arguments = ["experiment=smoke", "model=qwen3_4b", "num_rounds=2"]
    results = [run(*arguments) for _ in range(2)]
    assert [(result.code, result.err) for result in results] == [(0, "")] * 2
    first, second = experiment.calls
    chosen = first.config
    assert (chosen.model.name, chosen.num_rounds, chosen.dataset.num_prompts) == ("qwen3_4b", 2, 4)
    assert (first.overrides, first.sweep, first.cwd) == (arguments, None, Path.cwd())
    assert first.run_dir.parent == Path.cwd() / "outputs" / "smoke"
    assert first.run_dir != second.run_dir
    names = {path.name for path in first.run_dir.iterdir()}
    assert names == {".hydra", "cell.json", "config.yaml", "status.json", "summary.json"}  # and no log
    saved = yaml.safe_load((first.run_dir / ".hydra" / "config.yaml").read_text())
    assert saved["dataset"]["num_prompts"] == 4


def test_no_experiment_can_be_chosen_also_as_a_cell(run, experiment):
    result = run("-m", "experiment=null,smoke")
    assert (result.code, result.err) == (0, "")
    assert [call.overrides[0] for call in experiment.calls] == ["experiment=none", "experiment=smoke"]


@pytest.mark.parametrize("flag", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_own_choices_are_found_and_none_may_have_the_name_of_a_shipped_one(run, experiment, flag):
    own = Path("own/model/mine.yaml")
    own.parent.mkdir(parents=True)
    own.write_text(
        "defaults:\n  - qwen3_4b\n  - override /dataset@_global_.dataset: gsm8k\n"
        "name: mine\ninit: random\narchitecture:\n  num_hidden_layers: 2\n"
    )
    assert run(flag.format("own"), "model=mine").code == 0
    config = experiment.calls.pop().config
    assert (config.model.name, config.dataset.name) == ("mine", "gsm8k")
    assert config.model.architecture["num_hidden_layers"] == 2
    assert config.model.architecture["hidden_size"] == 2560
    shadowing = own.rename("own/model/tiny.yaml")
    result = run(flag.format("own"))
    assert (result.code, experiment.calls) == (2, [])
    assert f"{shadowing} has the name of a built-in choice, which would go before it" in result.err


# Sweeps


@pytest.mark.parametrize("chosen", ["-m", "experiment=compile_modes"])
def test_sweep_runs_each_combination_in_its_own_folder(run, experiment, chosen):
    """Whether -m or an experiment makes it one."""
    swept = ["compile=eager,default", "sampling.ignore_eos=false,true"]
    result = run(chosen, *swept, "tracking.group=mine", "isolation=none")
    assert result.code == 0, result.err
    assert [(call.config.compile.mode, call.config.sampling.ignore_eos) for call in experiment.calls] == [
        ("eager", False), ("eager", True), ("default", False), ("default", True),
    ]  # fmt: skip
    assert experiment.calls[1].run_dir.name.endswith("1_compile=eager_ignore_eos=True")
    assert {"compile=eager", "sampling.ignore_eos=True"} < set(experiment.calls[1].overrides)
    assert len({call.run_dir.parent for call in experiment.calls}) == 1
    assert [call.sweep.job_index for call in experiment.calls] == [0, 1, 2, 3]
    assert {(call.sweep.group, call.sweep.num_jobs) for call in experiment.calls} == {("mine", 4)}


def test_dry_run_of_a_sweep_runs_each_job_here_and_leaves_nothing(run, experiment):
    """Settings may stand before and after flags."""
    experiment.end = "dry_run"
    result = run("driver=generate", "-m", "seed=1,2", "--config-name", "config", "dry_run=true")
    assert (result.code, result.err) == (0, "")
    jobs = [(call.config.driver.name, call.config.seed) for call in experiment.calls]
    assert jobs == [("generate", 1), ("generate", 2)]
    assert list(Path.cwd().glob("outputs/default/*")) == []
    experiment.end = NotApplicableError("no GPU here")
    assert (
        run("-m", "seed=1,2", "dry_run=true").code == 0
    )  # that one of its jobs cannot run here is no failure
    assert run("dry_run=true").code == 3


def test_offline_runs_of_a_sweep_are_told_with_the_command_that_uploads_them(run):
    assert "upload with" not in run("-m", "seed=1,2").out
    _, _, told = run("-m", "seed=1,2", "tracking=offline").out.partition("upload with: ")
    found = subprocess.run(told.partition("|")[0], shell=True, capture_output=True, text=True)
    assert len(found.stdout.split()) == 2


def test_recorded_command_of_a_job_has_its_number(run, experiment):
    paths = ["stats_path=a b_${hydra:job.num}.json", "tracking.tags=[n${hydra:job.id},'${hydra:job.num}']"]
    assert run("-m", "seed=5,6", *paths).code == 0
    _, swept = experiment.calls
    recorded = json.loads((swept.run_dir / "cell.json").read_text())
    assert "hydra" not in recorded["command"]
    assert run(*shlex.split(recorded["command"])[3:]).code == 0
    alone = experiment.calls[-1].config
    assert (alone.stats_path, alone.tracking.tags) == ("a b_1.json", ["n1", "1"])
    assert alone.stats_path == swept.config.stats_path


# Exit codes


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("out_of_memory", 1, ""),
        (DatasetError("no such file"), 1, "cbexp: no such file\n"),
        (ConfigError("not together"), 2, "cbexp: not together\n"),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_code_of_a_single_run(run, experiment, end, code, message):
    experiment.end = end
    result = run()
    assert result.code == code
    assert result.err.endswith(message)
    assert (result.err != message) == ("Traceback" in result.err) == isinstance(end, ZeroDivisionError)


# Bad configuration

# A command line, and what its message has.
BAD_COMMANDS = [
    ("modle=tiny", "modle=tiny", "Did you mean 'model'?"),
    ("-m seed=1,2 num_rounds=2 seed=3", "seed=1,2 seed=3: seed is given twice"),
    ("model=tinny", "model=tinny is not a choice", "Did you mean 'tiny'?", "qwen3_4b"),
    ("model.dtpye=auto", "model.dtpye=auto", "'model.dtype'", "Allowed in model: name,"),
    ("max_new_tokens=3", "'sampling.max_new_tokens'"),
    ("num_rounds=abc", "num_rounds=abc", "must be an integer"),
    ("sampling.eos_token_ids=[a]", "sampling.eos_token_ids=[a]", "a list of integers", "or null"),
    ("num_rounds", "num_rounds: settings are written as key=value"),
    ("model.name=[a", "model.name=[a: cannot be read"),
    ("compile.region=layer", "there is no setting compile.region any more", "whole model", "Remove it"),
    ("-m cache=small,null", "cache=null is not a choice", "large"),
    ("seed=1,2", "seed=1,2", "add -m"),
    ("dataset.chat_template_kwargs.enable_thinking=false", "++dataset.chat_template_kwargs.enable_thinking="),
    ("model=qwen3_4b ++model.architecture.num_hidden_layers=2", "model.init=random"),
    ("stats_path=${nope}", "stats_path=${nope}", "'nope' not found"),
    ("--config-dir nowhere", "--config-dir=nowhere", "no such folder"),
    ("--config-name nope", "nope"),
    ("-m seed=1,2 stats_path=s.json", "stats_path=s.json", "overwrite", "${hydra:job.num}"),
    ("-m num_rounds=1,0", "job 1 of 2 (num_rounds=0)", "at least 1"),
    ("-m seed=1,2 resume=latest", "there is no sweep in outputs/default"),
    ("-m seed=1,2 resume=nowhere", "resume=nowhere: there is no such folder"),
    ("seed=1 resume=latest", "this is a setting of a sweep"),
    ("-m seed=1,2 isolation=none hydra/launcher=slurm", "isolation=none has no effect"),
    ("-m seed=1,2 dry_run=true hydra/launcher=slurm", "dry_run=true looks at this machine"),
    ("-m experiment=glob(nope*)", "experiment=glob(nope*): this means no value"),
    ("-m isolation=none,process", "isolation is a setting of the whole sweep"),
    ("-m seed=1,2,1", "(seed=1 isolation=none) are the same cell. num_rounds repeats"),
    ("-m tracking.group=a,b", "are the same cell: they differ in tracking.group alone"),
    ("-m seed=1,2 hydra.sweep.subdir=x", "share a folder, x."),
    ("-m seed=1,2 --info config", "-m runs a sweep, and --cfg and --info only show something"),
]


@pytest.mark.parametrize("case", BAD_COMMANDS, ids=lambda case: case[0])
def test_bad_configuration_is_one_message_and_leaves_nothing(run, experiment, case):
    command, *fragments = case
    result = run(*command.split(" "))
    assert result.code == 2
    for fragment in fragments:
        assert fragment in result.err
    assert result.err.startswith("cbexp: ")
    assert "Traceback" not in result.err
    assert result.out == ""
    assert experiment.calls == []
    assert list(Path.cwd().iterdir()) == []


MODEL, EXPERIMENT, GLOBAL = "model/own", "experiment/own", "# @package _global_\n"


@pytest.mark.parametrize(
    ("choice", "text", "fragments"),
    [
        (MODEL, "name: own\nname_or_path: x\ndtpye: auto\n", [f"{MODEL}.yaml", "'model.dtype'"]),
        (MODEL, "name_or_path: x\n", ["model.name is not set"]),
        (EXPERIMENT, "num_rounds: 2\n", [f"{EXPERIMENT}.yaml: begin it with the line '{GLOBAL.strip()}'"]),
        (EXPERIMENT, f"{GLOBAL}cache: small\n", [f"{EXPERIMENT}.yaml: cache is a group", "/cache: small"]),
    ],
)
def test_bad_own_yaml_is_one_message(run, tmp_path, choice, text, fragments):
    path = tmp_path / f"{choice}.yaml"
    path.parent.mkdir()
    path.write_text(text)
    result = run("--config-dir", str(tmp_path), choice.replace("/", "="))
    assert result.code == 2
    assert all(fragment in result.err for fragment in fragments), result.err
    assert "Traceback" not in result.err


def test_launcher_of_an_extra_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr("cbexp.cli.composer._is_installed", lambda module: False)
    result = run("-m", "seed=1,2", "hydra/launcher=slurm")
    assert result.code == 2
    assert result.err == "cbexp: hydra/launcher=slurm needs submitit: pip install 'cbexp[slurm]'.\n"


def test_full_error_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = run("num_rounds=abc")
    assert "Traceback" in result.err
    assert result.err.endswith("cbexp: num_rounds=abc: num_rounds must be an integer.\n")


def test_unwritable_folder_is_one_message(run, experiment):
    Path("outputs").write_text("in the way")
    result = run("seed=1")
    assert (result.code, experiment.calls) == (1, [])
    assert result.err.startswith("cbexp: results cannot be written to outputs/default: ")


# Information


def test_help_configuration_and_version_are_shown_and_nothing_runs(run, experiment):
    shown = run("--help").out
    assert "model: hf, llama3_2_1b, qwen3_0_6b, qwen3_4b, qwen3_8b, tiny" in shown
    assert all(f"\n{item.name}" in shown for item in dataclasses.fields(ExperimentConfig))
    printed = yaml.safe_load(run("model=hf", "--cfg", "job", "num_rounds=3").out)
    assert (printed["num_rounds"], printed["model"]["name_or_path"]) == (3, None)
    assert run("--version").out.split()[0] == "cbexp"
    assert (experiment.calls, list(Path.cwd().iterdir())) == ([], [])


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["-m", "seed=1,x"], 2)])
def test_help_and_errors_do_not_load_torch(tmp_path, arguments, code):
    script = (
        "import sys\nfrom cbexp.cli.command_line import main\n"
        f"try:\n    main({arguments!r})\nfinally:\n"
        "    print([name for name in ('torch', 'transformers', 'wandb', 'datasets') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (code, "[]")
