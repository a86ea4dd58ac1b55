"""The whole path in one process: what a job writes, and how each way to end is recorded."""

import dataclasses
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cbexp import job, metrics, rounds
from cbexp.artifacts import RunDirectory, read_jsonl
from cbexp.config import (
    AdapterConfig,
    ArtifactsConfig,
    CacheConfig,
    CompileConfig,
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    RescoreConfig,
    SamplingConfig,
    TrackingConfig,
)
from cbexp.dataset.completion_limits import draw_limits
from cbexp.dataset.prompts import PromptSet
from cbexp.display import ProgressDisplay
from cbexp.engine import SyncCBDriver
from cbexp.experiment import run_experiment
from cbexp.planning.plan import build_plan
from cbexp.rounds import RoundRunner
from cbexp.run_description import describe_run
from cbexp.sweep.stop_signals import interrupting_by_stop_signals

TINY = {"name": "tiny", "name_or_path": "builtin:tiny", "default_max_new_tokens": 96, "num_threads": 1}
SAMPLED = {
    "sampling": SamplingConfig(temperature=2.5, top_k=50, logprobs=True, max_new_tokens=32),
    "dataset": DatasetConfig(verifier="arithmetic", num_prompts=2, num_generations=3),
    "num_rounds": 2,
}
OTHERS = [{"driver": DriverConfig("manager")}, {"driver": DriverConfig("generate")}]
BURSTS = CompileConfig(batch_shape="buckets", buckets=[4, 8], max_burst=8)
FIXED_LENGTH = SamplingConfig(max_new_tokens=6, ignore_eos=True)


def run(tmp_path: Path, num_generations=1, **changes):
    settings = {
        "model": ModelConfig(**TINY),
        "dataset": DatasetConfig(verifier="arithmetic", num_prompts=6, num_generations=num_generations),
        "tracking": TrackingConfig(mode="disabled"),
        "num_rounds": 1,
        "num_warmup_rounds": 0,
    }
    return run_experiment(ExperimentConfig(**(settings | changes)), tmp_path / "run", ["num_rounds=1"])


def load(outcome, name: str):
    return json.loads((outcome.run_dir / name).read_text())


def rows(outcome, name: str):
    return read_jsonl(outcome.run_dir / name)[0]


