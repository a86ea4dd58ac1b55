"""The whole path in one process: what a job writes, and how each way to end is recorded."""

import json
import os
from pathlib import Path

import pytest

from cbexp.artifacts import read_jsonl
from cbexp.config import (
    ArtifactsConfig,
    CompileConfig,
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
    TrackingConfig,
)
from cbexp.dataset.completion_limits import draw_limits
from cbexp.experiment import run_experiment


def make_config(**changes):
    settings = {
        "model": ModelConfig(
            name="tiny", name_or_path="builtin:tiny", default_max_new_tokens=96, num_threads=1
        ),
        "dataset": DatasetConfig(verifier="arithmetic", num_prompts=6),
        "tracking": TrackingConfig(mode="disabled"),
        "num_rounds": 2,
    }
    return ExperimentConfig(**(settings | changes))


def run(tmp_path: Path, **changes):
    return run_experiment(make_config(**changes), tmp_path / "run", ["num_rounds=2"])


def load(run_dir: Path, name: str):
    return json.loads((run_dir / name).read_text())


def rows(run_dir: Path, name: str):
    return read_jsonl(run_dir / name)[0]


@pytest.mark.parametrize("driver", ["sync", "manager", "generate"])
def test_every_driver_answers_and_keeps_the_same_records(tmp_path, driver):
    outcome = run(tmp_path, driver=DriverConfig(name=driver))
    assert outcome.status == "completed", outcome.message
    run_dir = outcome.run_dir
    summary = load(run_dir, "summary.json")
    assert summary == outcome.summary
    assert summary["accuracy"] == 1.0
    assert summary["backend"] == driver
    assert summary["finish_reasons"]["eos"] == summary["num_requests"] == 12
    rounds = rows(run_dir, "rounds.jsonl")
    assert [r["is_warmup"] for r in rounds] == [True, False, False]
    requests = rows(run_dir, "requests.jsonl")
    completions = rows(run_dir, "completions.jsonl")
    assert len(requests) == len(completions) == 18
    timed_tokens = sum(len(c["completion_ids"]) for c in completions if c["round_index"] > 0)
    assert summary["num_output_tokens"] == timed_tokens
    assert summary["decode_tps"] == pytest.approx(summary["n_decoded_tokens"] / summary["median_wall_s"])
    assert load(run_dir, "status.json")["status"] == "completed"
    assert load(run_dir, "engine.json")["driver"]["eos_token_ids"] == [257]
    assert load(run_dir, "environment.json")["versions"]["transformers"]


def test_drivers_do_the_same_work(tmp_path):
    digests, hashes = set(), set()
    for driver in ("sync", "manager", "generate"):
        outcome = run_experiment(
            make_config(driver=DriverConfig(name=driver), num_rounds=1), tmp_path / driver, []
        )
        digests.add(rows(outcome.run_dir, "rounds.jsonl")[0]["completions_digest"])
        hashes.add(outcome.summary["workload_hash"])
    assert len(digests) == 1
    assert len(hashes) == 1


def test_generations_of_a_prompt_are_judged_with_its_answer(tmp_path):
    outcome = run(
        tmp_path, dataset=DatasetConfig(verifier="arithmetic", num_prompts=3, num_generations=2), num_rounds=1
    )
    assert outcome.summary["num_judged"] == outcome.summary["num_correct"] == 6
    assert load(outcome.run_dir, "engine.json")["driver"]["block_sharing"] is True


def test_fixed_length_run_counts_equal_work(tmp_path):
    outcome = run(tmp_path, sampling=SamplingConfig(max_new_tokens=7, ignore_eos=True))
    assert outcome.summary["is_fixed_length"] is True
    assert outcome.summary["n_decoded_tokens"] == 6 * 7
    assert outcome.summary["num_short"] == 0


@pytest.mark.parametrize("driver", ["sync", "manager", "generate"])
def test_every_prompt_has_its_own_limit(tmp_path, driver):
    sampling = SamplingConfig(max_new_tokens=20, median_new_tokens=8, ignore_eos=True, new_tokens_seed=3407)
    config = make_config(
        sampling=sampling,
        dataset=DatasetConfig(verifier="arithmetic", num_prompts=6, num_generations=2),
        driver=DriverConfig(name=driver),
    )
    outcome = run_experiment(config, tmp_path / "run", [])
    assert outcome.status == "completed", outcome.message
    limits = [limit for limit in draw_limits(sampling, 6, 3407) for _ in range(2)]
    assert len(set(limits)) > 3
    requests = rows(outcome.run_dir, "requests.jsonl")[:12]
    assert [r["num_tokens"] for r in requests] == [r["max_new_tokens"] for r in requests] == limits
    summary = outcome.summary
    assert (summary["has_limits_per_prompt"], summary["num_short"]) == (True, 0)
    assert (summary["max_new_tokens"], summary["n_decoded_tokens"]) == (max(limits), sum(limits))


