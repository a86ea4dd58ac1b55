"""Whole drives with compiled decode steps on a CPU: tokens of `generate`, few programs, no copy of the cache."""

from __future__ import annotations

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cbexp.engine import CBSyncConfig, EngineError, SyncCBDriver
from cbexp.engine.step_loop import StepLoop
from tests.engine.driving import drive

NUM_NEW = 20
GEMMA3 = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def build_driver(model, **changes):
    """Two buckets, neither of which is a program of its own."""
    settings = {"compile_mode": "default", "fusion": "none", "max_new_tokens": NUM_NEW, "page_size": 8}
    settings |= {"num_blocks": 80, "buckets": (2, 4), "max_batch_tokens": 256}
    return SyncCBDriver(model, None, CBSyncConfig(**(settings | changes)))


def programs_and_recompiles(driver):
    stats = driver.compile_stats
    assert stats["graph_breaks"] == 0
    return stats["programs"], stats["recompiles"]


@pytest.mark.parametrize(
    ("family", "changes", "region", "num_programs"),
    [
        ("gemma3", GEMMA3, "model", 1),
        ("gemma3", GEMMA3, "layer", 2),
        ("gpt_oss", {"num_hidden_layers": 1}, "model", 1),
        ("qwen3_moe", {"num_hidden_layers": 1}, "model", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families_compile_whole_and_copy_no_cache(
    new_model, prompts, greedy, family, changes, region, num_programs
):
    """Sliding and full layers share one allocation: to a compiler that saw it twice they would be aliases."""
    model = new_model(family, **changes)
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    num_blocks = 200_000 // model.config.num_hidden_layers  # 200 MB
    with build_driver(model, compile_region=region, num_blocks=num_blocks) as driver:
        driver.warmup()
        for _ in range(2):
            assert drive(driver, prompts) == expected
        assert programs_and_recompiles(driver) == (num_programs, 0)
        cache = driver._slot._engine._cache.cache_tensor
        step_s = min(driver.time_decode_steps(4, 60, 10, num_bursts=5))
        copy_s = min(time_of(cache.clone) for _ in range(5))
        assert step_s < copy_s / 2, f"a step takes {step_s:.4f} s, a copy of the cache {copy_s:.4f} s"


def time_of(function):
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


class Life:
    """A model and a driver with a crowded cache, chunked prompts, shared blocks and an EOS that some requests reach."""

    def __init__(self, model, prompts, greedy, mode, region):
        self.model, self.prompts, self._greedy = model, prompts, greedy
        self._limits = [30, 1, 17, 30, 30, 9, 25]
        tokens = greedy(model, prompts[4], 30)
        self.eos = next(token for token in tokens[8:] if token not in tokens[:8])
        self.driver = build_driver(
            model,
            compile_mode=mode,
            compile_region=region,
            eos_token_id=self.eos,
            max_new_tokens=30,
            max_batch_tokens=24,
            num_blocks=14,
            allow_block_sharing=True,
            buckets=(2, 5),
        )

    def expected(self, num_generations=1):
        pairs = zip(self.prompts, self._limits, strict=True)
        completions = [self._greedy(self.model, prompt, limit, (self.eos,)) for prompt, limit in pairs]
        return [completion for completion in completions for _ in range(num_generations)]

    def drive(self, num_generations=1):
        return drive(self.driver, self.prompts, max_new_tokens=self._limits, num_generations=num_generations)

    def check_a_round(self, num_generations=1):
        assert self.drive(num_generations) == self.expected(num_generations)
        assert not self.driver._slot._engine.read_trash.any()
        assert self.driver._slot._engine.num_referenced_blocks == 0


@pytest.fixture(
    scope="module",
    params=[("default", "model"), ("max-autotune-no-cudagraphs", "layer")],
    ids=lambda choice: choice[0],
)
def life(request, new_model, prompts, greedy):
    life = Life(new_model("qwen3"), prompts, greedy, *request.param)
    yield life
    life.driver.close()


def test_every_pressure_at_once(life):
    """Batch sizes between buckets, chunks, forks, evictions, early ends: all from one program."""
    steps = []
    for num_generations in (1, 3):
        life.check_a_round(num_generations)
        steps += life.driver.steps
    assert {step.bucket for step in steps} == {None, 2, 5}
    assert {step.num_requests for step in steps if step.bucket == 5} & {3, 4}
    assert any(step.bucket is None and step.kind == "decode" for step in steps), "nobody was evicted"
    assert any(tokens[-1] == life.eos for tokens in life.expected())
    assert programs_and_recompiles(life.driver) == (1, 0)


def test_a_round_after_an_error_in_the_middle_of_a_burst(life, monkeypatch):
    original, calls = StepLoop.run, []

    def fail_in_second(runner, bucket, num_steps):
        calls.append(1)
        if len(calls) == 2:
            original(runner, bucket, max(1, num_steps // 2))
            raise ArithmeticError("in the middle")
        original(runner, bucket, num_steps)

    life.check_a_round()
    before = programs_and_recompiles(life.driver)
    monkeypatch.setattr(StepLoop, "run", fail_in_second)
    with pytest.raises(ArithmeticError):
        life.drive()
    for completion, tokens in zip(life.driver.partial_completions.values(), life.expected(), strict=True):
        assert completion.completion_ids == tokens[: len(completion)]
    life.check_a_round()
    assert programs_and_recompiles(life.driver) == before


def test_no_recompile_over_what_trainers_do(life):
    """Inference mode, gradient checkpointing, train mode, a backward pass, new values, other gradient flags."""
    life.check_a_round()
    before = programs_and_recompiles(life.driver)
    with torch.inference_mode():
        life.check_a_round()
    model = life.model
    model.activation_checkpointing_enable()
    model.train()
    model.model.layers[0].requires_grad_(False)
    inputs = torch.tensor([life.prompts[-1]])
    model(input_ids=inputs, labels=inputs).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    tokens = life.drive()
    assert model.training
    assert model.is_activation_checkpointing
    model.eval()
    model.activation_checkpointing_disable()
    assert tokens == life.expected()
    model.requires_grad_(True)
    life.check_a_round()
    assert programs_and_recompiles(life.driver) == before


@pytest.mark.parametrize("fusion", ["none", "projections"])
def test_an_adapter_is_switched_between_rounds(new_model, prompts, greedy, fusion):
    """Off and on again, with blocks shared within a round: keys and values of one policy never serve another."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    model = get_peft_model(new_model("qwen3", num_hidden_layers=1), LoraConfig(**settings)).eval()
    driver = build_driver(
        model, compile_region="layer", fusion=fusion, allow_block_sharing=True, buckets=(4,)
    )

    def check():
        expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
        assert drive(driver, prompts) == expected
        assert driver.compile_stats["programs"] > 0
        assert driver.compile_stats["recompiles"] == 0
        return expected

    with driver:
        attached = check()
        with model.disable_adapter():
            plain = check()
        assert check() == attached != plain
        assert driver.resolved["fusion"] == fusion


def test_code_that_cannot_be_traced_is_named_with_the_mode_and_the_reason(new_model, prompts, greedy):
    model = new_model("qwen3", num_hidden_layers=1)
    mlp = type(model.model.layers[0].mlp).forward

    def look_at_values(hidden):
        if float(hidden.sum()) > 1e9:
            raise OverflowError
        return mlp(model.model.layers[0].mlp, hidden)

    model.model.layers[0].mlp.forward = look_at_values
    with build_driver(model) as driver:
        for attempt in (driver.warmup, lambda: drive(driver, prompts)):
            with pytest.raises(
                EngineError, match=r"default cannot compile the decode step of [24] rows: .*(item|float|data)"
            ):
                attempt()
    with build_driver(model, compile_mode=None) as driver:
        assert drive(driver, prompts) == [greedy(model, prompt, NUM_NEW) for prompt in prompts]