def digest(outcome):
    return rows(outcome, "rounds.jsonl")[0]["completions_digest"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job of two rounds after one of warmup, by bursts in buckets."""
    folder = tmp_path_factory.mktemp("whole")
    kept = {"artifacts": ArtifactsConfig(completions="2"), "stats_path": str(folder / "stats/summary.json")}
    outcome = run(folder, compile=BURSTS, num_rounds=2, num_warmup_rounds=1, **kept)
    assert outcome.status == "completed", outcome.message
    return outcome


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A sampled job of two rounds, three completions a prompt, with the defaults of driver=sync."""
    outcome = run(tmp_path_factory.mktemp("sampled"), **SAMPLED)
    assert outcome.status == "completed", outcome.message
    return outcome


def test_job_writes_what_was_asked_for(whole):
    summary = whole.summary
    assert load(whole, "summary.json") == load(whole, "../stats/summary.json") == summary
    assert (summary["accuracy"], summary["backend"]) == (1.0, "sync")
    assert summary["finish_reasons"]["eos"] == summary["num_requests"] == 12
    assert [row["is_warmup"] for row in rows(whole, "rounds.jsonl")] == [True, False, False]
    requests, completions = rows(whole, "requests.jsonl"), rows(whole, "completions.jsonl")
    assert (len(requests), len(completions)) == (18, 2 * 3)
    timed_tokens = sum(row["num_tokens"] for row in requests if row["round_index"] > 0)
    assert summary["num_output_tokens"] == timed_tokens
    assert summary["decode_tps"] == pytest.approx(summary["n_decoded_tokens"] / summary["median_wall_s"])
    assert load(whole, "status.json")["status"] == "completed"
    assert load(whole, "environment.json")["versions"]["transformers"]
    engine = load(whole, "engine.json")
    assert (engine["plan"]["buckets"], engine["compile_cache"]) == ([4, 8], None)
    assert (engine["driver"]["eos_token_ids"], engine["driver"]["fusion"]) == ([257], summary["fusion"])
    facts = [summary[name] for name in ("compile_mode", "attn_impl", "batch_shape", "graphs", "replays")]
    assert facts == ["eager", "cbexp", "buckets", 0, 0]
    assert summary["steps_per_burst"] <= 8
    assert summary["tokens_per_burst"] > summary["steps_per_burst"]
    assert summary["padding_share"] > 0
    assert (summary["bandwidth_bytes_per_s"], summary["roofline_fraction"]) == (None, None)
    rescored = load(whole, "rescoring.json")
    assert (summary["rescoring"]["num_completions"], len(rescored["completions"])) == (8, 8)
    assert summary["rescoring"].items() <= rescored.items()
    assert (summary["rescoring"]["max_lag"], summary["rescoring"]["note"], rescored["problem"]) == (
        0.0,
        None,
        None,
    )
    assert {row["name"].split(",")[0] for row in rescored["completions"]} == {"round 1", "round 2"}
    durations_s = dict(summary["durations_s"])
    assert "measure_bandwidth" not in durations_s
    assert {"prepare", "load_model", "build_driver", "driver_warmup", "rescore"} < set(durations_s)
    assert sum(durations_s.values()) - durations_s["total"] < durations_s["total"]


@pytest.mark.parametrize("changes", [*OTHERS, {"compile": CompileConfig(batch_shape="full")}], ids=str)
def test_every_driver_and_batch_shape_does_the_same_work(tmp_path, whole, changes):
    outcome = run(tmp_path, **changes)
    assert outcome.status == "completed", outcome.message
    assert digest(outcome) == digest(whole)
    assert outcome.summary["workload_hash"] == whole.summary["workload_hash"]
    assert outcome.summary["accuracy"] == 1.0
    assert outcome.summary["rescoring"]["num_completions"] == 6
    assert outcome.summary["rescoring"]["max_lag"] < 1e-4
    if "compile" in changes:
        bursts = [step for step in rows(outcome, "steps.jsonl") if step["kind"] == "decode"]
        assert {step["bucket"] for step in bursts} == {6}
    else:
        assert outcome.summary["backend"] == changes["driver"].name


def test_generations_of_a_prompt_are_judged_with_its_answer(tmp_path):
    outcome = run(tmp_path, num_generations=2, rescore=RescoreConfig("0"))
    assert outcome.summary["num_judged"] == outcome.summary["num_correct"] == 12
    assert outcome.summary["rescoring"]["note"] == "rescore.completions=0"
    assert not (outcome.run_dir / "rescoring.json").exists()


@pytest.mark.parametrize("driver", [{}, *OTHERS], ids=str)
def test_every_prompt_has_its_own_limit(tmp_path, driver):
    sampling = SamplingConfig(max_new_tokens=20, median_new_tokens=8, ignore_eos=True, new_tokens_seed=3407)
    outcome = run(tmp_path, sampling=sampling, num_generations=2, **driver)
    assert outcome.status == "completed", outcome.message
    limits = [limit for limit in draw_limits(sampling, 6, 3407) for _ in range(2)]
    assert len(set(limits)) > 3
    requests = rows(outcome, "requests.jsonl")
    assert [row["num_tokens"] for row in requests] == [row["max_new_tokens"] for row in requests] == limits
    summary = outcome.summary
    assert (summary["has_limits_per_prompt"], summary["num_short"]) == (True, 0)
    assert (summary["max_new_tokens"], summary["n_decoded_tokens"]) == (max(limits), sum(limits))


def test_dry_run_loads_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cbexp.job.load_model", lambda *a: pytest.fail("a dry run loaded the model"))
    outcome = run(tmp_path, dry_run=True)
    assert outcome.status == "dry_run"
    assert not (tmp_path / "run").exists()
    shown = capsys.readouterr().out
    assert "1,067,392 parameters" in shown
    assert "3,072 bytes" in shown


# Other ends


@pytest.mark.parametrize(
    ("changes", "status", "recorded", "message"),
    [
        ({"compile": CompileConfig("default"), **OTHERS[1]}, "bad_config", "failed", "not work with"),
        ({"compile": CompileConfig("cuda_graph")}, "not_applicable", "not_applicable", "a CUDA device"),
        ({"model": ModelConfig(name_or_path="/no/such/folder")}, "failed", "failed", "/no/such/folder"),
    ],
)
def test_what_cannot_run_is_one_message(tmp_path, capsys, changes, status, recorded, message):
    outcome = run(tmp_path, **changes)
    assert outcome.status == status
    assert message in outcome.message
    assert "\n" not in outcome.message
    assert load(outcome, "status.json")["status"] == recorded
    assert not (outcome.run_dir / "summary.json").exists()
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


def break_after_steps(monkeypatch, num_steps, error):
    original = ProgressDisplay.on_step

    def on_step(self, step_index, info):
        original(self, step_index, info)
        if step_index >= num_steps:
            raise error

    monkeypatch.setattr(ProgressDisplay, "on_step", on_step)
    monkeypatch.setattr(ProgressDisplay, "is_live", True)


def test_interrupt_keeps_what_was_finished(tmp_path, whole, monkeypatch):
    """The second round is broken off after the burst in which some requests ended."""
    steps = [step for step in rows(whole, "steps.jsonl") if step["round_index"] == 0]
    first_end = next(i for i, step in enumerate(steps) if step["num_finished"])
    num_steps = sum(step["num_steps"] for step in steps + steps[:first_end])
    break_after_steps(monkeypatch, num_steps, KeyboardInterrupt())
    outcome = run(tmp_path, compile=BURSTS, num_rounds=2)
    assert outcome.status == load(outcome, "status.json")["status"] == "interrupted"
    assert len(rows(outcome, "rounds.jsonl")) == 1
    reasons = [row["finish_reason"] for row in rows(outcome, "requests.jsonl") if row["round_index"] == 1]
    assert len(reasons) == 6
    assert set(reasons) == {"eos", "failed"}


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ZeroDivisionError("planted"), "failed", "planted"),
        (torch.OutOfMemoryError("planted"), "out_of_memory", "cache.max_batch_tokens"),
    ],
)
def test_bug_and_want_of_memory_are_recorded_with_their_traceback(
    tmp_path, monkeypatch, error, status, message
):
    break_after_steps(monkeypatch, 1, error)
    outcome = run(tmp_path)
    assert outcome.status == status
    assert message in outcome.message
    recorded = load(outcome, "status.json")
    assert (recorded["status"], recorded["message"]) == (status, outcome.message)
    assert recorded["error_class"] in ("ZeroDivisionError", "MemoryBudgetError")
    assert "planted" in (outcome.run_dir / recorded["traceback_file"]).read_text()


