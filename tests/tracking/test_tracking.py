"""W&B runs read back from disk, and what happens without credentials, network or patience."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import wandb

from cbexp import metrics
from cbexp.config import SweepInfo, TrackingConfig
from cbexp.errors import ConfigError, NotApplicableError
from cbexp.tracking import start_tracking
from tests.tracking.wandb_fixtures import (
    DEAD_SERVER,
    KEY,
    a_round,
    a_summary,
    read_back,
    start,
)

REPOSITORY = Path(__file__).parents[2]


def fail_to_start(**_options: object) -> None:
    raise OSError("no space left")


def test_offline_run_holds_what_was_logged(run_dir):
    config = TrackingConfig(mode="offline", project="my-project", entity="team", tags=["a", "b"])
    resolved = {"model": {"name": "tiny", "dtype": None}, "sampling": {"eos_token_ids": [1, 2]}, "seed": 3}
    rounds = [a_round(0, is_warmup=True), a_round(1), a_round(2)]
    with start_tracking(
        config, "seed=3,compile=eager", SweepInfo("sweep-1", 2, 0), resolved, run_dir
    ) as tracker:
        for record in rounds:
            tracker.log_round(record, [])
        tracker.log_summary(
            a_summary(decode_tps=4.5, wall_s={"median": 1.5}, wall_times_s=[1.0, 2.0], accuracy=None)
        )
    assert tracker.warnings == []

    found = read_back(run_dir)
    assert found.config == resolved
    assert (found.run.project, found.run.entity, found.run.run_group) == ("my-project", "team", "sweep-1")
    assert (found.run.display_name, list(found.run.tags)) == ("seed=3,compile=eager", ["a", "b"])
    assert found.exit_code == 0
    logged = [{k: v for k, v in row.items() if not k.startswith("_")} for row in found.history]
    for row, record, prefix in zip(logged[:3], rounds, ("warmup/", "", ""), strict=True):
        numbers = metrics.flatten_numbers(record.to_dict())
        assert row == {"round": record.round_index} | {
            prefix + name: value for name, value in numbers.items()
        }
    assert logged[1]["ttft_s/p50"] == 1.0
    summary = {key: found.summary[key] for key in ("decode_tps", "wall_s", "wall_times_s", "accuracy")}
    assert summary == {
        "decode_tps": 4.5,
        "wall_s": {"median": 1.5},
        "wall_times_s": [1.0, 2.0],
        "accuracy": None,
    }


def test_all_metrics_are_drawn_against_the_round(run_dir):
    with start(run_dir) as tracker:
        tracker.log_round(a_round(0), [])
    found = read_back(run_dir)
    (glob,) = [metric for metric in found.metrics if metric.glob_name == "*"]
    assert glob.step_metric == "round"
    assert "output_tokens_per_s" not in found.summary, "the last round's value must not pass for the run's"


def test_no_two_jobs_share_a_run(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with start(tmp_path / "first") as one, start(tmp_path / "second") as other:
        one.log_round(a_round(0), [])
        other.log_round(a_round(1), [])
    first, second = read_back(tmp_path / "first"), read_back(tmp_path / "second")
    assert first.run.run_id != second.run.run_id
    assert [row["round"] for row in first.history] == [0]
    assert [row["round"] for row in second.history] == [1]


@pytest.mark.parametrize(
    ("error", "exit_code", "objective"),
    [
        (ValueError("bad"), 1, 0.0),
        (KeyboardInterrupt("stop"), 255, None),
        (NotApplicableError("no GPU"), 0, 0.0),
    ],
)
def test_run_of_a_job_that_ends_badly_says_how_and_is_worth_nothing(run_dir, error, exit_code, objective):
    def run_badly() -> None:
        with start(run_dir) as tracker:
            tracker.log_round(a_round(0), [])
            raise error

    with pytest.raises(type(error)):
        run_badly()
    found = read_back(run_dir)
    assert found.exit_code == exit_code
    assert (found.summary["error_class"], found.summary["message"]) == (type(error).__name__, str(error))
    assert found.summary.get("objective") == objective
    assert [row["objective"] for row in found.history if "objective" in row] == [0.0] * (
        objective is not None
    )


def test_exit_code_is_the_first_one_given(run_dir):
    with start(run_dir) as tracker:
        tracker.finish(exit_code=3)
    assert read_back(run_dir).exit_code == 3


def test_long_names_are_cut_to_what_wandb_takes(run_dir):
    start_tracking(TrackingConfig(mode="offline"), "x" * 300, SweepInfo("g" * 300, 1, 0), {}, run_dir).finish(
        0
    )
    run = read_back(run_dir).run
    assert len(run.display_name) == len(run.run_group) == 128
    assert run.display_name.endswith("x…")


# Completions


def completion_rows(number: int) -> list[dict]:
    return [
        {
            "round_index": 0,
            "request_id": f"req_{index}",
            "finish_reason": "eos",
            "verdict": None if index else True,
            "text": f"confidential {index}",
            "completion_ids": [1],
            "prompt_ids": [2],
        }
        for index in range(number)
    ]


def test_completions_are_logged_up_to_the_limit_when_asked_for(run_dir):
    with start(run_dir, log_completions=True, max_logged_completions=2) as tracker:
        tracker.log_completions(completion_rows(5))
    assert tracker.warnings == []
    (path,) = run_dir.glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["round_index", "request_id", "finish_reason", "verdict", "text"]
    assert table["data"] == [
        [0, "req_0", "eos", True, "confidential 0"],
        [0, "req_1", "eos", None, "confidential 1"],
    ]


def test_completions_stay_private_by_default(run_dir):
    with start(run_dir) as tracker:
        tracker.log_completions(completion_rows(1))
    contents = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert contents
    assert not any(b"confidential" in content for content in contents)


# Modes


def test_offline_says_where_the_data_is_and_how_to_upload_it(run_dir):
    tracker = start(run_dir)
    tracker.finish(0)
    command = re.search(r"upload with: wandb sync (\S+)$", tracker.description)
    assert "W&B offline (as configured)" in tracker.description
    assert Path(command[1]).is_relative_to(run_dir)
    assert list(Path(command[1]).glob("*.wandb"))


def test_auto_without_credentials_is_offline_and_says_why(run_dir):
    tracker = start(run_dir, mode="auto")
    tracker.finish(0)
    assert "W&B offline (there are no credentials for https://" in tracker.description


@pytest.mark.parametrize(
    ("variable", "mode"), [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")]
)
def test_auto_follows_the_mode_set_for_wandb(run_dir, monkeypatch, variable, mode):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", variable)
    tracker = start(run_dir, mode="auto")
    tracker.finish(0)
    assert tracker.description.startswith(f"W&B {mode} (wandb's own mode")
    assert (run_dir / "wandb").exists() == (mode == "offline")


def test_online_without_credentials_is_refused_before_anything_runs(run_dir):
    with pytest.raises(
        ConfigError, match=r"no credentials for https://\S+: run `wandb login`.*tracking=offline"
    ):
        start(run_dir, mode="online")
    assert list(run_dir.iterdir()) == []


def test_disabled_does_not_import_wandb(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from cbexp import metrics
        from cbexp.config import TrackingConfig
        from cbexp.tracking import start_tracking
        with start_tracking(TrackingConfig(mode="disabled"), "name", None, {}, Path(sys.argv[1])) as tracker:
            tracker.log_summary({"decode_tps": 1.0, "peak_reserved_gib": 1.0})
            tracker.log_completions([])
        assert tracker.description == "W&B disabled", tracker.description
        assert tracker.warnings == []
        assert "wandb" not in sys.modules
    """
    run_script(script, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"project": "a/b"}, "project name 'a/b'"), ({"tags": [""]}, "run_tags: .*Tag at index 0 is empty")],
)
def test_what_wandb_would_refuse_is_a_clear_error(run_dir, options, message):
    with pytest.raises(ConfigError, match=message):
        start(run_dir, **options)
    assert list(run_dir.iterdir()) == []