def test_summary_tells_how_decoding_went(tmp_path):
    outcome = run(tmp_path, compile=CompileConfig(batch_shape="buckets", buckets=[4, 8], max_burst=16))
    summary, engine = outcome.summary, load(outcome.run_dir, "engine.json")
    assert (summary["compile_mode"], summary["attn_impl"], summary["batch_shape"]) == (
        "eager",
        "cbexp",
        "buckets",
    )
    assert summary["graphs"] == summary["replays"] == 0
    assert summary["steps_per_burst"] <= 16
    assert summary["tokens_per_burst"] > summary["steps_per_burst"]
    assert summary["padding_share"] > 0
    assert (summary["bandwidth_bytes_per_s"], summary["roofline_fraction"]) == (None, None)
    durations_s = dict(summary["durations_s"])
    assert {"prepare", "load_model", "build_driver", "driver_warmup"} < set(durations_s)
    assert sum(durations_s.values()) - durations_s["total"] < durations_s["total"]
    assert engine["plan"]["buckets"] == [4, 8]
    assert engine["driver"]["fusion"] == summary["fusion"]
    assert engine["compile_cache"] is None


@pytest.mark.parametrize("shape", ["natural", "full"])
def test_batch_shapes_give_the_same_completions(tmp_path, shape):
    shaped = run(tmp_path, compile=CompileConfig(batch_shape=shape), num_rounds=1)
    plain = run_experiment(make_config(num_rounds=1), tmp_path / "plain", [])
    digests = [rows(outcome.run_dir, "rounds.jsonl")[0]["completions_digest"] for outcome in (shaped, plain)]
    assert digests[0] == digests[1]
    bursts = [step for step in rows(shaped.run_dir, "steps.jsonl") if step["kind"] == "decode"]
    assert all(step["bucket"] == (6 if shape == "full" else step["num_requests"]) for step in bursts)