def test_failed_request_ends_the_job_with_its_name(tmp_path, monkeypatch):
    original = SyncCBDriver.drive_until_empty

    def lose_one(self):
        completions = original(self)
        del completions[next(iter(completions))]
        return completions

    monkeypatch.setattr(SyncCBDriver, "drive_until_empty", lose_one)
    outcome = run(tmp_path)
    assert outcome.status == "failed"
    assert "1 of 6 requests failed or were lost: req_0: lost" in outcome.message
    assert rows(outcome, "rounds.jsonl")[0]["num_lost"] == 1


def test_tokens_that_the_model_would_not_choose_fail_the_run_and_the_records_stay(tmp_path, monkeypatch):
    """Results of the first two requests are exchanged, with the prompts that they say they are of."""
    original = SyncCBDriver.drive_until_empty

    def exchange(self):
        completions = original(self)
        one, other = "req_0", "req_1"
        return completions | {one: completions[other], other: completions[one]}

    monkeypatch.setattr(SyncCBDriver, "drive_until_empty", exchange)
    outcome = run(tmp_path, adapter=AdapterConfig(kind="lora", rank=2))
    assert outcome.status == "failed"
    assert "Rescoring: round 0, req_0: token 0 is less likely than the best one by" in outcome.message
    assert load(outcome, "status.json")["error_class"] == "RescoringError"
    assert len(rows(outcome, "rounds.jsonl")) == 1
    assert len(rows(outcome, "completions.jsonl")) == 6
    assert load(outcome, "rescoring.json")["problem"] in outcome.message
    assert not (outcome.run_dir / "summary.json").exists()


def test_interrupt_while_judging_loses_no_completion(tmp_path, monkeypatch):
    original = RoundRunner._judge

    def interrupt_once(self, *args):
        monkeypatch.setattr(RoundRunner, "_judge", original)
        raise KeyboardInterrupt

    monkeypatch.setattr(RoundRunner, "_judge", interrupt_once)
    outcome = run(tmp_path)
    assert outcome.status == "interrupted"
    assert [row["finish_reason"] for row in rows(outcome, "requests.jsonl")] == ["eos"] * 6
    assert len(rows(outcome, "completions.jsonl")) == 6


def test_interrupt_while_writing_a_round_waits_for_its_end(tmp_path, monkeypatch):
    original = RunDirectory.append_interrupted_round

    def interrupted(self, requests, completions):
        signal.raise_signal(signal.SIGTERM)
        return original(self, requests, completions)

    monkeypatch.setattr(RunDirectory, "append_interrupted_round", interrupted)
    with interrupting_by_stop_signals():
        outcome = run(tmp_path, sampling=FIXED_LENGTH, num_rounds=2)
    assert outcome.status == "interrupted"
    assert len(rows(outcome, "rounds.jsonl")) == 1
    assert len(rows(outcome, "requests.jsonl")) == 6