def test_bad_variables_of_wandb_are_a_clear_error(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "soon")
    wandb.teardown()
    with pytest.raises(ConfigError, match="init_timeout"):
        start(run_dir)


def test_variables_of_wandb_that_go_unheard_are_told(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_TAGS", "night,h200")
    monkeypatch.setenv("WANDB_RUN_GROUP", "group")
    wandb.teardown()
    tracker = start(run_dir)
    tracker.finish(0)
    project = TrackingConfig().project
    assert tracker.warnings == [
        f"WANDB_PROJECT=theirs has no effect: tracking.project={project} goes before it."
    ]
    run = read_back(run_dir).run
    assert (run.project, run.entity, list(run.tags)) == (project, "team", ["night", "h200"])
    assert run.run_group == "group"


def test_project_of_an_agent_is_heard_and_told_by_nobody(run_dir, monkeypatch):
    for name, value in (
        ("SWEEP_ID", "sweep7"),
        ("RUN_ID", "run7"),
        ("PROJECT", "theirs"),
        ("ENTITY", "team"),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()
    tracker = start(run_dir)
    tracker.finish(0)
    assert tracker.warnings == []
    assert read_back(run_dir).run.project == "theirs"


def test_tags_of_the_configuration_go_before_the_variables(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_TAGS", "theirs")
    wandb.teardown()
    tracker = start(run_dir, tags=["ours"])
    tracker.finish(0)
    assert tracker.warnings == ["WANDB_TAGS=theirs has no effect: tracking.tags=ours goes before it."]
    assert list(read_back(run_dir).run.tags) == ["ours"]


# Credentials


@pytest.mark.parametrize("host", ["api.wandb.ai", "wandb.example"])
def test_credentials_of_a_netrc_file_count_for_their_host(run_dir, tmp_path, monkeypatch, host):
    (tmp_path / "HOME" / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
    monkeypatch.setattr(wandb, "init", fail_to_start)
    tracker = start(run_dir, mode="auto")
    tried = [re.match(r"W&B could not start (\w+):", warning)[1] for warning in tracker.warnings]
    assert tried == (["online", "offline"] if host == "api.wandb.ai" else ["offline"])


def test_key_of_the_wrong_shape_means_offline_and_says_so(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    tracker = start(run_dir, mode="auto")
    tracker.finish(0)
    assert "W&B offline (the credentials cannot be used (WANDB_API_KEY invalid:" in tracker.description
    with pytest.raises(ConfigError, match="tracking=online, but the credentials cannot be used"):
        start(run_dir, mode="online")


def test_online_against_wandbs_own_mode_is_refused(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match=r"tracking=online, but wandb's own mode is offline \(WANDB_MODE\)"):
        start(run_dir, mode="online")


# W&B out of reach


def test_unreachable_server_at_the_start_means_offline_with_a_warning(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", DEAD_SERVER)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    wandb.teardown()
    with start(run_dir, mode="online") as tracker:
        tracker.log_round(a_round(0), [])
    assert "W&B offline (online failed); upload with: wandb sync" in tracker.description
    (warning,) = tracker.warnings
    assert "could not start online" in warning
    assert "connection refused" in warning
    assert f"; the data is kept: wandb sync {run_dir}/wandb/offline-run-" in warning
    assert [row["round"] for row in read_back(run_dir).history] == [0]


@pytest.mark.usefixtures("server")
def test_online_run_names_its_page_prints_nothing_and_leaks_no_key(run_dir, capfd):
    with start(run_dir, mode="auto") as tracker:
        tracker.log_round(a_round(0), [])
    assert tracker.warnings == []
    assert tracker.description.startswith("W&B online (credentials found); http://127.0.0.1:")
    assert "/team/project/runs/" in tracker.description
    assert capfd.readouterr() == ("", "")
    assert not any(KEY.encode() in path.read_bytes() for path in run_dir.rglob("*") if path.is_file())


def test_server_lost_in_the_middle_loses_no_round(run_dir, server):
    tracker = start(run_dir, mode="online")
    tracker.log_round(a_round(0), [])
    server.stop()
    tracker.log_round(a_round(1), [])
    tracker.log_summary(a_summary(decode_tps=1.0))
    started_s = time.monotonic()
    tracker.finish(0)
    assert time.monotonic() - started_s < 10
    refused, unfinished = tracker.warnings
    assert refused.startswith("W&B: logging the records failed (")
    command = r"wandb sync --include-online \S+/run-\S+$"
    assert re.search(rf"finishing the run took too long; the data is kept: {command}", unfinished)
    found = read_back(run_dir, "run-*")
    assert [row["round"] for row in found.history if "wall_s" in row] == [0, 1]
    assert found.summary["decode_tps"] == found.summary["objective"] == 1.0
    assert {"records/run-summary.json", "records/run-config.json"} <= found.saved_files


# wandb itself breaks


def test_failures_of_wandb_are_counted_and_end_nothing(run_dir, monkeypatch):
    with start(run_dir) as tracker:

        def fail(*_arguments: object) -> None:
            raise RuntimeError("broken pipe")

        monkeypatch.setattr(wandb.Run, "log", fail)
        tracker.log_round(a_round(0), [])
        tracker.log_round(a_round(1), [])
    assert tracker.warnings == ["W&B: logging a round failed (RuntimeError: broken pipe) (2 times)"]
    assert read_back(run_dir).exit_code == 0


def test_wandb_that_cannot_start_at_all_leaves_the_job_alone(run_dir, monkeypatch):
    monkeypatch.setattr(wandb, "init", fail_to_start)
    with start(run_dir) as tracker:
        tracker.log_round(a_round(0), [])
    assert tracker.description == "W&B off"
    assert tracker.warnings == ["W&B could not start offline: no space left"]


# Crashes and noise


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY)


LOGGING_SCRIPT = """
    import sys, time
    from pathlib import Path
    from cbexp.config import TrackingConfig
    from cbexp.tracking import start_tracking
    from tests.tracking.wandb_fixtures import a_round
    tracker = start_tracking(TrackingConfig(mode="offline"), "name", None, {"seed": 1}, Path(sys.argv[1]))
    for index in range(5):
        tracker.log_round(a_round(index), [])
"""


def test_killed_process_has_its_rounds_on_disk(run_dir):
    """Killed together with wandb's own process, as a machine that goes down would."""
    script = LOGGING_SCRIPT + '    print("logged", flush=True)\n    time.sleep(60)\n'
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), run_dir],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdout.readline() == "logged\n"
    time.sleep(1.5)
    for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
        victim.kill()
    process.communicate()
    found = read_back(run_dir)
    assert [row["round"] for row in found.history] == [0, 1, 2, 3, 4]
    assert found.config == {"seed": 1}
    assert found.exit_code is None


def test_wandb_prints_nothing(run_dir):
    done = run_script(LOGGING_SCRIPT + "    tracker.finish(0)\n", run_dir)
    assert (done.stdout, done.stderr) == ("", "")


def test_wandb_folder_lies_inside_the_run_directory(run_dir, tmp_path, monkeypatch):
    launch_folder = tmp_path / "launch"
    launch_folder.mkdir()
    monkeypatch.chdir(launch_folder)
    start(run_dir).finish(0)
    assert list(launch_folder.iterdir()) == []
    assert list((run_dir / "wandb").glob("offline-run-*"))


def test_upload_command_is_relative_to_the_launch_folder(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    tracker = start(run_dir)
    tracker.finish(0)
    assert "wandb sync run/wandb/offline-run-" in tracker.description