def test_compiled_job_keeps_its_code_where_it_was_told_to(tmp_path):
    config = {"compile": CompileConfig(mode="default", cache_dir=str(tmp_path / "compiled"), buckets=[8])}
    outcome = run(tmp_path, num_rounds=1, **config)
    assert outcome.status == "completed", outcome.message
    assert outcome.summary["accuracy"] == 1.0
    assert outcome.summary["compile_s"] > 0
    assert outcome.summary["graph_breaks"] == 0
    size = sum(path.stat().st_size for path in (tmp_path / "compiled").rglob("*") if path.is_file())
    assert 0 < outcome.summary["compile_cache_bytes"] <= size
    assert (
        "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        or str(tmp_path) not in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    )


def test_completions_can_be_limited(tmp_path):
    outcome = run(tmp_path, artifacts=ArtifactsConfig(completions="2"))
    assert len(rows(outcome.run_dir, "completions.jsonl")) == 2 * 3


def test_stats_path_gets_the_summary_too(tmp_path):
    outcome = run(tmp_path, stats_path=str(tmp_path / "stats" / "summary.json"))
    assert load(tmp_path / "stats", "summary.json") == outcome.summary


def test_compile_mode_that_a_driver_lacks_is_refused_in_one_line(tmp_path):
    outcome = run(tmp_path, compile=CompileConfig(mode="default"), driver=DriverConfig(name="generate"))
    assert outcome.status == "bad_config"
    assert "compile.mode=default does not work with driver=generate" in outcome.message
    assert "\n" not in outcome.message
    assert load(outcome.run_dir, "status.json")["status"] == "failed"
    assert not (outcome.run_dir / "summary.json").exists()


def test_graphs_on_a_cpu_are_not_applicable(tmp_path):
    config = {"compile": CompileConfig(mode="cuda_graph"), "driver": DriverConfig(name="manager")}
    outcome = run(tmp_path, model=make_config().model, **config)
    assert outcome.status == "not_applicable"
    assert "CUDA graphs" in outcome.message
    assert load(outcome.run_dir, "status.json")["status"] == "not_applicable"


def break_after_steps(monkeypatch, num_steps, error):
    from cbexp.job import Job

    original = Job._on_step

    def on_step(self, step_index, info):
        original(self, step_index, info)
        if step_index >= num_steps:
            raise error

    monkeypatch.setattr(Job, "_on_step", on_step)


def test_interrupt_keeps_what_was_finished(tmp_path, monkeypatch):
    # A whole round takes about 70 steps: the second one is broken off after the burst in which some requests ended.
    short_bursts = {"compile": CompileConfig(max_burst=8)}
    outcome = run(tmp_path, num_rounds=1, **short_bursts)
    steps = [step for step in rows(outcome.run_dir, "steps.jsonl") if step["round_index"] == 0]
    first_end = next(i for i, step in enumerate(steps) if step["num_finished"])
    num_steps = sum(step["num_steps"] for step in steps + steps[:first_end])
    break_after_steps(monkeypatch, num_steps, KeyboardInterrupt())
    broken = run_experiment(make_config(**short_bursts), tmp_path / "broken", [])
    assert broken.status == "interrupted"
    assert load(broken.run_dir, "status.json")["status"] == "interrupted"
    assert len(rows(broken.run_dir, "rounds.jsonl")) == 1
    second = [r for r in rows(broken.run_dir, "requests.jsonl") if r["round_index"] == 1]
    assert len(second) == 6
    assert [r["finish_reason"] for r in second].count("eos") >= 1
    assert [r["finish_reason"] for r in second].count("failed") >= 1


def test_bug_is_recorded_with_its_traceback(tmp_path, monkeypatch):
    break_after_steps(monkeypatch, 1, ZeroDivisionError("planted"))
    outcome = run(tmp_path)
    assert outcome.status == "failed"
    assert outcome.message == "planted"
    status = load(outcome.run_dir, "status.json")
    assert status["error_class"] == "ZeroDivisionError"
    assert "planted" in (outcome.run_dir / status["traceback_file"]).read_text()


def test_out_of_memory_is_its_own_status(tmp_path, monkeypatch):
    import torch

    break_after_steps(monkeypatch, 1, torch.OutOfMemoryError("planted"))
    outcome = run(tmp_path)
    assert outcome.status == "out_of_memory"
    assert "cache.num_tokens" in outcome.message or "lower" in outcome.message.lower()


def test_failed_request_ends_the_job_with_its_name(tmp_path, monkeypatch):
    from cbexp.engine import SyncCBDriver

    original = SyncCBDriver.drive_until_empty

    def lose_one(self):
        completions = original(self)
        del completions[next(iter(completions))]
        return completions

    monkeypatch.setattr(SyncCBDriver, "drive_until_empty", lose_one)
    outcome = run(tmp_path)
    assert outcome.status == "failed"
    assert "1 of 6 requests failed or were lost: req_0: lost" in outcome.message
    assert rows(outcome.run_dir, "rounds.jsonl")[0]["num_lost"] == 1


def test_dry_run_loads_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cbexp.job.load_model", lambda *a: pytest.fail("a dry run loaded the model"))
    outcome = run(tmp_path, dry_run=True)
    assert outcome.status == "dry_run"
    assert not (tmp_path / "run").exists()
    shown = capsys.readouterr().out
    assert "1,067,392 parameters" in shown
    assert "3,072 bytes" in shown


def test_summary_is_not_there_before_the_rest(tmp_path, monkeypatch):
    from cbexp.artifacts import RunDirectory

    seen = {}
    original = RunDirectory.write_summary

    def spy(self, *args):
        seen["before"] = sorted(os.listdir(self.path))
        return original(self, *args)

    monkeypatch.setattr(RunDirectory, "write_summary", spy)
    outcome = run(tmp_path)
    assert "summary.json" not in seen["before"]
    assert {"rounds.jsonl", "requests.jsonl", "steps.jsonl", "engine.json"} <= set(seen["before"])
    assert (outcome.run_dir / "summary.json").exists()


def raise_once_in(monkeypatch, owner, name):
    """Ctrl-C at the entry of a method, in the second round."""
    original, calls = getattr(owner, name), []

    def interrupted(self, *args):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(owner, name, interrupted)


def test_interrupt_while_judging_loses_no_completion(tmp_path, monkeypatch):
    from cbexp.rounds import RoundRunner

    raise_once_in(monkeypatch, RoundRunner, "_judge")
    outcome = run(tmp_path)
    assert outcome.status == "interrupted"
    second = [r for r in rows(outcome.run_dir, "requests.jsonl") if r["round_index"] == 1]
    assert [r["finish_reason"] for r in second] == ["eos"] * 6
    assert len(rows(outcome.run_dir, "completions.jsonl")) == 12


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR2"])
def test_interrupt_while_writing_a_round_waits_for_its_end(tmp_path, monkeypatch, name):
    """By Ctrl-C, or by the signals that end a cell whose time is over."""
    import signal

    from cbexp.artifacts import RunDirectory
    from cbexp.sweep.stop_signals import interrupting_by_stop_signals

    original = RunDirectory.append_interrupted_round

    def interrupted(self, requests, completions):
        if requests[0].round_index == 1:
            signal.raise_signal(signal.Signals[name])
        return original(self, requests, completions)

    monkeypatch.setattr(RunDirectory, "append_interrupted_round", interrupted)
    with interrupting_by_stop_signals():
        outcome = run(tmp_path)
    assert outcome.status == "interrupted"
    assert len(rows(outcome.run_dir, "rounds.jsonl")) == 2
    assert len(rows(outcome.run_dir, "requests.jsonl")) == 12
