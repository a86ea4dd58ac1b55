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
from hydra.core.global_hydra import GlobalHydra

from cbexp.cli.command_line import main
from cbexp.cli.objective import find_objective
from cbexp.config import ExperimentConfig, TrackingConfig
from cbexp.errors import CbexpError, ConfigError, DatasetError, NotApplicableError

REPOSITORY = Path(__file__).resolve().parents[1]


class StubExperiment:
    """Stands for `run_experiment`: records its calls; `behave` decides how each job ends."""

    def __init__(self):
        self.calls = []
        self.behave = lambda config: "completed"

    def __call__(self, config, run_dir, overrides, sweep):
        call = SimpleNamespace(
            config=config, run_dir=run_dir, overrides=overrides, sweep=sweep, cwd=Path.cwd()
        )
        self.calls.append(call)
        status = self.behave(config)
        summary = {"decode_tps": 1234.5} if status == "completed" else None
        if status != "dry_run":
            (run_dir / "status.json").write_text(json.dumps({"status": status}))
        if summary:
            (run_dir / "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(status=status, run_dir=run_dir, summary=summary, message=None)


@pytest.fixture
def experiment(monkeypatch):
    stub = StubExperiment()
    module = ModuleType("cbexp.experiment")
    module.run_experiment = stub
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

    yield run_command
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"decode_tps": 5, "peak_reserved_gib": 1.5}, 5.0),
        ({"decode_tps": 5, "peak_reserved_gib": 2.5}, 0.0),
        ({"decode_tps": None}, None),
        (None, None),
    ],
)
def test_a_job_returns_the_objective_of_a_search(summary, expected):
    config = ExperimentConfig(tracking=TrackingConfig(max_memory_gib=2.0))
    assert find_objective(config, summary) == expected


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


def test_process_arguments_are_used_without_argv_and_left_alone(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/cbexp", "num_rounds=3"])
    main()
    assert experiment.calls[0].config.num_rounds == 3
    assert sys.argv == ["/usr/bin/cbexp", "num_rounds=3"]


def test_own_yamls_come_in_with_config_dir(run, experiment, tmp_path):
    own = tmp_path / "my conf" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        "defaults:\n  - qwen3_4b\n  - override /dataset@_global_.dataset: gsm8k\n"
        "name: mine\ninit: random\narchitecture:\n  num_hidden_layers: 2\n"
    )
    assert run("--config-dir", str(own.parent), "model=mine").code == 0
    (call,) = experiment.calls
    assert (call.config.model.name, call.config.dataset.name) == ("mine", "gsm8k")
    assert call.config.model.architecture["num_hidden_layers"] == 2
    assert call.config.model.architecture["hidden_size"] == 2560


@pytest.mark.parametrize("value", ["null", "NULL", "none"])
def test_no_experiment_can_be_chosen(run, experiment, value):
    assert run(f"experiment={value}").code == 0
    assert run().code == 0
    chosen, default = (call.config for call in experiment.calls)
    assert chosen == default


# Sweeps


@pytest.mark.parametrize(
    "chosen", [["-m", "compile=eager,default"], ["experiment=compile_modes", "compile=eager,default"]]
)
def test_sweep_runs_each_combination_in_its_own_folder(run, experiment, chosen):
    """Whether -m or an experiment makes it one."""
    result = run(*chosen, "sampling.ignore_eos=false,true", "tracking.group=mine", "isolation=none")
    assert result.code == 0, result.err
    assert [(call.config.compile.mode, call.config.sampling.ignore_eos) for call in experiment.calls] == [
        ("eager", False), ("eager", True), ("default", False), ("default", True),
    ]  # fmt: skip
    assert experiment.calls[1].run_dir.name.endswith("1_compile=eager_ignore_eos=True")
    assert {"compile=eager", "sampling.ignore_eos=True"} < set(experiment.calls[1].overrides)
    assert len({call.run_dir.parent for call in experiment.calls}) == 1
    assert [call.sweep.job_index for call in experiment.calls] == [0, 1, 2, 3]
    assert {(call.sweep.group, call.sweep.num_jobs) for call in experiment.calls} == {("mine", 4)}