def test_a_run_on_a_gpu_measures_the_bandwidth_before_the_cache_takes_the_memory(tmp_path, monkeypatch):
    """The model is on the CPU, and the job takes it to lie on a GPU."""
    order, on_cpu = [], torch.device("cpu")
    load_model, build_driver, measure_memory = job.load_model, job.build_driver, rounds.measure_memory
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(job, "load_model", lambda *a: dataclasses.replace(load_model(*a), device=gpu))
    monkeypatch.setattr(job, "build_driver", lambda *a, **o: order.append("driver") or build_driver(*a, **o))
    bandwidth = "cbexp.planning.roofline.measure_read_bandwidth"
    monkeypatch.setattr(bandwidth, lambda device: order.append("bandwidth") or 1e12)
    # All else that would be asked of that GPU.
    monkeypatch.setattr(job, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(rounds, "synchronize", lambda device: None)
    monkeypatch.setattr(rounds, "measure_memory", lambda device: measure_memory(on_cpu))
    outcome = run(tmp_path, sampling=FIXED_LENGTH)
    assert outcome.status == "completed", outcome.message
    assert order == ["bandwidth", "driver"]
    summary = outcome.summary
    assert (summary["is_fixed_length"], summary["n_decoded_tokens"], summary["num_short"]) == (True, 36, 0)
    assert summary["bandwidth_bytes_per_s"] == 1e12
    assert summary["roofline_fraction"] > 0
    assert summary["durations_s"]["measure_bandwidth"] >= 0


# Sampled


def test_a_sampled_job_says_how_and_how_its_groups_were_judged(sampled):
    summary = sampled.summary
    assert summary["sampling"] == {"temperature": 2.5, "top_k": 50, "logprobs": True}
    assert (summary["do_sample"], summary["are_rounds_identical"]) == (True, None)
    one, other = rows(sampled, "rounds.jsonl")
    assert one["completions_digest"] != other["completions_digest"]
    groups = summary["groups"]
    assert (groups["num_groups"], groups["k"]) == (4, 3)
    assert groups["verdict_mean"] == pytest.approx(summary["accuracy"])
    assert 0 < groups["pass_at_1"] <= groups["pass_at_k"] <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {
            "compile": CompileConfig(batch_shape="natural", max_burst=3),
            "cache": CacheConfig(num_tokens=256, page_size=16),
        },
        {"compile": CompileConfig(batch_shape="full", buckets=[8])},
        {"model": {"attn_implementation": "sdpa"}, "cache": CacheConfig(block_sharing="off")},
        pytest.param({"compile": CompileConfig("default", buckets=[6])}, marks=pytest.mark.slow),
    ],
    ids=["natural", "full", "own_attention", "compiled"],
)
def test_the_same_seed_gives_the_same_completions_in_every_mode(sampled, tmp_path, changes):
    model = {"model": ModelConfig(**TINY | changes["model"])} if "model" in changes else {}
    outcome = run(tmp_path, **SAMPLED | changes | model)
    assert outcome.status == "completed", outcome.message
    assert outcome.summary["workload_hash"] == sampled.summary["workload_hash"]
    for one, other in zip(rows(outcome, "rounds.jsonl"), rows(sampled, "rounds.jsonl"), strict=True):
        assert one["completions_digest"] == other["completions_digest"]


def test_other_sampling_is_another_workload_and_another_seed_is_not():
    loaded = SimpleNamespace(dtype=torch.float32, lora_adapter=None)
    resolved = {"eos_token_ids": [3], "fusion": "none", "attn_implementation": "cbexp"}

    def hash_of(seed=0, **sampling):
        model, given = ModelConfig(**TINY), SamplingConfig(max_new_tokens=9, **sampling)
        plan = build_plan(ExperimentConfig(model=model, sampling=given, seed=seed))
        return describe_run(plan, loaded, PromptSet([[1, 2]]), resolved).workload_hash

    settings = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"stop_token_ids": [3]}]
    settings += [{"logprobs": True}, {"temperature": 1.0, "stop_strings": ["x"]}]
    hashes = [hash_of(**given) for given in settings]
    assert len(set(hashes)) == len(settings)
    assert hash_of(top_k=3, seed=7) == hashes[0]
    assert hash_of(temperature=1.0, top_k=-1, seed=7) == hashes[1]
    # What greedy runs had before there was anything else.
    greedy = {"do_sample": False, "eos_token_ids": [3], "num_generations": 1}
    assert hashes[0] == metrics.workload_hash([[1, 2]], 9, greedy)
