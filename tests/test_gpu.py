"""On a CUDA device: every driver gives `generate`'s tokens in float32, and the embedded model its answers in bf16."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cbexp.config import DatasetConfig, DriverConfig, ExperimentConfig, ModelConfig, TrackingConfig
from cbexp.engine import CBSyncConfig, SyncCBDriver
from cbexp.experiment import run_experiment
from cbexp.peers.base import PeerConfig
from cbexp.peers.generate import GenerateDriver
from cbexp.peers.manager import ManagerDriver

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
BATCH = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64, "max_requests_per_batch": 8}


def build_model(dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).to("cuda", dtype).eval()


def build_prompts():
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 3, 17, 90, 33, 16]
    return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]


def generate_alone(model, prompt):
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def build_driver(kind, model):
    if kind == "sync":
        config = CBSyncConfig(max_new_tokens=NEW_TOKENS, eos_token_id=(), **BATCH)
        return SyncCBDriver(model, config=config)
    config = PeerConfig(
        max_new_tokens=NEW_TOKENS,
        eos_token_ids=(),
        pad_token_id=0,
        compile_mode="auto",
        allow_block_sharing=False,
        scheduler="fifo",
        **BATCH,
    )
    return {"manager": ManagerDriver, "generate": GenerateDriver}[kind](model, config)


@pytest.mark.parametrize("kind", ["sync", "manager", "generate"])
def test_tokens_equal_generate_in_float32(kind):
    model, prompts = build_model(), build_prompts()
    expected = [generate_alone(model, prompt) for prompt in prompts]
    driver = build_driver(kind, model)
    try:
        for _ in range(2):
            driver.add_requests(prompts)
            assert [list(c) for c in driver.drive_until_empty().values()] == expected
    finally:
        driver.close()


def test_new_weights_are_used_in_the_next_round():
    model, prompts = build_model(), build_prompts()
    config = CBSyncConfig(max_new_tokens=NEW_TOKENS, eos_token_id=(), allow_block_sharing=True, **BATCH)
    with SyncCBDriver(model, config=config) as driver:
        driver.add_requests(prompts)
        before = [list(c) for c in driver.drive_until_empty().values()]
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
        driver.add_requests(prompts)
        after = [list(c) for c in driver.drive_until_empty().values()]
    assert before != after
    assert after == [generate_alone(model, prompt) for prompt in prompts]


def test_random_state_of_the_device_is_left_alone():
    model = build_model(torch.bfloat16)
    with build_driver("sync", model) as driver:
        state = torch.cuda.get_rng_state()
        driver.add_requests(build_prompts(), num_generations=2)
        completions = driver.drive_until_empty()
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert [len(c) for c in completions.values()] == [NEW_TOKENS] * 12


@pytest.mark.parametrize("driver", ["sync", "manager", "generate"])
def test_answers_stay_right_in_bfloat16(tmp_path, driver):
    outcome = run_experiment(
        ExperimentConfig(
            model=ModelConfig(name="tiny", name_or_path="builtin:tiny", default_max_new_tokens=96),
            dataset=DatasetConfig(verifier="arithmetic", num_prompts=256),
            driver=DriverConfig(name=driver),
            tracking=TrackingConfig(mode="disabled"),
            num_rounds=1,
        ),
        tmp_path / "run",
        [],
    )
    assert outcome.status == "completed", outcome.message
    assert outcome.summary["dtype"] == "bfloat16"
    assert outcome.summary["accuracy"] >= 0.95
    assert outcome.summary["peak_memory_gb"] > 0
