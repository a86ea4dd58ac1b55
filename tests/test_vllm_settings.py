"""What vLLM is given: arguments, environment, model folder, memory."""

import dataclasses
import json
import os
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from cbexp.config import AdapterConfig, ModelConfig
from cbexp.drivers.inputs import DriverInputs
from cbexp.drivers.vllm import settings as vllm_settings
from cbexp.drivers.vllm.settings import build_vllm_config
from cbexp.errors import ConfigError
from cbexp.model.loading import describe_model, load_model
from cbexp.planning.plan import build_plan
from tests.model_fixtures import QWEN3, save_model
from tests.vllm_fixtures import FAKE, FakeVllm

GIB = 2**30


@pytest.fixture
def fake(monkeypatch, tmp_path):
    return FakeVllm(monkeypatch, tmp_path)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Plans are for a GPU of 100 GiB with 20 of weights; nothing is asked of it."""
    monkeypatch.setattr(vllm_settings, "total_memory_bytes", lambda device: 100 * GIB)

    def plan(config, index=0):
        plan = build_plan(config)
        weights = dataclasses.replace(plan.weights, num_bytes=20 * GIB)
        return dataclasses.replace(plan, device=torch.device("cuda", index), weights=weights)

    return plan


def settings_of(config, plan=None, lengths=(5, 12, 7, 9)):
    plan = plan or build_plan(config)
    inputs = DriverInputs(
        plan=plan, settings=plan.settings, model=None, prompt_lengths=lengths, log_path=Path("vllm.log")
    )
    return build_vllm_config(inputs)


def test_the_workload_is_ours_and_the_rest_is_vllms_default(fake):
    engine = settings_of(fake.experiment()).engine
    fixed = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "float32",
        "seed": 0,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    assert {key: engine[key] for key in fixed} == fixed
    assert set(engine) - set(fixed) == {"model", "kv_cache_memory_bytes"}
    plan = build_plan(fake.experiment()).to_dict()
    assert plan["attn_implementation"] == "vllm"
    assert not {"page_size", "scheduler", "max_batch_tokens"} & set(plan)


def test_the_longest_request_decides_the_length_and_model_and_cache_bound_it(fake):
    for limit, longest, expected in ((200, 56, 256), (200, 9, 256), (100, 28, 128), (100, 29, 192)):
        config = fake.experiment(max_new_tokens=limit)
        assert settings_of(config, lengths=[5, longest, 1, 1]).engine["max_model_len"] == expected
    limits = fake.tmp_path / "limits.json"
    limits.write_text("[1, 90, 3, 4]")
    config = fake.experiment(max_new_tokens=None, max_new_tokens_file=str(limits))
    assert settings_of(config, lengths=[40, 1, 1, 1]).engine["max_model_len"] == 128
    config = fake.experiment(cache={"num_tokens": 20})
    assert settings_of(config, lengths=[12, 2, 2, 2]).engine["max_model_len"] == 20
    message = r"cache.num_tokens=20 is too small: the longest request has 22 tokens"
    with pytest.raises(ConfigError, match=message):
        settings_of(config, lengths=[14, 2, 2, 2])


def test_memory_is_the_share_or_the_tokens_that_the_other_drivers_get(fake, on_a_gpu):
    def memory_of(**cache):
        config = fake.experiment(cache=cache)
        engine = settings_of(config, on_a_gpu(config)).engine
        names = ("gpu_memory_utilization", "block_size", "num_gpu_blocks_override")
        return tuple(engine.get(name) for name in names)

    assert memory_of() == (0.6, None, None)  # 20 GiB of weights, and half of the other 80
    assert memory_of(num_tokens=100) == (0.6, 16, 8)  # in pages, of which one is vLLM's own
    assert memory_of(num_tokens=64, page_size=32) == (0.6, 32, 3)


def test_compile_modes_on_a_cpu(fake):
    given = {}
    for mode in ("auto", "eager", "default"):
        config = settings_of(fake.experiment(compile_mode=mode))
        names = {"enforce_eager", "compilation_config"} & set(config.engine)
        given[mode] = (config.settings.compile_mode, {name: config.engine[name] for name in names})
    assert given == {
        "auto": ("default", {}),
        "eager": ("eager", {"enforce_eager": True}),
        "default": ("default", {"compilation_config": {"cudagraph_mode": "NONE"}}),
    }


def test_the_workers_variables_are_ours_without_our_path_and_on_record_without_secrets(fake, monkeypatch):
    given = {"PYTHONPATH": "/ours", "PYTHONHOME": "/home/of/ours", "HF_HUB_OFFLINE": "0"}
    given |= {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN", "VLLM_API_KEY": "secret"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    config = settings_of(fake.experiment())
    cache_root = str(fake.tmp_path / "compile" / "vllm")
    expected = {"PYTHONPATH": str(FAKE), "HF_HUB_OFFLINE": "0", "VLLM_NO_USAGE_STATS": "1"}
    expected |= {"VLLM_CACHE_ROOT": cache_root, "PATH": os.environ["PATH"]}
    assert {name: config.environment[name] for name in expected} == expected
    assert "PYTHONHOME" not in config.environment
    assert config.vllm_variables["VLLM_ATTENTION_BACKEND"] == "TRITON_ATTN"
    assert config.vllm_variables["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert not {"VLLM_API_KEY", "HF_HUB_OFFLINE"} & set(config.vllm_variables)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    environment = settings_of(fake.experiment(driver={"pythonpath": None})).environment
    assert environment["VLLM_CACHE_ROOT"] == "/elsewhere"
    assert "PYTHONPATH" not in environment


def test_the_worker_sees_the_one_gpu(fake, monkeypatch, on_a_gpu):
    config = fake.experiment()
    for visible, index, expected in (("2,5", 1, "5"), ("GPU-ab, GPU-cd", 1, "GPU-cd"), ("", 2, "2")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        environment = settings_of(config, on_a_gpu(config, index)).environment
        assert environment["CUDA_VISIBLE_DEVICES"] == expected


# The model


def test_random_weights_have_a_folder_by_its_content(fake):
    def folder_of(**changes):
        model = dataclasses.replace(config.model, architecture=QWEN3 | changes)
        return settings_of(dataclasses.replace(config, model=model)).engine["model"]

    config = fake.experiment()
    first = folder_of()
    values = json.loads(Path(first, "config.json").read_text())
    assert values["architectures"] == ["Qwen3ForCausalLM"]
    assert (values["torch_dtype"], values["hidden_size"]) == ("float32", QWEN3["hidden_size"])
    assert os.listdir(first) == ["config.json"]
    assert folder_of() == first
    assert folder_of(intermediate_size=64) != first
    # Rotary settings are written as all versions of transformers read them.
    rotary = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rotary["original_max_position_embeddings"] = 64
    folder = folder_of(model_type="llama", rope_parameters=rotary | {"rope_theta": 5e5})
    values = json.loads(Path(folder, "config.json").read_text())
    assert (values["rope_theta"], values["rope_scaling"]) == (5e5, rotary)
    assert "rope_parameters" not in values


def test_real_weights_are_given_as_their_folder(fake, tmp_path):
    folder = save_model(tmp_path / "model")
    model = ModelConfig(name="hf", name_or_path=str(folder), device="cpu", trust_remote_code=True)
    engine = settings_of(dataclasses.replace(fake.experiment(), model=model)).engine
    expected = {"model": str(folder), "load_format": "auto", "trust_remote_code": True}
    assert {key: engine[key] for key in expected} == expected


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_a_model_without_weights_is_described_as_the_loaded_one(fake, tmp_path, init):
    config = fake.experiment().model
    if init == "pretrained":
        config = ModelConfig(name="test", name_or_path=str(save_model(tmp_path / "model")), device="cpu")
    described, loaded = describe_model(config), load_model(config, AdapterConfig(), 0)
    assert described.device.type == "meta"
    facts = attrgetter("dtype", "num_parameters", "weight_bytes", "generation_eos_ids", "special_token_ids")
    assert facts(described) == facts(loaded)
    assert described.vocab_size == loaded.vocab_size
