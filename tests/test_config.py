"""The schema's own checks, and the settings that have no effect in their combination."""

import json

import pytest

from cbexp.config import (
    AdapterConfig,
    ArtifactsConfig,
    CacheConfig,
    CompileConfig,
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
    TrackingConfig,
    to_plain_dict,
)
from cbexp.engine.types import CBSyncConfig
from cbexp.errors import ConfigError
from cbexp.planning.idle_settings import idle_settings

SYNTHETIC = {"name": "synthetic", "kind": "synthetic", "min_length": 4, "max_length": 8}
HUB = {"name": "rows", "kind": "hub", "path": "org/rows", "split": "train", "prompt_field": "question"}
DECODE = {
    "fusion": "projections",
    "batch_shape": "full",
    "buckets": [1, 8],
    "max_burst": 9,
    "self_check": False,
}
JSONL = {"name": "jsonl", "kind": "jsonl", "path": "rows.jsonl", "prompt_field": "prompt"}


def test_default_experiment_is_whole_and_has_nothing_idle():
    config = ExperimentConfig()
    assert config.model.name_or_path == "builtin:tiny"
    assert idle_settings(config) == []


@pytest.mark.parametrize(
    ("build", "fragments"),
    [
        (lambda: ModelConfig(), ["model.name_or_path is not set", "model.name_or_path=org/name"]),
        (lambda: ModelConfig(name_or_path="a/b", dtype="bf16"), ["model.dtype=bf16", "bfloat16", "float32"]),
        (lambda: ModelConfig(name_or_path="a/b", device="gpu"), ["model.device=gpu", "cuda:INDEX"]),
        (lambda: ModelConfig(name="hf", init="random"), ["model.init=random", "model=hf", "architecture"]),
        (
            lambda: ModelConfig(name_or_path="builtin:tiny", revision="v1"),
            ["model.revision=v1", "builtin:tiny"],
        ),
        (lambda: AdapterConfig(kind="lora", rank=0), ["adapter.rank=0", "at least 1"]),
        (lambda: AdapterConfig(kind="lora", target_modules=[]), ["adapter.target_modules=[]"]),
        (lambda: DatasetConfig(kind="arithmatic"), ["Did you mean 'arithmetic'?"]),
        (lambda: DatasetConfig(num_prompts=0), ["dataset.num_prompts=0", "at least 1"]),
        (lambda: DatasetConfig(path="x"), ["dataset.path=x has no effect", "kind arithmetic"]),
        (lambda: DatasetConfig(min_length=3), ["dataset.min_length=3 has no effect"]),
        (lambda: DatasetConfig(**JSONL, min_length=3), ["dataset.min_length=3 has no effect", "kind jsonl"]),
        (lambda: DatasetConfig(**JSONL, split="train"), ["dataset.split=train has no effect"]),
        (lambda: DatasetConfig(**JSONL | {"path": None}), ["dataset.path is not set"]),
        (lambda: DatasetConfig(**JSONL | {"prompt_field": None}), ["dataset.prompt_field is not set"]),
        (
            lambda: DatasetConfig(**JSONL, verifier="math"),
            ["dataset.answer_field is not set", "verifier=math"],
        ),
        (lambda: DatasetConfig(**HUB | {"split": None}), ["dataset.split is not set"]),
        (lambda: DatasetConfig(**SYNTHETIC, verifier="math"), ["dataset.verifier=math has no effect"]),
        (lambda: DatasetConfig(**SYNTHETIC, system_prompt="Hi"), ["dataset.system_prompt=Hi has no effect"]),
        (lambda: DatasetConfig(**SYNTHETIC | {"max_length": None}), ["dataset.max_length is not set"]),
        (lambda: DatasetConfig(**SYNTHETIC | {"max_length": 3}), ["dataset.max_length=3", "at least 4"]),
        (lambda: DatasetConfig(**SYNTHETIC | {"min_length": 0}), ["dataset.min_length=0", "at least 1"]),
        (lambda: DatasetConfig(**SYNTHETIC, lengths_file="f"), ["excludes", "dataset=synthetic_file"]),
        (lambda: SamplingConfig(max_new_tokens=0), ["sampling.max_new_tokens=0"]),
        (lambda: SamplingConfig(eos_token_ids=[]), ["sampling.eos_token_ids=[]", "ignore_eos=true"]),
        (lambda: SamplingConfig(eos_token_ids=[-1]), ["sampling.eos_token_ids=-1"]),
        (lambda: CacheConfig(block_sharing="On"), ["cache.block_sharing=On", "auto, on, off"]),
        (lambda: CacheConfig(num_tokens=0), ["cache.num_tokens=0", "at least 1"]),
        (lambda: CacheConfig(max_batch_tokens=8, max_requests_per_batch=9), ["cache.max_batch_tokens=8"]),
        (lambda: CacheConfig(max_memory_fraction=0.95), ["cache.max_memory_fraction=0.95", "(0, 0.9]"]),
        (lambda: CompileConfig(mode="reduce-overhead"), ["Did you mean 'reduce_overhead'?"]),
        (lambda: CompileConfig(recompile_limit=0), ["compile.recompile_limit=0"]),
        (lambda: CompileConfig(region="layers"), ["compile.region=layers", "Did you mean 'layer'?"]),
        (lambda: CompileConfig(fusion="projection"), ["Did you mean 'projections'?"]),
        (lambda: CompileConfig(batch_shape="bucket"), ["natural, buckets, full"]),
        (lambda: CompileConfig(buckets=[8, 4]), ["compile.buckets=[8,4]", "ascending", "[1,8,32]"]),
        (lambda: CompileConfig(buckets=[4, 4]), ["compile.buckets=[4,4]"]),
        (lambda: CompileConfig(buckets=[0, 4]), ["compile.buckets=[0,4]", "at least 1"]),
        (lambda: CompileConfig(buckets=[]), ["compile.buckets=[]"]),
        (
            lambda: CompileConfig("default", region="layer", fusion="layers"),
            ["compile.region=layer", "compile.fusion=layers", "exclude each other"],
        ),
        (lambda: CompileConfig(max_burst=0), ["compile.max_burst=0"]),
        (lambda: CompileConfig(cache_dir=""), ["compile.cache_dir is empty", "null"]),
        *(
            (
                lambda mode=mode: CompileConfig(mode, region="layer"),
                [f"compile.mode={mode}", reason, "region=model"],
            )
            for mode, reason in {
                "eager": "compiles nothing",
                "cuda_graph": "compiles nothing",
                "reduce_overhead": "needs the whole model",
                "max_autotune": "needs the whole model",
            }.items()
        ),
        (
            lambda: ExperimentConfig(
                compile=CompileConfig(buckets=[1, 4]), dataset=DatasetConfig(num_generations=8)
            ),
            ["compile.buckets ends at 4", "8 requests"],
        ),
        (
            lambda: ExperimentConfig(
                compile=CompileConfig(buckets=[1, 4]), cache=CacheConfig(max_requests_per_batch=5)
            ),
            ["compile.buckets ends at 4", "5 requests"],
        ),
        (
            lambda: SamplingConfig(max_new_tokens=9, max_new_tokens_file="f.json"),
            ["sampling.max_new_tokens=9", "max_new_tokens_file", "exclude each other"],
        ),
        (
            lambda: SamplingConfig(median_new_tokens=9, max_new_tokens_file="f.json"),
            ["sampling.median_new_tokens=9", "exclude each other"],
        ),
        (
            lambda: SamplingConfig(median_new_tokens=9),
            ["sampling.max_new_tokens is not set", "median_new_tokens=9"],
        ),
        (lambda: SamplingConfig(median_new_tokens=9, max_new_tokens=8), ["max_new_tokens=8", "at least 9"]),
        (lambda: SamplingConfig(sigma_new_tokens=-0.1), ["sampling.sigma_new_tokens=-0.1"]),
        (lambda: DriverConfig(name="sglang"), ["driver.name=sglang", "sync, manager, generate, vllm"]),
        (lambda: DriverConfig(name="vllm", start_timeout_s=0), ["driver.start_timeout_s=0", "more than 0"]),
        (
            lambda: ExperimentConfig(driver=DriverConfig(name="vllm"), adapter=AdapterConfig(kind="lora")),
            ["adapter=lora", "driver=vllm"],
        ),
        (lambda: TrackingConfig(project=""), ["tracking.project is not set"]),
        (
            lambda: ArtifactsConfig(completions="some"),
            ["artifacts.completions=some", "all, none or a number"],
        ),
        (lambda: ArtifactsConfig(completions="²"), ["artifacts.completions=²"]),
        (lambda: ExperimentConfig(name="../up"), ["name='../up'"]),
        (lambda: ExperimentConfig(num_rounds=0), ["num_rounds=0"]),
        (lambda: ExperimentConfig(seed=-1), ["seed=-1"]),
        (
            lambda: ExperimentConfig(
                cache=CacheConfig(max_requests_per_batch=4), dataset=DatasetConfig(num_generations=8)
            ),
            ["cache.max_requests_per_batch=4", "dataset.num_generations=8"],
        ),
        (
            lambda: ExperimentConfig(
                cache=CacheConfig(num_tokens=107),
                dataset=DatasetConfig(**SYNTHETIC),
                sampling=SamplingConfig(max_new_tokens=100),
            ),
            ["cache.num_tokens=107", "needs 108"],
        ),
    ],
)
def test_bad_setting_says_what_is_wrong_and_what_would_be_right(build, fragments):
    with pytest.raises(ConfigError) as caught:
        build()
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("completions", ["all", "none", "0", "12"])
def test_completions_kept_can_be_counted(completions):
    assert ArtifactsConfig(completions=completions).completions == completions


def test_generate_is_not_held_to_the_paged_cache():
    config = ExperimentConfig(driver=DriverConfig("generate"), cache=CacheConfig(num_tokens=4))
    assert not config.has_paged_cache


def test_sampling_limit_wins_over_the_model_default():
    assert ExperimentConfig().max_new_tokens == 512
    assert ExperimentConfig(sampling=SamplingConfig(max_new_tokens=7)).max_new_tokens == 7


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"adapter": AdapterConfig(rank=8, merged=True)}, ["adapter.rank=8", "adapter.merged=True"]),
        ({"adapter": AdapterConfig(kind="lora", path="p", rank=8)}, ["adapter.rank=8"]),
        ({"adapter": AdapterConfig(kind="lora", revision="r")}, ["adapter.revision=r"]),
        ({"adapter": AdapterConfig(kind="lora", rank=8, merged=True)}, []),
        ({"sampling": SamplingConfig(ignore_eos=True, eos_token_ids=[3])}, ["sampling.eos_token_ids=[3]"]),
        ({"sampling": SamplingConfig(eos_token_ids=[3])}, []),
        ({"sampling": SamplingConfig(pad_token_id=0)}, ["sampling.pad_token_id=0"]),
        ({"sampling": SamplingConfig(pad_token_id=0), "driver": DriverConfig("generate")}, []),
        ({"cache": CacheConfig(num_tokens=4096, max_memory_fraction=0.5)}, ["cache.max_memory_fraction=0.5"]),
        (
            {
                "driver": DriverConfig("generate"),
                "cache": CacheConfig(
                    num_tokens=4096, page_size=16, scheduler="prefill_first", block_sharing="on"
                ),
            },
            [
                "cache.num_tokens=4096",
                "cache.page_size=16",
                "cache.scheduler=prefill_first",
                "cache.block_sharing=on",
            ],
        ),
        ({"driver": DriverConfig("generate"), "cache": CacheConfig(block_sharing="off")}, []),
        ({"driver": DriverConfig("generate"), "cache": CacheConfig(max_requests_per_batch=4)}, []),
        ({"compile": CompileConfig("eager", recompile_limit=8)}, ["compile.recompile_limit=8"]),
        ({"compile": CompileConfig("cuda_graph", cache_dir="d")}, ["compile.cache_dir=d"]),
        ({"compile": CompileConfig("default", recompile_limit=8, cache_dir="d")}, []),
        ({"compile": CompileConfig("cuda_graph", cache_dir=None)}, ["compile.cache_dir=None"]),
        ({"compile": CompileConfig("default", region="layer", **DECODE)}, []),
        (
            {"compile": CompileConfig(batch_shape="natural", buckets=[4])},
            ["compile.buckets=[4]"],
        ),
        ({"compile": CompileConfig(batch_shape="full", buckets=[4])}, []),
        *(
            (
                {
                    "driver": DriverConfig(driver),
                    "compile": CompileConfig("default", region="layer", **DECODE),
                },
                ["compile.region=layer", *(f"compile.{key}={value}" for key, value in DECODE.items())],
            )
            for driver in ("manager", "generate")
        ),
        (
            {
                "model": ModelConfig(name_or_path="a/b", attn_implementation="sdpa"),
                "compile": CompileConfig(**DECODE),
            },
            [f"compile.{key}={value}" for key, value in DECODE.items() if key != "fusion"],
        ),
        (
            {"sampling": SamplingConfig(sigma_new_tokens=0.5, new_tokens_seed=3)},
            ["sampling.sigma_new_tokens=0.5", "sampling.new_tokens_seed=3"],
        ),
        (
            {
                "sampling": SamplingConfig(
                    max_new_tokens=9, median_new_tokens=4, sigma_new_tokens=0.5, new_tokens_seed=3
                )
            },
            [],
        ),
        ({"tracking": TrackingConfig("disabled", group="g")}, ["tracking.group=g"]),
        ({"tracking": TrackingConfig(max_logged_completions=5)}, ["tracking.max_logged_completions=5"]),
        ({"tracking": TrackingConfig(log_completions=True, max_logged_completions=5)}, []),
        ({"dry_run": True, "stats_path": "s.json"}, ["stats_path=s.json"]),
        (
            {
                "model": ModelConfig(
                    name_or_path="a/b", init="random", revision="v", architecture={"model_type": "x"}
                ),
                "dataset": DatasetConfig(**SYNTHETIC),
            },
            ["model.revision=v"],
        ),
        (
            {
                "model": ModelConfig(
                    name_or_path="a/b", init="random", revision="v", architecture={"model_type": "x"}
                )
            },
            [],
        ),
        (
            {"model": ModelConfig(name_or_path="builtin:tiny", trust_remote_code=True)},
            ["model.trust_remote_code=True"],
        ),
    ],
)
def test_idle_settings_are_named(parts, expected):
    lines = idle_settings(ExperimentConfig(**parts))
    assert sorted(line.split(" has no effect")[0] for line in lines) == sorted(expected)


def test_kernels_of_the_drivers_own_use_the_compile_cache():
    config = ExperimentConfig(compile=CompileConfig("eager", recompile_limit=8, cache_dir="d"))
    (line,) = idle_settings(config, has_kernels=True)
    assert line.startswith("compile.recompile_limit=8")


def test_defaults_are_the_engines_own():
    settings, engine = CompileConfig(), CBSyncConfig()
    for name in ("fusion", "batch_shape", "buckets", "max_burst", "self_check"):
        assert getattr(settings, name) == getattr(engine, name)
    assert settings.region == engine.compile_region


def test_limits_of_the_prompts_own_are_checked_by_the_plan():
    cache = CacheConfig(num_tokens=100)
    sampling = SamplingConfig(max_new_tokens=500, median_new_tokens=4, sigma_new_tokens=0)
    ExperimentConfig(cache=cache, sampling=sampling)
    ExperimentConfig(cache=cache, sampling=SamplingConfig(max_new_tokens_file="limits.json"))


def test_idle_setting_says_why():
    (line,) = idle_settings(ExperimentConfig(adapter=AdapterConfig(rank=8)))
    assert line == "adapter.rank=8 has no effect with adapter=none."


def test_plain_dict_is_json_and_complete():
    plain = to_plain_dict(
        ExperimentConfig(dataset=DatasetConfig(chat_template_kwargs={"enable_thinking": False}))
    )
    assert json.loads(json.dumps(plain)) == plain
    assert plain["dataset"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert {"model", "cache", "num_rounds", "stats_path"} <= plain.keys()
