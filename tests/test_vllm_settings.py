"""What vLLM is given: arguments, environment, model folder, memory."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
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
from tests.vllm_fixtures import FAKE, FakeVllm, experiment

GIB = 2**30
LENGTHS = [5, 12, 7, 9]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    return FakeVllm(monkeypatch, tmp_path)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Plans are for a GPU of 100 GiB; nothing is asked of it."""
    monkeypatch.setattr(vllm_settings, "total_memory_bytes", lambda device: 100 * GIB)

    def place(plan, index=0, weight_bytes=20 * GIB):
        weights = dataclasses.replace(plan.weights, num_bytes=weight_bytes)
        return dataclasses.replace(plan, device=torch.device("cuda", index), weights=weights)

    return place


def settings_of(config, plan=None, lengths=LENGTHS):
    plan = plan or build_plan(config)
    inputs = DriverInputs(
        plan=plan, settings=plan.settings, model=None, prompt_lengths=lengths, log_path=Path("vllm.log")
    )
    return build_vllm_config(inputs)


def test_the_workload_is_ours_and_the_rest_is_vllms_default(fake):
    engine = settings_of(experiment(fake)).engine
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


def test_what_vllms_own_variables_say_is_on_record_but_no_secret(fake, monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("OTHER", "x")
    variables = settings_of(experiment(fake)).vllm_variables
    assert variables["VLLM_ATTENTION_BACKEND"] == "TRITON_ATTN"
    assert variables["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert not {"VLLM_API_KEY", "OTHER"} & set(variables)


def test_the_longest_request_decides_the_length_and_the_model_bounds_it(fake):
    for limit, longest, expected in ((200, 56, 256), (200, 9, 256), (100, 28, 128), (100, 29, 192)):
        config = experiment(fake, max_new_tokens=limit)
        assert settings_of(config, lengths=[5, longest, 1, 1]).engine["max_model_len"] == expected


def test_every_request_has_its_own_limit(fake, tmp_path):
    limits = tmp_path / "limits.json"
    limits.write_text("[1, 90, 3, 4]")
    config = experiment(fake, max_new_tokens=None, max_new_tokens_file=str(limits))
    assert settings_of(config, lengths=[40, 1, 1, 1]).engine["max_model_len"] == 128


def test_memory_is_the_share_that_the_other_drivers_get(fake, on_a_gpu):
    config = experiment(fake)
    engine = settings_of(config, on_a_gpu(build_plan(config))).engine
    # 20 GiB of weights, and 0.8 of the other 80.
    assert engine["gpu_memory_utilization"] == 0.84
    assert "block_size" not in engine
    assert "num_gpu_blocks_override" not in engine


def test_a_cache_of_so_many_tokens_is_counted_in_pages(fake, on_a_gpu):
    config = experiment(fake, cache={"num_tokens": 100})
    engine = settings_of(config, on_a_gpu(build_plan(config))).engine
    assert (engine["block_size"], engine["num_gpu_blocks_override"]) == (16, 8)
    assert engine["max_model_len"] == 64
    config = experiment(fake, cache={"num_tokens": 64, "page_size": 32})
    engine = settings_of(config, on_a_gpu(build_plan(config))).engine
    assert (engine["block_size"], engine["num_gpu_blocks_override"]) == (32, 3)


def test_a_cache_too_small_for_the_longest_request_is_refused(fake):
    config = experiment(fake, cache={"num_tokens": 20})
    with pytest.raises(
        ConfigError, match=r"cache.num_tokens=20 is too small: the longest request has 22 tokens"
    ):
        settings_of(config, lengths=[14, 2, 2, 2])
    assert settings_of(config, lengths=[12, 2, 2, 2]).engine["max_model_len"] == 20


@pytest.mark.parametrize(
    ("mode", "resolved", "arguments"),
    [
        ("auto", "default", {}),
        ("eager", "eager", {"enforce_eager": True}),
        ("default", "default", {"compilation_config": {"cudagraph_mode": "NONE"}}),
    ],
)
def test_compile_modes_on_a_cpu(fake, mode, resolved, arguments):
    config = settings_of(experiment(fake, compile_mode=mode))
    assert config.settings.compile_mode == resolved
    given = {
        key: config.engine[key] for key in ("enforce_eager", "compilation_config") if key in config.engine
    }
    assert given == arguments


def test_the_plan_tells_nothing_that_vllm_decides(fake):
    plan = build_plan(experiment(fake, cache={"block_sharing": "on"})).to_dict()
    assert plan["attn_implementation"] == "vllm"
    assert plan["block_sharing"] is True
    assert not {"page_size", "scheduler", "max_batch_tokens"} & set(plan)


def test_our_path_does_not_reach_the_worker(fake, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTHONHOME", "/home/of/ours")
    environment = settings_of(experiment(fake)).environment
    assert environment["PYTHONPATH"] == str(FAKE)
    assert "PYTHONHOME" not in environment
    environment = settings_of(experiment(fake, driver={"pythonpath": None})).environment
    assert "PYTHONPATH" not in environment


def test_the_users_own_variables_go_before(fake, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    environment = settings_of(experiment(fake)).environment
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["VLLM_CACHE_ROOT"] == str(fake.tmp_path / "compile" / "vllm")
    assert environment["PATH"] == os.environ["PATH"]
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    assert settings_of(experiment(fake)).environment["VLLM_CACHE_ROOT"] == "/elsewhere"


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [("3", 0, "3"), ("2,5", 1, "5"), ("GPU-ab, GPU-cd", 1, "GPU-cd"), (None, 0, "0"), (None, 2, "2")],
)
def test_the_worker_sees_the_one_gpu(fake, monkeypatch, on_a_gpu, visible, index, expected):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = experiment(fake)
    plan = on_a_gpu(build_plan(config), index)
    assert settings_of(config, plan).environment["CUDA_VISIBLE_DEVICES"] == expected


def test_python_and_path_must_be_there(fake):
    assert settings_of(experiment(fake)).python == sys.executable
    with pytest.raises(ConfigError, match=r"driver.python=/nowhere/python is no program"):
        settings_of(experiment(fake, driver={"python": "/nowhere/python"}))
    with pytest.raises(ConfigError, match=r"driver.pythonpath=.*there is no /nowhere"):
        settings_of(experiment(fake, driver={"pythonpath": f"{FAKE}:/nowhere"}))


def test_random_weights_have_a_folder_by_its_content(fake):
    first, again = (settings_of(experiment(fake)).engine["model"] for _ in range(2))
    assert first == again
    values = json.loads(Path(first, "config.json").read_text())
    assert values["architectures"] == ["Qwen3ForCausalLM"]
    assert values["torch_dtype"] == "float32"
    assert values["hidden_size"] == QWEN3["hidden_size"]
    assert os.listdir(first) == ["config.json"]
    config = experiment(fake)
    larger = dataclasses.replace(config.model, architecture=QWEN3 | {"intermediate_size": 64})
    assert settings_of(dataclasses.replace(config, model=larger)).engine["model"] != first


def test_rotary_settings_are_written_as_all_versions_read_them(fake):
    config = experiment(fake)
    rotary = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rotary |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    values = {**QWEN3, "model_type": "llama", "rope_parameters": rotary}
    model = dataclasses.replace(config.model, architecture=values)
    folder = settings_of(dataclasses.replace(config, model=model)).engine["model"]
    written = json.loads(Path(folder, "config.json").read_text())
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"] == {key: value for key, value in rotary.items() if key != "rope_theta"}
    assert "rope_parameters" not in written


def test_a_cache_folder_that_cannot_be_written_is_named(fake):
    (fake.tmp_path / "compile").write_text("a file")
    with pytest.raises(ConfigError, match=r"compile.cache_dir: .*cannot be written"):
        settings_of(experiment(fake))


def test_real_weights_are_given_as_their_folder(fake, tmp_path):
    folder = save_model(tmp_path / "model")
    config = experiment(fake)
    model = ModelConfig(name="hf", name_or_path=str(folder), device="cpu", trust_remote_code=True)
    engine = settings_of(dataclasses.replace(config, model=model)).engine
    assert engine["model"] == str(folder)
    assert engine["load_format"] == "auto"
    assert engine["trust_remote_code"] is True


@pytest.mark.parametrize("init", ["random", "pretrained", "builtin"])
def test_a_model_without_weights_is_described_as_the_loaded_one(tmp_path, init):
    name = {"pretrained": str(save_model(tmp_path / "model")), "builtin": "builtin:tiny"}.get(init)
    config = ModelConfig(
        name="test",
        name_or_path=name,
        init="random" if init == "random" else "pretrained",
        architecture=QWEN3 if init == "random" else {},
        device="cpu",
    )
    described, loaded = describe_model(config), load_model(config, AdapterConfig(), 0)
    assert described.device.type == "meta"
    for name in (
        "dtype",
        "num_parameters",
        "weight_bytes",
        "generation_eos_ids",
        "special_token_ids",
        "vocab_size",
    ):
        assert getattr(described, name) == getattr(loaded, name), name
