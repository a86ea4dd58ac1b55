"""Planning, cache sizes, stop ids and drivers: from a configuration to completions."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import pytest
import torch

from cbexp import factory
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
from cbexp.errors import ConfigError, MemoryBudgetError, ModelError, NotApplicableError
from cbexp.factory import RunPlan, build_driver, build_plan, resolve_stop_ids, summarize_dry_run
from cbexp.model.loading import LoadedModel, load_model, load_tokenizer
from cbexp.model.memory import estimate_cache_cost
from cbexp.planning import cache_sizing, dry_run
from cbexp.planning import plan as planning
from tests.model_fixtures import QWEN3 as TIED_QWEN3
from tests.model_fixtures import TINY, build_tokenizer

CPU = torch.device("cpu")
GIB = 1024**3
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
    ignore_eos: bool = True,
    lengths: tuple[int, int] = (5, 12),
    **cache: Any,
) -> ExperimentConfig:
    return ExperimentConfig(
        model=ModelConfig(name="test", init="random", architecture=architecture, device="cpu"),
        dataset=DatasetConfig(
            kind="synthetic",
            name="synthetic",
            num_prompts=num_prompts,
            num_generations=num_generations,
            min_length=lengths[0],
            max_length=lengths[1],
        ),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
        cache=CacheConfig(**cache),
        compile=CompileConfig(mode=compile_mode),
        driver=DriverConfig(name=driver),
    )


def load(config: ExperimentConfig) -> tuple[RunPlan, LoadedModel, PromptSet]:
    loaded = load_model(config.model, config.adapter, config.seed)
    prompts = load_prompts(config.dataset, None, loaded.vocab_size, config.seed, loaded.special_token_ids)
    return build_plan(config), loaded, prompts


def run(config: ExperimentConfig, **changes: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """One round: the driver's resolved settings, and the completions in submission order."""
    plan, loaded, prompts = load(config)
    eos, pad = resolve_stop_ids(config, None, loaded)
    driver = build_driver(config, plan, loaded, prompts, eos, pad, **changes)
    try:
        driver.warmup()
        ids = driver.add_requests(prompts.prompt_ids, num_generations=config.dataset.num_generations)
        completions = driver.drive_until_empty()
        return driver.resolved, [list(completions[request_id]) for request_id in ids]
    finally:
        driver.close()


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what every device has free, in bytes."""

    def set_bytes(num_bytes: int) -> None:
        for module in (planning, factory, dry_run):
            monkeypatch.setattr(module, "free_memory_bytes", lambda device: num_bytes)

    set_bytes(8 * GIB)
    return set_bytes


# The plan


def test_a_plan_resolves_what_is_auto():
    plan = build_plan(experiment(num_prompts=3))
    assert (plan.device, plan.dtype, plan.attention.implementation) == (CPU, torch.float32, "cbexp")
    assert (plan.compile_mode, plan.page_size, plan.block_sharing) == ("eager", 256, False)
    assert plan.max_requests_per_batch == 3
    assert plan.max_new_tokens == 8
    assert plan.warnings == []


def test_a_plan_is_plain_json():
    written = json.loads(json.dumps(build_plan(experiment(GEMMA2, "manager")).to_dict()))
    assert written["dtype"] == "float32"
    assert written["attn_implementation"] == "eager"
    assert "soft cap" in written["attn_reason"]
    assert (written["num_full_layers"], written["num_sliding_layers"], written["sliding_window"]) == (
        1,
        1,
        16,
    )
    assert written["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert written["page_size"] == 256
    assert "page_size" not in build_plan(experiment(driver="generate")).to_dict()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (False, 256)),
        ({"num_generations": 2}, (True, 32)),
        ({"num_generations": 2, "page_size": 16}, (True, 16)),
        ({"num_generations": 2, "block_sharing": "off"}, (False, 256)),
        ({"block_sharing": "on"}, (True, 32)),
        ({"num_generations": 2, "architecture": GEMMA2}, (False, 256)),
        ({"num_generations": 2, "architecture": MISTRAL}, (False, 256)),
        ({"num_generations": 2, "driver": "generate"}, (False, 256)),
    ],
)
def test_block_sharing_and_page_size(settings, expected):
    plan = build_plan(experiment(**settings))
    assert (plan.block_sharing, plan.page_size) == expected


def test_sharing_blocks_of_sliding_layers_is_refused():
    with pytest.raises(ConfigError, match="1 of the model's 2 layers have a sliding window"):
        build_plan(experiment(GEMMA2, block_sharing="on"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_prompts": 5, "num_generations": 3}, 15),
        ({"num_prompts": 3000}, 1024),
        ({"num_prompts": 2, "num_generations": 1500}, 1500),
        ({"num_prompts": 3000, "max_batch_tokens": 100}, 100),
        ({"num_prompts": 3000, "driver": "generate"}, 3000),
        ({"num_prompts": 5, "max_requests_per_batch": 2}, 2),
    ],
)
def test_requests_of_a_batch(settings, expected):
    assert build_plan(experiment(**settings)).max_requests_per_batch == expected


@pytest.mark.parametrize("mode", ["reduce_overhead", "max_autotune", "cuda_graph", "compiled_cuda_graph"])
@pytest.mark.parametrize("driver", ["sync", "manager", "generate"])
def test_graphs_are_not_applicable_on_a_cpu(driver, mode):
    with pytest.raises(
        NotApplicableError, match=f"compile.mode={mode} captures CUDA graphs, and the model runs on cpu"
    ):
        build_plan(experiment(driver=driver, compile_mode=mode))


@pytest.mark.parametrize("mode", ["default", "max_autotune_no_cudagraphs"])
def test_modes_that_compile_without_graphs_run_on_a_cpu_where_a_driver_has_them(mode):
    for driver in ("sync", "manager"):
        assert build_plan(experiment(driver=driver, compile_mode=mode)).compile_mode == mode
    message = f"compile.mode={mode} does not work with driver=generate: use auto or eager, or driver=sync"
    with pytest.raises(ConfigError, match=message) as caught:
        build_plan(experiment(driver="generate", compile_mode=mode))
    assert "\n" not in str(caught.value)


def test_the_managers_auto_is_resolved():
    assert build_plan(experiment(driver="manager")).compile_mode == "eager"


def test_idle_settings_are_warned_about():
    config = experiment(driver="generate", page_size=64)
    assert any("cache.page_size=64 has no effect" in warning for warning in build_plan(config).warnings)
    config = experiment()
    config.compile.recompile_limit = 64
    assert any("recompile_limit" in warning for warning in build_plan(config).warnings)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({"num_tokens": 20}, "is rounded up to 256 tokens, 1 page of 256."),
        ({"num_tokens": 300}, "is rounded up to 512 tokens, 2 pages of 256."),
        ({"num_tokens": 300, "page_size": 256}, "is rounded up to 512 tokens, 2 pages of 256."),
        ({"num_tokens": 20, "page_size": 32}, "is rounded up to 32 tokens, 1 page of 32."),
        (
            {"num_tokens": 20, "page_size": 64, "driver": "manager"},
            "is rounded up to 64 tokens, 1 page of 64.",
        ),
        ({"num_tokens": 512}, None),
        ({"num_tokens": None, "page_size": 48}, None),
    ],
)
def test_a_cache_in_other_than_whole_pages_is_rounded_up_and_told(cache, said):
    config = experiment(**cache)
    plan, loaded, prompts = load(config)
    rounded = [warning for warning in plan.warnings if warning.startswith("cache.num_tokens=")]
    assert rounded == ([] if said is None else [f"cache.num_tokens={cache['num_tokens']} {said}"])
    if said is not None:
        driver = build_driver(config, plan, loaded, prompts, (), 0)
        tokens = driver.resolved["num_blocks"] * driver.resolved["page_size"]
        driver.close()
        assert f"rounded up to {tokens} tokens" in rounded[0]


def test_tensor_parallel_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="WORLD_SIZE=2: tensor parallelism and sharded models are not supported"
    ):
        build_plan(experiment())


def test_more_new_tokens_than_positions_are_refused_at_once():
    with pytest.raises(
        ConfigError, match="max_new_tokens=300 and a prompt of 5 tokens exceed the model's 256 positions"
    ):
        build_plan(experiment(max_new_tokens=300))


def test_what_the_machine_lacks_ends_the_plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = experiment()
    config.model.device = "cuda"
    with pytest.raises(ModelError, match=r"model\.device=cuda"):
        build_plan(config)


def test_a_model_that_does_not_fit_is_refused_before_loading(free_memory, monkeypatch):
    free_memory(1000)
    with pytest.raises(MemoryBudgetError, match=r"cpu has 0.0 MiB free, and .* weights 0.1 MiB"):
        build_plan(experiment())
    free_memory(2**20)
    with pytest.raises(MemoryBudgetError, match=r"Lower cache.num_tokens, sampling.max_new_tokens"):
        build_plan(experiment(num_tokens=1_000_000))


# Cache sizes


def sized(
    plan: RunPlan, lengths: list[int], num_generations: int = 1, free_bytes: int = GIB
) -> cache_sizing.CacheSize:
    plan = dataclasses.replace(plan, limits=(plan.max_new_tokens,) * len(lengths))
    return cache_sizing.size_cache(plan, lengths, num_generations, slack_blocks=0, free_bytes=free_bytes)


def test_an_automatic_cache_holds_the_round():
    plan = build_plan(experiment(page_size=16, max_new_tokens=8))
    size = sized(plan, [5, 12, 8], num_generations=2)
    assert size.num_blocks == 2 * (1 + 2 + 1)
    assert size.max_batch_tokens == 2 * 25
    assert size.max_requests_per_batch == 4


def test_an_explicit_cache_is_rounded_up_to_blocks():
    assert sized(build_plan(experiment(num_tokens=1000, page_size=64)), [5]).num_blocks == 16


def test_a_request_that_can_never_fit_names_both_numbers():
    plan = build_plan(experiment(num_tokens=128, page_size=64, max_new_tokens=100))
    message = r"num_tokens=128 holds 2 pages of 64 tokens, and prompt 1 needs 3 of them for its 129 tokens .* least 192"
    with pytest.raises(ConfigError, match=message):
        sized(plan, [5, 30])
    assert sized(plan, [5, 29]).num_blocks == 2


def test_a_sliding_window_bounds_what_a_request_needs():
    plan = build_plan(experiment(MISTRAL, num_tokens=16, page_size=8, lengths=(3, 4)))
    assert sized(plan, [100]).num_blocks == 2


def test_an_automatic_cache_stays_within_its_share_of_the_memory(caplog):
    plan = build_plan(experiment(page_size=16, max_new_tokens=8, max_memory_fraction=0.5))
    lengths = [100] * 50
    needed = sized(plan, lengths).num_blocks
    assert needed == 50 * 7
    cost = estimate_cache_cost(plan.architecture, plan.dtype, 5000, 4, is_masked=False)
    with caplog.at_level(logging.WARNING):
        limited = sized(plan, lengths, free_bytes=2 * cost.total_bytes(20 * 16))
    assert limited.num_blocks == 20
    assert "requests wait for each other" in caplog.text
    assert "requests wait for each other" in plan.warnings[-1]
    with pytest.raises(
        MemoryBudgetError, match=r"max_memory_fraction=0\.5 may be used, and the longest request"
    ):
        sized(plan, lengths, free_bytes=1_000_000)


def test_generate_takes_as_many_rows_as_fit(free_memory):
    plan = build_plan(experiment(driver="generate", num_prompts=50))
    row_bytes = (12 + 8) * plan.kv_bytes_per_token
    assert cache_sizing.max_requests_in_memory(plan, [12, 5], int(10.5 * row_bytes / 0.8)) == 10
    assert cache_sizing.max_requests_in_memory(plan, [12, 5], GIB) == 50
    with pytest.raises(MemoryBudgetError, match="one request of 20 tokens"):
        cache_sizing.max_requests_in_memory(plan, [12, 5], row_bytes)


def test_a_prompt_beyond_the_models_positions_is_named():
    config = experiment(max_new_tokens=100, lengths=(5, 200))
    plan, loaded, _ = load(config)
    with pytest.raises(
        ConfigError, match="prompt 1 has 157 tokens, which with 100 new tokens exceed the model's 256"
    ):
        build_driver(config, plan, loaded, PromptSet([[1] * 5, [1] * 157, [1] * 5, [1] * 5]), (), 0)


# Stop ids


def fake_loaded(eos_ids: tuple[int, ...] = (257,)) -> LoadedModel:
    loaded = load_model(experiment().model, experiment().adapter, seed=0)
    return LoadedModel(**{**vars(loaded), "generation_eos_ids": eos_ids})


def stop_ids(tokenizer: Any, eos_ids: tuple[int, ...], **sampling: Any) -> tuple[tuple[int, ...], int]:
    config = experiment()
    config.sampling = SamplingConfig(**sampling)
    return resolve_stop_ids(config, tokenizer, fake_loaded(eos_ids))


def test_stop_ids_are_the_union_of_tokenizer_and_model():
    tokenizer = build_tokenizer()
    assert stop_ids(tokenizer, (260, 3)) == ((3, 257, 260), 258)
    assert stop_ids(tokenizer, ()) == ((257,), 258)
    assert stop_ids(None, (9, 4)) == ((4, 9), 4)


def test_stop_ids_can_be_set_and_ignored():
    tokenizer = build_tokenizer()
    assert stop_ids(tokenizer, (260,), eos_token_ids=[7, 5, 7]) == ((5, 7), 258)
    assert stop_ids(tokenizer, (260,), ignore_eos=True) == ((), 258)
    assert stop_ids(None, (260,), ignore_eos=True) == ((), 260)


def test_padding_falls_back_and_zero_is_an_id():
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    assert tokenizer.pad_token_id == 0
    assert stop_ids(tokenizer, ())[1] == 0
    assert stop_ids(tokenizer, (), pad_token_id=6)[1] == 6
    tokenizer.pad_token = None
    assert stop_ids(tokenizer, ())[1] == 257
    assert stop_ids(None, (0,)) == ((0,), 0)
    assert stop_ids(None, ()) == ((), 0)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            {"eos_token_ids": [300]},
            "token id 300 is not one of the model's, 0 to 299: set sampling.eos_token_ids",
        ),
        ({"pad_token_id": 999}, "token id 999 .* set sampling.pad_token_id"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(sampling, message):
    with pytest.raises(ConfigError, match=message):
        stop_ids(build_tokenizer(), (), **sampling)


# Drivers


@pytest.mark.parametrize(
    ("architecture", "peers"),
    [(QWEN3, ["manager", "generate"]), (MISTRAL, ["manager", "generate"]), (GEMMA2, ["generate"])],
)
def test_every_driver_gives_the_same_completions(architecture, peers):
    _, expected = run(experiment(architecture))
    assert [len(completion) for completion in expected] == [8, 8, 8, 8]
    assert len({token_id for completion in expected for token_id in completion}) > 12
    for driver in peers:
        assert run(experiment(architecture, driver))[1] == expected


def test_the_synchronous_driver_runs_as_planned():
    infos: list[StepInfo] = []
    config = experiment(num_generations=3, page_size=16)
    resolved, completions = run(config, on_step=lambda index, info: infos.append(info))
    assert len(completions) == 12
    assert resolved["page_size"] == 16
    assert resolved["block_sharing"] is True
    assert resolved["max_requests_per_batch"] == 12
    assert resolved["eos_token_ids"] == []
    assert (resolved["decode_mode"], resolved["batch_shape"]) == ("eager", "buckets")
    assert infos


def test_an_explicit_cache_reaches_the_driver():
    resolved, _ = run(
        experiment(num_tokens=1000, page_size=64, scheduler="prefill_first", max_batch_tokens=16)
    )
    assert resolved["cache_tokens"] == 16 * 64
    assert resolved["scheduler"] == "prefill_first"
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
    own.max_new_tokens, own.eos_token_id, own.do_sample, own.repetition_penalty = (
        2,
        list(range(300)),
        True,
        5.0,
    )
    for driver in ("sync", "manager", "generate"):
        config.driver.name = driver
        built = build_driver(config, build_plan(config), loaded, prompts, (), 0)
        ids = built.add_requests(prompts.prompt_ids)
        completions = built.drive_until_empty()
        built.close()
        assert [list(completions[request_id]) for request_id in ids] == expected


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
    driver = build_driver(config, build_plan(config), loaded, prompts, eos, pad)
    ids = driver.add_requests(prompts.prompt_ids)
    completions = driver.drive_until_empty()
    driver.close()
    texts = [tokenizer.decode(list(completions[request_id]), skip_special_tokens=True) for request_id in ids]
    assert prompts.verifier is not None
    verdicts = [
        prompts.verifier(text, answer) for text, answer in zip(texts, prompts.answers or [], strict=True)
    ]
    assert sum(verdicts) >= 5, texts


# The dry run


def test_a_dry_run_counts_by_hand(free_memory):
    config = experiment(num_prompts=4, num_generations=2, page_size=16, lengths=(20, 20), max_new_tokens=30)
    report = summarize_dry_run(config)
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert report.longest_request_tokens == 64
    assert report.cache_tokens_asked == 4 * 2 * 64
    assert report.requests_that_fit == report.num_requests == 8
    assert not report.is_prompt_length_assumed
    assert report.advice == []
    assert report.free_bytes == 8 * GIB
    assert report.tokens_that_fit % 16 == 0
    json.dumps(report.to_dict())
    lines = dict(report.rows())
    assert lines["KV per token"] == "256 bytes"
    assert lines["at once"] == "8 of the 8 requests of a round"
    assert all(len(label) <= 12 for label in lines)


def test_a_dry_run_says_what_to_lower(free_memory):
    free_memory(30_000_000)
    report = summarize_dry_run(experiment(num_tokens=1_000_000))
    assert any(line.startswith("cache.num_tokens=1000000 to ") for line in report.advice)
    free_memory(10_000)
    assert "weights alone exceed the free memory" in summarize_dry_run(experiment()).advice[0]
    free_memory(4_000_000)
    report = summarize_dry_run(
        experiment(page_size=16, lengths=(100, 100), num_prompts=100, max_new_tokens=100)
    )
    assert report.requests_that_fit < 100
    assert report.advice


def test_a_dry_run_counts_requests_of_different_lengths_and_no_more_than_a_batch_has(free_memory):
    """A cache of exactly what a round needs holds all of it, though no request but one is of the greatest length."""
    settings = {"page_size": 16, "lengths": (4, 100), "num_prompts": 20, "max_new_tokens": 12}
    report = summarize_dry_run(experiment(**settings))
    assert report.cache_tokens_asked < 20 * report.longest_request_tokens
    assert (report.requests_that_fit, report.advice) == (20, [])
    report = summarize_dry_run(experiment(**settings, max_requests_per_batch=7))
    assert (report.requests_that_fit, report.advice) == (7, [])
    half = report.cache_tokens_asked // 2
    report = summarize_dry_run(experiment(**settings, num_tokens=half))
    assert 0 < report.requests_that_fit < 20
    assert report.advice[0].startswith("only to run all requests at once")


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


def test_a_dry_run_notes_sliding_layers(free_memory):
    report = summarize_dry_run(experiment(GEMMA2))
    assert report.sliding_layers is not None
    assert report.sliding_layers.startswith("1 of 2, which keep the last 16 tokens")
