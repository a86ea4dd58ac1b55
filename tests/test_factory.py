"""Stop ids, and drivers from a configuration to completions."""

from __future__ import annotations

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
from cbexp.model.loading import LoadedModel, load_model, load_tokenizer
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
    return ExperimentConfig(
        model=ModelConfig(
            name="test",
            init="random",
            architecture=architecture,
            device=device,
            attn_implementation=attention,
        ),
        dataset=DatasetConfig(
            kind="synthetic",
            name="synthetic",
            num_prompts=num_prompts,
            num_generations=num_generations,
            min_length=lengths[0],
            max_length=lengths[1],
        ),
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


@pytest.fixture(scope="module")
def stop_ids() -> Any:
    """Stop and pad ids with a tokenizer, the model's own EOS and settings of `sampling`."""
    loaded = load_model(experiment().model, experiment().adapter, seed=0)

    def resolve(tokenizer: Any, eos_ids: tuple[int, ...], **sampling: Any) -> tuple[tuple[int, ...], int]:
        config = experiment()
        config.sampling = SamplingConfig(**sampling)
        return resolve_stop_ids(
            config, tokenizer, LoadedModel(**{**vars(loaded), "generation_eos_ids": eos_ids})
        )

    return resolve


def test_stop_ids_are_the_union_of_tokenizer_and_model(stop_ids):
    tokenizer = build_tokenizer()
    assert stop_ids(tokenizer, (260, 3)) == ((3, 257, 260), 258)
    assert stop_ids(tokenizer, ()) == ((257,), 258)
    assert stop_ids(None, (9, 4)) == ((4, 9), 4)


def test_stop_ids_can_be_set_and_ignored(stop_ids):
    tokenizer = build_tokenizer()
    assert stop_ids(tokenizer, (260,), eos_token_ids=[7, 5, 7]) == ((5, 7), 258)
    assert stop_ids(tokenizer, (260,), ignore_eos=True) == ((), 258)
    assert stop_ids(None, (260,), ignore_eos=True) == ((), 260)


def test_padding_falls_back_and_zero_is_an_id(stop_ids):
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    assert tokenizer.pad_token_id == 0
    assert stop_ids(tokenizer, ())[1] == 0
    assert stop_ids(tokenizer, (), pad_token_id=6)[1] == 6
    tokenizer.pad_token = None
    assert stop_ids(tokenizer, ())[1] == 257
    assert stop_ids(None, (0,)) == ((0,), 0)
    assert stop_ids(None, ()) == ((), 0)


@pytest.mark.parametrize(("key", "value"), [("eos_token_ids", [300]), ("pad_token_id", 300)])
def test_ids_outside_of_the_vocabulary_are_refused(stop_ids, key, value):
    message = f"token id 300 is not one of the model's, 0 to 299: set sampling.{key}"
    with pytest.raises(ConfigError, match=message):
        stop_ids(build_tokenizer(), (), **{key: value})


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
    config = experiment(num_generations=3, page_size=16)
    resolved, completions = run(config, on_step=lambda index, info: infos.append(info))
    assert len(completions) == 12
    expected = {
        "page_size": 16,
        "block_sharing": True,
        "max_requests_per_batch": 12,
        "eos_token_ids": [],
        "decode_mode": "eager",
        "batch_shape": "buckets",
    }
    assert {key: resolved[key] for key in expected} == expected
    assert infos


def test_an_explicit_cache_reaches_the_driver():
    cache = {"num_tokens": 1000, "page_size": 64, "scheduler": "prefill_first", "max_batch_tokens": 16}
    resolved, _ = run(experiment(**cache))
    assert (resolved["cache_tokens"], resolved["scheduler"]) == (16 * 64, "prefill_first")
    assert resolved["max_batch_tokens"] == 16


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


def test_nothing_of_the_models_own_generation_config_leaks_in():
    config = experiment()
    _, loaded, prompts = load(config)
    _, expected = run(config)
    own = loaded.model.generation_config
    own.max_new_tokens, own.eos_token_id = 2, list(range(300))
    own.do_sample, own.repetition_penalty = True, 5.0
    for driver in ("sync", "manager", "generate"):
        config.driver.name = driver
        built = build_driver(build_plan(config), loaded, prompts, (), 0)
        ids = built.add_requests(prompts.prompt_ids)
        completions = built.drive_until_empty()
        built.close()
        assert [list(completions[request_id]) for request_id in ids] == expected


def test_a_prompt_beyond_the_models_positions_is_named():
    plan, loaded, _ = load(experiment(max_new_tokens=100, lengths=(5, 200)))
    message = "prompt 1 has 157 tokens, which with 100 new tokens exceed the model's 256"
    with pytest.raises(ConfigError, match=message):
        build_driver(plan, loaded, PromptSet([[1] * 5, [1] * 157, [1] * 5, [1] * 5]), (), 0)


def test_the_embedded_model_answers_through_the_default_configuration():
    config = ExperimentConfig(
        dataset=DatasetConfig(kind="arithmetic", verifier="arithmetic", num_prompts=6),
        sampling=SamplingConfig(max_new_tokens=96),
    )
    config.model.device = "cpu"
    tokenizer = load_tokenizer(config.model)
    loaded = load_model(config.model, config.adapter, config.seed)
    prompts = load_prompts(config.dataset, tokenizer, loaded.vocab_size, config.seed)
    eos, pad = resolve_stop_ids(config, tokenizer, loaded)
    driver = build_driver(build_plan(config), loaded, prompts, eos, pad)
    ids = driver.add_requests(prompts.prompt_ids)
    completions = driver.drive_until_empty()
    driver.close()
    texts = [tokenizer.decode(list(completions[request_id]), skip_special_tokens=True) for request_id in ids]
    assert prompts.verifier is not None
    verdicts = map(prompts.verifier, texts, prompts.answers or [])
    assert sum(verdicts) >= 5, texts
