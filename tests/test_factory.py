"""Stop ids, and drivers from a configuration to completions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cbexp.config import (
    CacheConfig,
    CompileConfig,
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from cbexp.dataset.prompts import PromptSet, load_prompts
from cbexp.engine import StepInfo
from cbexp.errors import ConfigError
from cbexp.factory import build_driver, resolve_stop_ids
from cbexp.model.loading import LoadedModel, load_model
from cbexp.planning.plan import RunPlan, build_plan
from tests.model_fixtures import QWEN3 as TIED_QWEN3
from tests.model_fixtures import TINY, build_tokenizer

# Weights large enough, and an output of its own, for completions that do not repeat one token.
VARIED = {"tie_word_embeddings": False, "initializer_range": 0.3}
QWEN3 = {**TIED_QWEN3, **VARIED}
GEMMA2 = {**TINY, **VARIED, "model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 16}
MISTRAL = {**TINY, **VARIED, "model_type": "mistral", "sliding_window": 16}


def experiment(
    architecture: dict[str, Any] = QWEN3,
    driver: str = "sync",
    compile_mode: str = "auto",
    num_prompts: int = 4,
    num_generations: int = 1,
    max_new_tokens: int = 8,
    lengths: tuple[int, int] = (5, 12),
    device: str = "cpu",
    attention: str = "auto",
    compile: dict[str, Any] | None = None,
    **cache: Any,
) -> ExperimentConfig:
    model = {"init": "random", "device": device, "attn_implementation": attention}
    prompts = {"num_prompts": num_prompts, "num_generations": num_generations}
    prompts |= {"min_length": lengths[0], "max_length": lengths[1]}
    return ExperimentConfig(
        model=ModelConfig(name="test", architecture=architecture, **model),
        dataset=DatasetConfig(name="synthetic", kind="synthetic", **prompts),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens, ignore_eos=True),
        cache=CacheConfig(**cache),
        compile=CompileConfig(**{"mode": compile_mode} | (compile or {})),
        driver=DriverConfig(name=driver),
    )


def load(config: ExperimentConfig) -> tuple[RunPlan, LoadedModel, PromptSet]:
    loaded = load_model(config.model, config.adapter, config.seed)
    prompts = load_prompts(config.dataset, None, loaded.vocab_size, config.seed, loaded.special_token_ids)
    return build_plan(config), loaded, prompts


def run(config: ExperimentConfig, **changes: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """One round: the driver's resolved settings, and the completions in submission order."""
    plan, loaded, prompts = load(config)
    driver = build_driver(plan, loaded, prompts, *resolve_stop_ids(config, None, loaded), **changes)
    try:
        driver.warmup()
        ids = driver.add_requests(prompts.prompt_ids, num_generations=config.dataset.num_generations)
        completions = driver.drive_until_empty()
        return driver.resolved, [list(completions[request_id]) for request_id in ids]
    finally:
        driver.close()


# Stop ids


@pytest.mark.parametrize(
    ("has_tokenizer", "eos_ids", "sampling", "expected"),
    [
        (True, (260, 3), {}, ((3, 257, 260), 258)),
        (False, (9, 4), {}, ((4, 9), 4)),
        (False, (), {}, ((), 0)),
        (True, (260,), {"eos_token_ids": [7, 5, 7]}, ((5, 7), 258)),
        (True, (260,), {"ignore_eos": True}, ((), 258)),
        (False, (260,), {"ignore_eos": True}, ((), 260)),
        (True, (), {"pad_token_id": 0}, ((257,), 0)),
        (True, (), {"eos_token_ids": [300]}, "token id 300 is .*, 0 to 299: set sampling.eos_token_ids"),
        (True, (), {"pad_token_id": 300}, "token id 300 is .*, 0 to 299: set sampling.pad_token_id"),
    ],
)
def test_stop_ids_are_the_union_of_tokenizer_and_model_or_those_set(
    has_tokenizer, eos_ids, sampling, expected
):
    """And the id that pads falls back from the one set to the tokenizer's, a stop id, and 0."""
    config = experiment()
    loaded = dataclasses.replace(load_model(config.model, config.adapter, 0), generation_eos_ids=eos_ids)
    config.sampling = SamplingConfig(**sampling)
    tokenizer = build_tokenizer() if has_tokenizer else None
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            resolve_stop_ids(config, tokenizer, loaded)
    else:
        assert resolve_stop_ids(config, tokenizer, loaded) == expected


# Drivers


@pytest.mark.parametrize(
    ("architecture", "others"),
    [(QWEN3, ["manager", "generate"]), (MISTRAL, ["manager", "generate"]), (GEMMA2, ["generate"])],
)
def test_every_driver_gives_the_same_completions(architecture, others):
    _, expected = run(experiment(architecture))
    assert [len(completion) for completion in expected] == [8, 8, 8, 8]
    assert len({token_id for completion in expected for token_id in completion}) > 12
    for driver in others:
        assert run(experiment(architecture, driver))[1] == expected


def test_the_synchronous_driver_runs_as_planned():
    infos: list[StepInfo] = []
    cache = {"num_tokens": 1000, "page_size": 64, "scheduler": "prefill_first", "max_batch_tokens": 16}
    config = experiment(num_generations=3, **cache)
    resolved, completions = run(config, on_step=lambda index, info: infos.append(info))
    assert len(completions) == 12
    expected = {
        "cache_tokens": 16 * 64,
        "page_size": 64,
        "scheduler": "prefill_first",
        "max_batch_tokens": 16,
        "block_sharing": True,
        "max_requests_per_batch": 12,
        "eos_token_ids": [],
    }
    assert {key: resolved[key] for key in expected} == expected
    assert infos


def test_a_cache_smaller_than_the_round_still_serves_it():
    roomy, tight = (run(experiment(num_prompts=8, page_size=8, num_tokens=n))[1] for n in (4096, 48))
    assert roomy == tight


def test_completions_end_at_the_stop_ids_that_were_set():
    config = experiment(max_new_tokens=30)
    _, free_running = run(config)
    stop_id = free_running[0][3]
    config.sampling = SamplingConfig(max_new_tokens=30, eos_token_ids=[stop_id])
    for driver in ("sync", "manager", "generate"):
        config.driver.name = driver
        _, stopped = run(config)
        assert stopped[0] == free_running[0][: free_running[0].index(stop_id) + 1]


def test_a_prompt_beyond_the_models_positions_is_named():
    plan, loaded, _ = load(experiment(max_new_tokens=100, lengths=(5, 200)))
    prompts = PromptSet([[1] * 5, [1] * 157, [1] * 5, [1] * 5])
    message = "prompt 1 has 157 tokens, which with 100 new tokens exceed the model's "
    with pytest.raises(ConfigError, match=rf"{message}256 positions \(max_position_embeddings\)\. Lower"):
        build_driver(plan, loaded, prompts, (), 0)
    plan.architecture.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ConfigError, match=rf"{message}256 positions \(rope_type=dynamic: "):
        build_driver(plan, loaded, prompts, (), 0)
