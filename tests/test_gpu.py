"""On a CUDA device: every driver gives `generate`'s tokens in float32, and the embedded model its answers in bf16."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import cbexp
from cbexp.config import (
    DatasetConfig,
    DriverConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
    TrackingConfig,
)
from cbexp.dataset.arithmetic import build_questions, verify_answer
from cbexp.drivers.generate import GenerateDriver
from cbexp.drivers.manager import ManagerDriver
from cbexp.drivers.registry import DRIVERS
from cbexp.engine import CBSyncConfig, SyncCBDriver
from cbexp.engine.types import COMPILE_MODES
from cbexp.experiment import run_experiment

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
    config = CBSyncConfig(max_new_tokens=NEW_TOKENS, eos_token_id=(), pad_token_id=0, **BATCH)
    if kind == "sync":
        return SyncCBDriver(model, config=config)
    if kind == "generate":
        return GenerateDriver(model, config)
    mode = DRIVERS["manager"].auto_mode("cuda", model.config._attn_implementation)
    return ManagerDriver(model, dataclasses.replace(config, compile_mode=mode))


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
    assert 1e10 < outcome.summary["bandwidth_bytes_per_s"] < 2e13
    fraction = outcome.summary["roofline_fraction"]
    # The manager does not see its steps.
    assert fraction is None if driver == "manager" else 0 < fraction < 1.05


def test_decoding_comes_near_the_roofline_and_not_beyond_it(tmp_path):
    """1.8 GB of weights in a few wide layers, so that a step is mostly reading."""
    architecture = {
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    outcome = run_experiment(
        ExperimentConfig(
            model=ModelConfig(name="wide", init="random", architecture=architecture),
            dataset=DatasetConfig(
                kind="synthetic", name="synthetic", num_prompts=8, min_length=100, max_length=100
            ),
            sampling=SamplingConfig(max_new_tokens=128, ignore_eos=True),
            tracking=TrackingConfig(mode="disabled"),
            num_rounds=2,
        ),
        tmp_path / "run",
        [],
    )
    assert outcome.status == "completed", outcome.message
    summary = outcome.summary
    assert 1e10 < summary["bandwidth_bytes_per_s"] < 2e13
    assert 0.2 < summary["roofline_fraction"] < 1.05
    assert 0 <= summary["device_idle_share"] < 1


class Arithmetic:
    """The embedded model in bf16, and 1,000 questions that it was not trained on."""

    def __init__(self, num_questions=1000, device="cuda"):
        folder = Path(cbexp.__file__).parent / "assets" / "tiny"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._questions = build_questions(num_questions, seed=7, split="heldout")
        chats = [[{"role": "user", "content": question.text}] for question in self._questions]
        self._prompts = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=False
        )

    def measure(self, **settings):
        """Percentage of right answers, and what compiling came to."""
        asked = {"max_new_tokens": 96, "page_size": 32, "num_blocks": 2000, "buckets": (64, 256)} | settings
        with SyncCBDriver(self.model, config=CBSyncConfig(**asked)) as driver:
            driver.add_requests(self._prompts)
            completions = driver.drive_until_empty().values()
            stats = driver.compile_stats
        texts = self._tokenizer.batch_decode([list(c) for c in completions], skip_special_tokens=True)
        pairs = zip(texts, self._questions, strict=True)
        num_right = sum(verify_answer(text, question.answer) for text, question in pairs)
        return 100 * num_right / len(self._questions), stats


@pytest.fixture(scope="module")
def arithmetic():
    return Arithmetic()


@pytest.fixture(scope="module")
def plain_accuracy(arithmetic):
    """Of the model's own code, run eagerly."""
    percentage, _ = arithmetic.measure(fusion="none")
    assert percentage > 95
    return percentage


# By default decoder layers run fused.
MODES = {mode: {"compile_mode": mode} for mode in COMPILE_MODES} | {
    "cuda_graph, nothing fused": {"compile_mode": "cuda_graph", "fusion": "none"}
}


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_accuracy_in_bfloat16_is_that_of_eager_in_every_mode(arithmetic, plain_accuracy, settings):
    percentage, stats = arithmetic.measure(**settings)
    assert abs(percentage - plain_accuracy) <= 0.5
    for name in ("max_logprob_error", "max_logit_error"):
        assert stats[name] is not None, "the self-check has not run"
    assert (stats["recompiles"], stats["graph_breaks"], stats["skipped_cudagraphs"]) == (0, 0, 0)
