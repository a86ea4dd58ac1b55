"""What a configuration becomes on this machine: the plan, its warnings, cache sizes, the dry run."""

from __future__ import annotations

import dataclasses
import json
import logging
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from cbexp.config import DatasetConfig, ModelConfig, SamplingConfig
from cbexp.drivers.registry import DRIVERS
from cbexp.engine.sizing import CacheSize, estimate_cache_cost
from cbexp.errors import ConfigError, MemoryBudgetError, ModelError
from cbexp.model.attention_choice import AttentionChoice
from cbexp.model.memory import WeightSize
from cbexp.planning import cache_sizing
from cbexp.planning.dry_run import summarize_dry_run
from cbexp.planning.plan import RunPlan, build_plan
from cbexp.planning.plan_warnings import find_handicap, find_slowness
from tests.test_factory import GEMMA2, MISTRAL, experiment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1024**3


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many bytes are free."""

    def set_bytes(num_bytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes, total=GIB))

    set_bytes(8 * GIB)
    return set_bytes


# The plan


def test_a_plan_resolves_what_is_auto_and_is_plain_json():
    written = json.loads(json.dumps(build_plan(experiment(GEMMA2, "manager", max_batch_tokens=99)).to_dict()))
    expected = {
        "device": "cpu",
        "dtype": "float32",
        "attn_implementation": "eager",
        "compile_mode": "eager",
        "num_sliding_layers": 1,
        "kv_bytes_per_token": 2 * 2 * 2 * 8 * 4,
        "page_size": 256,
        "max_batch_tokens": 99,
        "max_new_tokens": 8,
        "warnings": [],
    }
    assert {key: written[key] for key in expected} == expected
    assert "soft cap" in written["attn_reason"]
    assert "page_size" not in build_plan(experiment(driver="generate")).to_dict()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (False, 256, 4)),
        ({"num_generations": 2}, (True, 32, 8)),
        ({"num_generations": 2, "block_sharing": "off"}, (False, 256, 8)),
        ({"block_sharing": "on"}, (True, 32, 4)),
        ({"num_generations": 2, "architecture": MISTRAL}, (False, 256, 8)),
        ({"num_generations": 2, "driver": "vllm"}, (True, 16, 8)),
        ({"num_prompts": 3000}, (False, 256, 256)),
        ({"num_prompts": 2, "num_generations": 300}, (True, 32, 300)),
        ({"num_prompts": 3000, "max_batch_tokens": 100}, (False, 256, 100)),
        ({"num_prompts": 300, "num_generations": 10, "driver": "generate"}, (False, 256, 3000)),
        ({"max_requests_per_batch": 2}, (False, 256, 2)),
    ],
)
def test_block_sharing_page_size_and_requests_of_a_batch(settings, expected):
    plan = build_plan(experiment(**settings))
    assert (plan.block_sharing, plan.page_size, plan.max_requests_per_batch) == expected


def test_settings_without_effect_are_data_and_warnings():
    plan = build_plan(experiment(driver="generate", page_size=64))
    (idle,) = plan.to_dict()["settings_without_effect"]
    reason = "driver=generate, which has no paged cache"
    assert idle == {"setting": "cache.page_size", "value": 64, "reason": reason}
    assert plan.warnings == [f"cache.page_size=64 has no effect with {reason}."]


def test_a_cache_in_other_than_whole_pages_is_rounded_up_and_told():
    (warning,) = build_plan(experiment(num_tokens=300)).warnings
    assert warning == "cache.num_tokens=300 is rounded up to 512 tokens, 2 pages of 256."
    assert build_plan(experiment(num_tokens=512)).warnings == []


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_new_tokens": 300}, ConfigError, "=300 and a prompt of 5 tokens exceed the model's"),
        ({"driver": "vllm", "attention": "sdpa"}, ConfigError, "=sdpa does not work with driver=vllm"),
        ({"architecture": GEMMA2, "block_sharing": "on"}, ConfigError, "1 of .* 2 layers have a sliding"),
        ({"device": "cuda"}, ModelError, "model.device=cuda"),
        ({}, ConfigError, "WORLD_SIZE=2: tensor parallelism and sharded models are not"),
    ],
)
def test_what_cannot_be_planned_is_refused(monkeypatch, settings, error, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "1" if settings else "2")
    with pytest.raises(error, match=message):
        build_plan(experiment(**settings))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"min_new_tokens": 9}, r"sampling\.min_new_tokens=9 is more than a request may have: 8 new tokens"),
        ({"stop_token_ids": [300]}, r"^sampling\.stop_token_ids has 300, and token ids .* are 0 to 299"),
        ({"suppress_token_ids": [*range(300)]}, r"^sampling\.suppress_token_ids leave no token"),
    ],
)
def test_sampling_that_model_and_limits_do_not_allow_is_refused(sampling, message):
    config = experiment()
    config.sampling = SamplingConfig(max_new_tokens=8, **sampling)
    with pytest.raises(ConfigError, match=message):
        build_plan(config)


def test_a_model_that_does_not_fit_is_refused_before_loading(free_memory):
    free_memory(1000)
    with pytest.raises(MemoryBudgetError, match=r"cpu has 0.0 MiB free, and .* weights 0.1 MiB"):
        build_plan(experiment())
    build_plan(experiment(driver="vllm"))  # what is free there, this process cannot ask without taking memory
    free_memory(2**20)
    with pytest.raises(MemoryBudgetError, match=r"Lower cache.num_tokens, sampling.max_new_tokens"):
        build_plan(experiment(num_tokens=1_000_000))


@pytest.mark.parametrize(
    ("device", "num_bytes", "num_threads", "num_cores", "expected"),
    [
        (CPU, 2**32, None, 2, ["takes minutes to hours"]),
        (CPU, 2**20, None, 2, ["model.num_threads=1 is faster"]),
        (CPU, 2**20, None, 1, []),
        (CPU, 2**20, 4, 2, []),
        (CUDA, 2**32, None, 2, []),
    ],
)
def test_slowness(device, num_bytes, num_threads, num_cores, expected, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_cores)
    lines = find_slowness(device, WeightSize(num_bytes // 4, num_bytes), num_threads)
    assert [said in line for said, line in zip(expected, lines, strict=True)] == [True] * len(expected)


def test_a_manager_below_its_best_is_pointed_out():
    (line,) = find_handicap(DRIVERS["manager"], AttentionChoice("sdpa"), CUDA)
    assert line.startswith("driver=manager with sdpa attention runs without CUDA graphs")
    assert find_handicap(DRIVERS["manager"], AttentionChoice("flash_attention_3"), CUDA) == []
    assert find_handicap(DRIVERS["manager"], AttentionChoice("sdpa"), CPU) == []
    assert find_handicap(DRIVERS["generate"], AttentionChoice("sdpa"), CUDA) == []


# Cache sizes


def sized(plan: RunPlan, lengths: list[int], free_bytes: int = GIB) -> CacheSize:
    plan = dataclasses.replace(plan, limits=(plan.max_new_tokens,) * len(lengths))
    return cache_sizing.size_for_round(plan, lengths, free_bytes)


def test_an_automatic_cache_holds_what_runs_at_once():
    plan = build_plan(experiment(page_size=16, max_new_tokens=8, num_generations=2))
    assert sized(plan, [5, 12, 20]) == CacheSize(2 * (1 + 2) + 1 + 2, 16_384, 6)
    two = build_plan(experiment(page_size=16, max_new_tokens=8, max_requests_per_batch=2))
    assert sized(two, [5, 12, 20]) == CacheSize(2 + 2, 16_384, 2)


def test_a_request_that_can_never_fit_names_both_numbers():
    plan = build_plan(experiment(num_tokens=128, page_size=64, max_new_tokens=100))
    message = r"num_tokens=128 holds 2 pages of 64 tokens, and prompt 1 needs 3 of them for its 129 tokens .* least 192"
    with pytest.raises(ConfigError, match=message):
        sized(plan, [5, 30])
    assert sized(plan, [5, 29]).num_blocks == 2
    sliding = build_plan(experiment(MISTRAL, num_tokens=16, page_size=8, lengths=(3, 4)))
    assert sized(sliding, [100]).num_blocks == 2  # which its window bounds


def test_an_automatic_cache_stays_within_its_share_of_the_memory(caplog):
    plan = build_plan(experiment(page_size=16, max_new_tokens=8, max_memory_fraction=0.25))
    lengths = [100] * 50
    cost = estimate_cache_cost(plan.architecture, plan.dtype, plan.settings, 16_384, 4)
    with caplog.at_level(logging.WARNING):
        limited = sized(plan, lengths, free_bytes=4 * cost.total_bytes(20 * 16))
    assert limited.num_blocks == 20
    assert "requests wait for each other" in caplog.text
    assert plan.warnings[-1].startswith("cache.max_memory_fraction=0.25 of the free memory")
    with pytest.raises(
        MemoryBudgetError, match=r"cache.max_memory_fraction=0\.25 of the free memory .* longest"
    ):
        sized(plan, lengths, free_bytes=1_000_000)


def test_generate_takes_as_many_rows_as_fit():
    plan = build_plan(experiment(driver="generate", num_prompts=50))
    row_bytes = (12 + 8) * plan.kv_bytes_per_token
    assert cache_sizing.max_requests_in_memory(plan, [12, 5], int(10.5 * row_bytes / 0.5)) == 10
    assert cache_sizing.max_requests_in_memory(plan, [12, 5], GIB) == 50
    with pytest.raises(MemoryBudgetError, match="one request of 20 tokens"):
        cache_sizing.max_requests_in_memory(plan, [12, 5], row_bytes)


# The dry run


def test_a_dry_run_counts_by_hand(free_memory):
    report = summarize_dry_run(
        experiment(num_prompts=4, num_generations=2, page_size=16, lengths=(20, 20), max_new_tokens=30)
    )
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert (report.longest_request_tokens, report.cache_tokens_asked) == (64, 4 * (1 + 2 * 3) * 16)
    assert report.requests_that_fit == report.num_requests == 8
    assert (report.is_prompt_length_assumed, report.advice, report.free_bytes) == (False, [], 8 * GIB)
    assert report.tokens_that_fit % 16 == 0
    json.dumps(report.to_dict())
    assert dict(report.rows())["at once"] == "8 of the 8 requests of a round"


def test_a_dry_run_says_what_fits_and_what_to_lower(free_memory):
    """A cache of exactly what a round needs holds all of it, though no request but one is of the greatest length."""
    settings = {"page_size": 16, "lengths": (4, 100), "num_prompts": 20, "max_new_tokens": 12}
    report = summarize_dry_run(experiment(**settings))
    assert report.cache_tokens_asked < 20 * report.longest_request_tokens
    assert (report.requests_that_fit, report.advice) == (20, [])
    narrow = summarize_dry_run(experiment(**settings, max_requests_per_batch=7))
    assert (narrow.requests_that_fit, narrow.advice) == (7, [])
    small = summarize_dry_run(experiment(**settings, num_tokens=report.cache_tokens_asked // 2))
    assert 0 < small.requests_that_fit < 20
    assert small.advice[0].startswith("only to run 20 requests at once (")
    free_memory(30_000_000)
    report = summarize_dry_run(experiment(num_tokens=1_000_000, max_memory_fraction=0.01))
    assert report.memory_fraction == 0.9  # the other bounds a cache that nobody has sized
    assert report.advice[0].startswith("cache.num_tokens=1000000 to ")
    free_memory(10_000)
    assert "weights alone exceed the free memory" in summarize_dry_run(experiment()).advice[0]


def test_a_dry_run_reads_no_prompts_and_says_so(monkeypatch, free_memory):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dry run loads nothing")

    monkeypatch.setattr("cbexp.dataset.rows.load_rows", refuse)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    config = experiment()
    config.dataset = DatasetConfig(kind="arithmetic")
    config.model = ModelConfig(name="tiny", name_or_path="builtin:tiny", device="cpu")
    report = summarize_dry_run(config)
    assert report.is_prompt_length_assumed
    assert "prompts taken as 256 tokens" in dict(report.rows())["request"]
    assert report.num_parameters > 500_000
    sliding = summarize_dry_run(experiment(GEMMA2)).sliding_layers
    assert str(sliding).startswith("1 of 2, which keep the last 16 tokens")