@pytest.mark.parametrize("more", [[], ["dry_run=true"]])
def test_no_experiment_can_be_a_cell_of_a_sweep(run, experiment, more):
    experiment.behave = lambda config: "dry_run" if config.dry_run else "completed"
    result = run("-m", "experiment=null,smoke", *more)
    assert (result.code, result.err) == (0, "")
    default, smoke = (call.config for call in experiment.calls)
    assert (default.dataset.num_prompts, smoke.dataset.num_prompts) == (32, 4)
    assert [call.overrides[0] for call in experiment.calls] == ["experiment=none", "experiment=smoke"]


@pytest.mark.parametrize("more", [[], ["dry_run=true"]])
def test_settings_may_stand_before_and_after_flags(run, experiment, more):
    if more:
        experiment.behave = lambda config: "dry_run"
    result = run("driver=generate", "-m", "seed=1,2", "--config-name", "config", "num_rounds=2", *more)
    assert (result.code, result.err) == (0, "")
    assert [(call.config.driver.name, call.config.seed) for call in experiment.calls] == [
        ("generate", 1), ("generate", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("asking", [["--cfg", "job"], ["--info", "config"]])
def test_a_sweep_shows_no_configuration(run, asking):
    result = run("-m", "seed=1,2", *asking)
    assert (result.code, result.out) == (2, "")
    assert "-m runs a sweep, and --cfg and --info only show something" in result.err
    assert "Traceback" not in result.err


def test_dry_run_of_a_sweep_runs_each_job_here_and_leaves_nothing(run, experiment):
    experiment.behave = lambda config: "dry_run"
    result = run("-m", "seed=1,2", "dry_run=true")
    assert (result.code, [call.config.seed for call in experiment.calls]) == (0, [1, 2])
    assert list(Path.cwd().glob("outputs/default/*")) == []


def test_dry_run_of_a_job_that_this_machine_cannot_run_is_no_failure(run, experiment):
    def refuse(config):
        raise NotApplicableError("no GPU here")

    experiment.behave = refuse
    assert run("-m", "seed=1,2", "dry_run=true").code == 0
    result = run("dry_run=true")
    assert result.code == 3
    assert "no GPU here" in result.err


def test_offline_runs_of_a_sweep_are_told_with_the_command_that_uploads_them(run, experiment):
    def behave(config):
        run_dir = experiment.calls[-1].run_dir
        (run_dir / "attempts/1/wandb/offline-run-1").mkdir(parents=True)
        return "completed"

    assert "upload with" not in run("-m", "seed=1,2").out
    experiment.behave = behave
    line = next(line for line in run("-m", "seed=1,2").out.splitlines() if "upload with: " in line)
    found = subprocess.run(
        line.partition("upload with: ")[2].partition("|")[0], shell=True, capture_output=True, text=True
    )
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


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("completed", 0),
        ("dry_run", 0),
        ("failed", 1),
        ("out_of_memory", 1),
        ("not_applicable", 3),
        ("interrupted", 130),
        (DatasetError("no such file"), 1),
        (ConfigError("not together"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_code_of_a_single_run(run, experiment, end, code):
    experiment.behave = lambda config: raise_(end) if isinstance(end, BaseException) else end
    result = run()
    assert result.code == code
    assert result.err == (f"cbexp: {end}\n" if isinstance(end, CbexpError) else "")


def test_bug_shows_where_it_is(run, experiment):
    experiment.behave = lambda config: raise_(ZeroDivisionError("oops"))
    result = run()
    assert result.code == 1
    assert "Traceback" in result.err and "ZeroDivisionError: oops" in result.err


def test_keyboard_interrupt_stops_a_sweep(run, experiment):
    experiment.behave = lambda config: raise_(KeyboardInterrupt())
    result = run("-m", "seed=0,1,2")
    assert (result.code, len(experiment.calls)) == (130, 1)
    assert "0 of 3 cells are done" in result.out
    assert result.out.count("not_started") == 2


# Bad configuration

# A command line, and what its message has.
BAD_COMMANDS = [
    ("modle=tiny", "modle=tiny", "Did you mean 'model'?"),
    ("seed=1 seed=1", "seed=1 seed=1: seed is given twice"),
    ("-m seed=1,2 num_rounds=2 seed=3", "seed=1,2 seed=3: seed is given twice"),
    ("driver=generate -m seed=1,2 driver=sync,manager", "driver is given twice"),
    ("+tracking.group=a ++tracking.group=b", "tracking.group is given twice"),
    ("model=tinny", "model=tinny is not a choice", "Did you mean 'tiny'?", "qwen3_4b"),
    ("model.dtpye=auto", "model.dtpye=auto", "'model.dtype'", "Allowed in model: name,"),
    ("compile=reduce-overhead", "compile=reduce-overhead", "'reduce_overhead'", "max_autotune"),
    ("num_round=3", "num_round=3", "'num_rounds'"),
    ("max_new_tokens=3", "'sampling.max_new_tokens'"),
    ("num_rounds=abc", "num_rounds=abc", "must be an integer"),
    ("num_rounds=null", "num_rounds=null", "must be an integer"),
    ("dataset.num_prompts=1.5", "dataset.num_prompts=1.5", "must be an integer"),
    ("dry_run=maybe", "dry_run=maybe", "must be true or false"),
    ("sampling.eos_token_ids=[a]", "sampling.eos_token_ids=[a]", "a list of integers", "or null"),
    ("tracking.tags=a", "tracking.tags=a", "a list of text"),
    ("cache.max_memory_fraction=most", "must be a number"),
    ("model.init.x=3", "model.init.x=3", "model.init must be text"),
    ("num_rounds", "num_rounds: settings are written as key=value"),
    ("model.name=[a", "model.name=[a: cannot be read"),
    ("+foo=3", "+foo", "there is no setting foo"),
    ("compile.region=layer", "there is no setting compile.region any more", "whole model", "Remove it"),
    ("+model.foo=3", "+model.foo", "there is no setting model.foo", "Allowed in model"),
    ("model=null", "model=null is not a choice"),
    ("+model=3", "model=3 is not a choice"),
    ("hydra/launcher=null", "hydra/launcher=null is not a choice", "slurm"),
    ("-m cache=small,3", "cache=3 is not a choice", "large"),
    ("-m cache=small,null", "cache=null is not a choice", "large"),
    ("-m cache=small,[a]", "cache=[a] is not a choice", "large"),
    ("-m driver=true,sync", "driver=True is not a choice", "generate"),
    ("-m experiment=3,smoke", "experiment=3 is not a choice", "none", "rollout_32"),
    ("hydra.sweeper.params.seed='1,2'", "hydra.sweeper.params.seed='1,2'", "-m seed=1,2"),
    ("-m +hydra.sweeper.params.seed='1,2'", "hydra.sweeper.params.seed='1,2'", "-m seed=1,2"),
    ("model=[a,b]", "model=[a,b] is not a choice"),
    ("~model", "model.name is not set"),
    ("seed=1,2", "seed=1,2", "add -m"),
    ("hydra.foo=3", "hydra.foo", "--hydra-help"),
    ("model=hf", "model.name_or_path is not set", "model.name_or_path=org/name"),
    ("dataset.chat_template_kwargs.enable_thinking=false", "++dataset.chat_template_kwargs.enable_thinking="),
    ("model=qwen3_4b ++model.architecture.num_hidden_layers=2", "model.init=random"),
    ("stats_path=${nope}", "stats_path=${nope}", "'nope' not found"),
    ("hydra.run.dir=${nope}", "hydra.run.dir=${nope}", "'nope' not found"),
    ("--config-dir nowhere", "--config-dir=nowhere", "no such folder"),
    ("--config-path conf", "--config-path=conf", "--config-dir"),
    ("--config-name nope", "nope"),
    ("--experimental-rerun config.pickle", "--experimental-rerun", "overrides"),
    ("experiment=compile_modes hydra.mode=RUN", "add -m"),
    ("-m seed=interval(0,1)", "INTERVAL"),
    ("-m seed=1,2 hydra.launcher._target_=x.Y", "hydra/launcher", "basic"),
    ("-m seed=1,2 stats_path=s.json", "stats_path=s.json", "overwrite", "${hydra:job.num}"),
    ("-m model=tiny,tinny", "job 1 of 2", "model=tinny", "'tiny'"),
    ("-m num_rounds=1,0", "job 1 of 2 (num_rounds=0)", "at least 1"),
    ("experiment=compile_modes compile=eager,kuda_graph", "job 1 of 2", "'cuda_graph'"),
    ("-m seed=1,2 resume=latest", "there is no sweep in outputs/default"),
    ("-m seed=1,2 resume=nowhere", "resume=nowhere: there is no such folder"),
    ("-m seed=1,2 resume=.", "this is no sweep's folder"),
    ("-m seed=1,2 resume=", "resume is not set"),
    ("seed=1 resume=latest", "this is a setting of a sweep"),
    ("seed=1 cell_timeout_s=3", "this is a setting of a sweep"),
    ("-m seed=1,2 resume_force=true", "no effect without resume"),
    ("-m seed=1,2 resume=latest dry_run=true", "no effect with dry_run=true"),
    ("-m seed=1,2 isolation=none cell_timeout_s=3", "no effect with isolation=none"),
    ("-m seed=1,2 cell_timeout_s=0", "cell_timeout_s=0"),
    ("-m seed=1,2 isolation=thread", "isolation=thread is not a choice"),
    ("-m seed=1,2 isolation=none hydra/launcher=slurm", "isolation=none has no effect"),
    ("-m seed=1,2 dry_run=true hydra/launcher=slurm", "dry_run=true looks at this machine"),
    ("-m seed=1,2 hydra/sweeper=optuna", "hydra/sweeper=optuna is not a choice", "basic"),
    ("-m seed=range(0,0) num_rounds=1,2", "seed=range(0,0): this means no value"),
    ("-m experiment=glob(nope*)", "experiment=glob(nope*): this means no value"),
    ("=1", "'=1': settings are written as key=value"),
    ("", "'': settings are written as key=value"),
    ("-m seed=1,2 hydra.sweep.dir=", "hydra.sweep.dir=. must name a folder"),
    ("-m isolation=none,process", "isolation is a setting of the whole sweep"),
    ("-m seed=1,2,1", "(seed=1 isolation=none) are the same cell. num_rounds repeats"),
    ("-m tracking.group=a,b", "are the same cell: they differ in tracking.group alone"),
    ("-m tracking=offline,disabled", "they differ in tracking.mode alone, and that is no part of"),
    ("-m name=a,b", "they differ in name alone, and that is no part of what a cell is"),
    (
        "-m cell_timeout_s=1,2",
        "job 0 (cell_timeout_s=1) and job 1 (cell_timeout_s=2)",
        "they differ in cell_timeout_s alone",
    ),
    ("-m seed=1,2 hydra.sweep.subdir=x", "would share a folder"),
    ("-m seed=1,2 hydra.sweeper.max_batch_size=1", "max_batch_size has no effect", "array_parallelism"),
    ("-m seed=1,2 hydra.sweep.subdir=../${hydra.job.num}", "must be a folder of its own inside"),
    ("-m seed=1 hydra.sweep.subdir=.", "must be a folder of its own inside"),
    ("-m seed=1 hydra.sweep.subdir=sweep.json/${seed}", "must be a folder of its own inside"),
    (
        "-m dataset.system_prompt=x/y,x hydra.sweep.subdir=${dataset.system_prompt}",
        "hydra.sweep.subdir=x/y",
        "share a folder, x.",
    ),
    ("-m seed=1,2 tracking.tags=['\udcff']", "no valid UTF-8"),
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


OWN_MODEL, OWN_EXPERIMENT = "model/own.yaml", "experiment/own.yaml"
GLOBAL = "# @package _global_\n"


@pytest.mark.parametrize(
    ("file", "text", "fragments"),
    [
        (OWN_MODEL, "name: own\nname_or_path: x\ndtpye: auto\n", [OWN_MODEL, "'model.dtype'"]),
        (OWN_MODEL, "name: own\ndefault_max_new_tokens: many\n", [OWN_MODEL, "must be an integer"]),
        (OWN_MODEL, "name: [a\n", ["own.yaml", "line"]),
        (OWN_MODEL, "- a\n", ["model/own"]),
        (OWN_MODEL, "name_or_path: x\n", ["model.name is not set"]),
        (OWN_MODEL, "name: own\n", ["model.name_or_path is not set"]),
        (OWN_MODEL, "defaults:\n  - override /dataset: gsm8k\n", ["model/own", "override dataset"]),
        (OWN_EXPERIMENT, "num_rounds: 2\n", [f"{OWN_EXPERIMENT}: begin it with the line '{GLOBAL.strip()}'"]),
        (OWN_EXPERIMENT, f"{GLOBAL}cache: small\n", [f"{OWN_EXPERIMENT}: cache is a group", "/cache: small"]),
        (OWN_EXPERIMENT, f"{GLOBAL}num_round: 2\n", [f"{OWN_EXPERIMENT}: there is no setting num_round."]),
    ],
)
def test_bad_own_yaml_is_one_message(run, tmp_path, file, text, fragments):
    path = tmp_path / "own" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    result = run("--config-dir", str(tmp_path / "own"), f"{path.parent.name}=own")
    assert result.code == 2
    assert all(fragment in result.err for fragment in fragments), result.err
    assert "Traceback" not in result.err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("name", ["experiment/rollout_32", "model/tiny", "hydra/launcher/slurm", "config"])
@pytest.mark.parametrize(
    "flags",
    [
        ["--config-dir", "own"],
        ["--config-dir", "own", "--cfg", "job"],
        ["hydra.searchpath=[file://own]"],
        ["-m", "seed=1,2", "hydra.searchpath=[own]"],
    ],
)
def test_own_choice_with_the_name_of_a_built_in_one_is_refused(run, experiment, name, flags):
    own = Path("own") / f"{name}.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\nnum_rounds: 2\n")
    result = run(*flags)
    assert (result.code, experiment.calls) == (2, [])
    assert f"{own} has the name of a built-in choice, which would go before it" in result.err


@pytest.mark.parametrize("flag", ["--config-dir={}", "hydra.searchpath=[file://{}]", "hydra.searchpath=[{}]"])
def test_own_choices_are_found_and_the_shipped_folder_is_no_clash(run, experiment, flag):
    own = Path("own/experiment/mine.yaml")
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\nnum_rounds: 2\n")
    assert run(flag.format("own"), "experiment=mine").code == 0
    assert experiment.calls[0].config.num_rounds == 2
    assert run(flag.format(REPOSITORY / "conf")).code == 0


def test_launcher_of_an_extra_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr("cbexp.cli.composer._is_installed", lambda module: False)
    result = run("-m", "seed=1,2", "hydra/launcher=slurm")
    assert (result.code, list(Path.cwd().iterdir())) == (2, [])
    assert result.err == "cbexp: hydra/launcher=slurm needs submitit: pip install 'cbexp[slurm]'.\n"


def test_full_error_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    result = run("num_rounds=abc")
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.endswith("cbexp: num_rounds=abc: num_rounds must be an integer.\n")


@pytest.mark.parametrize(
    ("taken", "arguments", "message"),
    [("outputs", [], "outputs/default: "), ("taken", ["hydra.run.dir=taken"], "taken: it is a file.")],
)
def test_unwritable_folder_is_one_message(run, experiment, taken, arguments, message):
    Path(taken).write_text("in the way")
    result = run(*arguments)
    assert (result.code, experiment.calls) == (1, [])
    assert result.err.startswith(f"cbexp: results cannot be written to {message}")
    assert "hydra.run.dir" in result.err


# Information


def test_help_lists_groups_choices_and_every_setting_of_the_root(run):
    result = run("--help")
    assert result.code == 0
    assert "model: hf, llama3_2_1b, qwen3_0_6b, qwen3_4b, qwen3_8b, tiny" in result.out
    assert all(word in result.out for word in ("--config-dir", "-m compile=eager,default"))
    assert all(f"\n{item.name}" in result.out for item in dataclasses.fields(ExperimentConfig))
    assert list(Path.cwd().iterdir()) == []


def test_config_is_printed_without_running(run, experiment):
    result = run("model=hf", "--cfg", "job", "num_rounds=3")
    printed = yaml.safe_load(result.out)
    assert (printed["num_rounds"], printed["model"]["name_or_path"]) == (3, None)
    assert experiment.calls == []
    assert list(Path.cwd().iterdir()) == []


def test_version_is_cbexps_own(run):
    result = run("--version")
    assert (result.code, result.out.split()[0]) == (0, "cbexp")


# In a process of its own


def run_python(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["modle=tiny"], 2), (["-m", "seed=1,x"], 2)]
)
def test_help_and_errors_do_not_load_torch(tmp_path, arguments, code):
    script = (
        "import sys\nfrom cbexp.cli.command_line import main\ncode = 0\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "print(code, [name for name in ('torch', 'transformers', 'wandb', 'datasets') if name in sys.modules])"
    )
    result = run_python(tmp_path, "-c", script)
    assert result.stdout.splitlines()[-1] == f"{code} []"


def test_module_runs_from_any_folder(tmp_path):
    result = run_python(tmp_path, "-m", "cbexp", "model=tinny")
    assert result.returncode == 2
    assert result.stderr.startswith("cbexp: model=tinny is not a choice.")
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []
