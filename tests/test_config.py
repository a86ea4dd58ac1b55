"""The schema's own checks, what the engine refuses, and the settings that have no effect in their combination."""

from typing import get_type_hints

import pytest
import yaml

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
    find_idle_settings,
)
from cbexp.engine import Sampling
from cbexp.errors import ConfigError

SYNTHETIC = {"name": "synthetic", "kind": "synthetic", "min_length": 4, "max_length": 8}
JSONL = {"name": "jsonl", "kind": "jsonl", "path": "rows.jsonl", "prompt_field": "prompt"}
EIGHT, RANGE = DatasetConfig(num_generations=8), DatasetConfig(**SYNTHETIC)
LORA = AdapterConfig(kind="lora")
LIMITS = {"max_new_tokens_file": "limits.json"}
DECODE = {
    "fusion": "projections",
    "batch_shape": "full",
    "buckets": [1, 8],
    "max_burst": 9,
    "self_check": False,
}
FOREIGN = ModelConfig(name_or_path="a/b", attn_implementation="sdpa")
OUT_OF_RANGE = """
    adapter.alpha=0 adapter.rank=0 cache.block_sharing=maybe cache.num_tokens=0 cache.scheduler=lifo
    compile.batch_shape=bucket compile.fusion=projection compile.mode=reduce-overhead dataset.kind=arithmatic
    dataset.num_generations=0 dataset.num_prompts=0 dataset.verifier=maths driver.name=sglang isolation=thread
    model.default_max_new_tokens=0 model.dtype=bf16 model.init=zeros model.num_threads=0 num_rounds=0
    num_warmup_rounds=-1 sampling.new_tokens_seed=-1 sampling.pad_token_id=-1 sampling.sigma_new_tokens=-0.1 seed=-1
    tracking.max_logged_completions=0 tracking.mode=remote tracking.project=
"""
RANDOM = ModelConfig(name_or_path="a/b", init="random", revision="v", architecture={"model_type": "x"})


@pytest.mark.parametrize("given", OUT_OF_RANGE.split())
def test_numbers_have_a_least_value_and_names_are_choices(given):
    key, _, value = given.partition("=")
    group, _, name = key.rpartition(".")
    schema = get_type_hints(ExperimentConfig)[group] if group else ExperimentConfig
    with pytest.raises(ConfigError, match=f"^{given.rstrip('=')} is (too small|not a choice|not set)"):
        schema(**{name: yaml.safe_load(value)})


@pytest.mark.parametrize(
    ("group", "settings", "fragments"),
    [
        (ModelConfig, {}, ["model.name_or_path is not set", "model.name_or_path=org/name"]),
        (ModelConfig, {"name_or_path": "a/b", "device": "gpu"}, ["model.device=gpu", "cuda:INDEX"]),
        (ModelConfig, {"name": "hf", "init": "random"}, ["model.init=random", "model=hf", "architecture"]),
        (
            ModelConfig,
            {"name_or_path": "builtin:tiny", "revision": "v1"},
            ["model.revision=v1", "comes with"],
        ),
        (AdapterConfig, {"kind": "lora", "target_modules": []}, ["adapter.target_modules=[]"]),
        (DatasetConfig, JSONL | {"min_length": 3}, ["dataset.min_length=3 has no effect", "kind jsonl"]),
        (DatasetConfig, JSONL | {"path": None}, ["dataset.path is not set"]),
        (DatasetConfig, JSONL | {"verifier": "math"}, ["dataset.answer_field is not set", "verifier=math"]),
        (DatasetConfig, SYNTHETIC | {"max_length": 3}, ["dataset.max_length=3", "at least 4"]),
        (DatasetConfig, SYNTHETIC | {"lengths_file": "f"}, ["excludes", "dataset=synthetic_file"]),
        (SamplingConfig, {"eos_token_ids": []}, ["sampling.eos_token_ids=[]", "ignore_eos=true"]),
        (SamplingConfig, LIMITS | {"max_new_tokens": 9}, ["sampling.max_new_tokens=9", "exclude each"]),
        (SamplingConfig, {"median_new_tokens": 9}, ["max_new_tokens is not set", "median_new_tokens=9"]),
        (SamplingConfig, {"median_new_tokens": 9, "max_new_tokens": 8}, ["max_new_tokens=8", "at least 9"]),
        (CacheConfig, {"max_batch_tokens": 8, "max_requests_per_batch": 9}, ["cache.max_batch_tokens=8"]),
        (ExperimentConfig, {"cache": CacheConfig(max_memory_fraction=0.95)}, ["fraction=0.95", "(0, 0.9]"]),
        (CompileConfig, {"cache_dir": ""}, ["compile.cache_dir is empty", "null"]),
        (DriverConfig, {"name": "vllm", "start_timeout_s": 0}, ["driver.start_timeout_s=0", "more than 0"]),
        (ArtifactsConfig, {"completions": "some"}, ["artifacts.completions=some", "all, none or a number"]),
        (RescoreConfig, {"completions": "-1"}, ["rescore.completions=-1", "all or a number of completions"]),
        (ExperimentConfig, {"name": "../up"}, ["name='../up'"]),
        (ExperimentConfig, {"cell_timeout_s": 0}, ["cell_timeout_s=0", "seconds above 0"]),
        (ExperimentConfig, {"cell_timeout_s": 3, "isolation": "none"}, ["no effect with isolation=none"]),
        (ExperimentConfig, {"resume": "latest", "dry_run": True}, ["no effect with dry_run=true"]),
        (TrackingConfig, {"max_memory_gib": float("nan")}, ["tracking.max_memory_gib=nan", "above 0"]),
        (ExperimentConfig, {"resume_force": True}, ["no effect without resume"]),
        (ExperimentConfig, {"driver": DriverConfig("vllm"), "adapter": LORA}, ["lora does not work with"]),
        (ExperimentConfig, {"cache": CacheConfig(max_requests_per_batch=4), "dataset": EIGHT}, ["batch=4"]),
        (ExperimentConfig, {"cache": CacheConfig(num_tokens=519), "dataset": RANGE}, ["needs 520"]),
    ],
)
def test_bad_setting_says_what_is_wrong_and_what_would_be_right(group, settings, fragments):
    with pytest.raises(ConfigError) as caught:
        group(**settings)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": CompileConfig(buckets=[8, 4])}, r"^compile.buckets=\[8, 4\] must be batch sizes"),
        ({"compile": CompileConfig(max_burst=0)}, "^compile.max_burst=0 is too small"),
        ({"compile": CompileConfig(buckets=[1, 4]), "dataset": EIGHT}, "^compile.buckets end at 4, and .*=8"),
        ({"compile": CompileConfig("default"), "model": FOREIGN}, r"^compile\.mode='default' .* not 'sdpa'"),
        ({"sampling": SamplingConfig(top_p=1.5)}, r"^sampling\.top_p=1\.5 must be a number from 0 to 1"),
        (
            {"sampling": SamplingConfig(temperature=-1.0)},
            r"^sampling\.temperature=-1\.0 must be .*0: greedy",
        ),
        ({"sampling": SamplingConfig(stop_token_ids=[-1])}, r"^sampling\.stop_token_ids has -1, and"),
        (
            {"sampling": SamplingConfig(min_new_tokens=2), "driver": DriverConfig("manager")},
            r"^sampling\.min_new_tokens=2 does not work with driver=manager, .*driver=sync",
        ),
        (
            {"sampling": SamplingConfig(stop_strings=["."]), "dataset": RANGE},
            r"^sampling\.stop_strings are looked for in text, and dataset=synthetic has token ids",
        ),
    ],
)
def test_what_the_engine_refuses_is_said_in_its_words_by_the_settings_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        ExperimentConfig(**settings)


def test_the_engine_gets_sampling_and_seed_as_they_are_set():
    sampling = SamplingConfig(
        temperature=0.5, top_k=-1, stop_strings=["."], stop_token_ids=[3, 3], logprobs=True
    )
    settings = ExperimentConfig(sampling=sampling, seed=7).engine_settings("eager", "cbexp")
    assert (settings.seed, settings.logprobs) == (7, True)
    assert settings.sampling == Sampling(0.5, -1, stop_token_ids=(3, 3), stop_strings=(".",))
    assert settings.sampling.in_effect == {"temperature": 0.5, "stop_token_ids": [3], "stop_strings": ["."]}
    assert ExperimentConfig().engine_settings("eager", "cbexp").sampling == Sampling()
    assert Sampling(top_k=5, top_p=0.0, min_p=0.5, repetition_penalty=2).in_effect == {
        "repetition_penalty": 2
    }
    assert Sampling(1, top_p=0.0).in_effect == {"temperature": 1, "top_p": 0.0}


def test_what_only_the_plan_can_tell_and_what_generate_lacks_is_not_refused():
    ExperimentConfig(driver=DriverConfig("generate"), cache=CacheConfig(num_tokens=4))
    cache = CacheConfig(num_tokens=100)
    sampling = SamplingConfig(max_new_tokens=500, median_new_tokens=4, sigma_new_tokens=0)
    ExperimentConfig(cache=cache, sampling=sampling)
    ExperimentConfig(cache=cache, sampling=SamplingConfig(**LIMITS))
    ArtifactsConfig(completions="12")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, []),
        ({"adapter": AdapterConfig(rank=8, merged=True)}, ["adapter.rank=8", "adapter.merged=True"]),
        ({"adapter": AdapterConfig(kind="lora", path="p", rank=8)}, ["adapter.rank=8"]),
        ({"sampling": SamplingConfig(ignore_eos=True, eos_token_ids=[3])}, ["sampling.eos_token_ids=[3]"]),
        ({"sampling": SamplingConfig(top_k=5, min_p=0.1)}, ["sampling.top_k=5", "sampling.min_p=0.1"]),
        ({"sampling": SamplingConfig(top_k=5, temperature=0.7)}, []),
        ({"sampling": SamplingConfig(ignore_eos=True, min_new_tokens=3)}, ["sampling.min_new_tokens=3"]),
        ({"sampling": SamplingConfig(ignore_eos=True, min_new_tokens=3, stop_token_ids=[1])}, []),
        ({"cache": CacheConfig(num_tokens=4096, max_memory_fraction=0.3)}, ["cache.max_memory_fraction=0.3"]),
        ({"compile": CompileConfig("cuda_graph", cache_dir="d")}, ["compile.cache_dir=d"]),
        ({"compile": CompileConfig("default", recompile_limit=8, cache_dir="d", **DECODE)}, []),
        ({"compile": CompileConfig(batch_shape="natural", buckets=[4])}, ["compile.buckets=[4]"]),
        (
            {"model": FOREIGN, "compile": CompileConfig(**DECODE | {"fusion": "none"})},
            [f"compile.{key}={value}" for key, value in DECODE.items() if key != "fusion"],
        ),
        ({"tracking": TrackingConfig("disabled", group="g")}, ["tracking.group=g"]),
        ({"tracking": TrackingConfig(max_logged_completions=5)}, ["tracking.max_logged_completions=5"]),
        ({"dry_run": True, "stats_path": "s.json"}, ["stats_path=s.json"]),
        ({"model": RANDOM, "dataset": RANGE}, ["model.revision=v"]),
        ({"driver": DriverConfig("vllm"), "rescore": RescoreConfig("3")}, ["rescore.completions=3"]),
    ],
)
def test_idle_settings_are_named(parts, expected):
    lines = map(str, find_idle_settings(ExperimentConfig(**parts)))
    assert sorted(line.split(" has no effect")[0] for line in lines) == sorted(expected)


def test_idle_setting_says_why_and_kernels_of_the_drivers_own_use_the_compile_cache():
    config = ExperimentConfig(compile=CompileConfig("eager", recompile_limit=8, cache_dir="d"))
    (idle,) = find_idle_settings(config, has_kernels=True)
    reason = "compile.mode=eager, which compiles nothing"
    assert (idle.setting, idle.value, idle.reason) == ("compile.recompile_limit", 8, reason)
    assert str(idle) == f"compile.recompile_limit=8 has no effect with {reason}."
