"""On a CUDA device: every driver gives `generate`'s tokens in float32, and the embedded model its answers in bf16."""

import pytest
import torch

from cbexp.config import (
    CompileConfig,
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
    TrackingConfig,
)
from cbexp.engine.types import COMPILE_MODES
from cbexp.experiment import run_experiment
from cbexp.factory import build_driver
from tests.model_fixtures import QWEN3 as TIED_QWEN3
from tests.test_factory import QWEN3, experiment, load

pytestmark = pytest.mark.gpu

# 1.8 GB of weights in a few layers, so that a step is mostly reading.
WIDE = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4}
WIDE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def generate_alone(model, prompt):
    ids = torch.tensor([prompt], device="cuda")
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["sync", "manager", "generate"])
def test_tokens_equal_generate_in_float32_and_the_devices_random_state_is_left_alone(name):
    config = experiment(
        QWEN3 | {"head_dim": 16}, name, device="cuda", num_prompts=6, lengths=(1, 90), max_new_tokens=24
    )
    config.model.dtype = "float32"
    plan, loaded, prompts = load(config)
    expected = [generate_alone(loaded.model, prompt) for prompt in prompts.prompt_ids]
    driver, state = build_driver(plan, loaded, prompts, (), 0), torch.cuda.get_rng_state()
    try:
        driver.warmup()
        for _ in range(2):
            driver.add_requests(prompts.prompt_ids)
            assert [list(c) for c in driver.drive_until_empty().values()] == expected
    finally:
        driver.close()
    assert torch.equal(state, torch.cuda.get_rng_state())


def run(folder, **changes):
    """A run of one round, by default of the embedded model on 1,000 questions; returns its summary."""
    settings = {
        "model": ModelConfig(name="tiny", name_or_path="builtin:tiny", default_max_new_tokens=96),
        "dataset": DatasetConfig(verifier="arithmetic", num_prompts=1000),
        "tracking": TrackingConfig(mode="disabled"),
        "num_rounds": 1,
    }
    outcome = run_experiment(ExperimentConfig(**(settings | changes)), folder / "run", [])
    assert outcome.status == "completed", outcome.message
    assert outcome.summary["dtype"] == "bfloat16"
    assert outcome.summary["peak_memory_gb"] > 0
    assert 1e10 < outcome.summary["bandwidth_bytes_per_s"] < 2e13
    return outcome.summary


def compiled(mode, **settings):
    return {"compile": CompileConfig(mode, buckets=[64, 256], **settings)}


@pytest.fixture(scope="module")
def plain_accuracy(tmp_path_factory):
    """Of the model's own code, run eagerly."""
    accuracy = run(tmp_path_factory.mktemp("plain"), **compiled("eager", fusion="none"))["accuracy"]
    assert accuracy > 0.95
    return accuracy


# By default decoder layers run fused.
WAYS = {mode: compiled(mode) for mode in COMPILE_MODES}
WAYS |= {"cuda_graph, nothing fused": compiled("cuda_graph", fusion="none")}
WAYS |= {driver: {"driver": DriverConfig(driver)} for driver in ("manager", "generate")}


@pytest.mark.parametrize("way", WAYS)
def test_accuracy_in_bfloat16_is_that_of_the_plain_model_in_every_way(tmp_path, plain_accuracy, way):
    summary = run(tmp_path, **WAYS[way])
    assert summary["accuracy"] == pytest.approx(plain_accuracy, abs=0.005)
    if way != "manager":  # it does not see its steps
        assert 0 < summary["roofline_fraction"] <= 1
    if "driver" not in WAYS[way]:
        for name in ("max_logprob_error", "max_logit_error"):
            assert summary[name] is not None, "the self-check has not run"
        assert summary["recompiles"] == summary["graph_breaks"] == summary["skipped_cudagraphs"] == 0


@pytest.mark.parametrize(("num_prompts", "num_generations", "length"), [(8, 1, 100), (4, 16, 900)])
def test_decoding_comes_near_the_roofline_and_not_beyond_it(tmp_path, num_prompts, num_generations, length):
    """Also with groups, whose prompts are counted once: the device's cache serves the other readers."""
    architecture = TIED_QWEN3 | WIDE | {"max_position_embeddings": 2048}
    lengths = {"num_prompts": num_prompts, "min_length": length, "max_length": length}
    lengths["num_generations"] = num_generations
    summary = run(
        tmp_path,
        model=ModelConfig(name="wide", init="random", architecture=architecture),
        dataset=DatasetConfig(kind="synthetic", name="synthetic", **lengths),
        sampling=SamplingConfig(max_new_tokens=128, ignore_eos=True),
        num_rounds=2,
    )
    assert (0.2 if num_generations == 1 else 0) < summary["roofline_fraction"] <= 1
    assert 0 < summary["device_idle_share"] < 1
