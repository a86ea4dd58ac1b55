"""Whole drives on forwards that are not the model's own code in the engine's attention: the tokens are the same."""

from __future__ import annotations

import pytest
import torch

from cbexp.engine import EngineError
from cbexp.engine.decode.step import EagerSteps
from tests.engine.driving import drive


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_the_models_own_attention_takes_transformers_steps(
    shared_model, make_driver, prompts, reference, family
):
    model = shared_model(family)
    own = model.config._attn_implementation
    driver = make_driver(model, attn_implementation=own, max_batch_tokens=24, num_blocks=60)
    expected = [reference(family, prompt, 12) for prompt in prompts for _ in range(2)]
    assert drive(driver, prompts, num_generations=2) == expected
    assert {(step.num_steps, step.bucket) for step in driver.steps} == {(1, None)}
    assert "mixed" in {step.kind for step in driver.steps}
    assert driver.resolved["attn_implementation"] == own
    assert driver.compile_stats == {}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_fused_projections_say_the_same(new_model, make_driver, prompts, greedy, family):
    """Over rounds between which weights are written in place and re-assigned; modules come back as they were."""
    model = new_model(family)
    forwards = [name for name, module in model.named_modules() if "forward" in vars(module)]
    driver = make_driver(model, fusion="projections", num_blocks=80)
    for _ in range(2):
        expected = [greedy(model, prompt, 12) for prompt in prompts]
        assert drive(driver, prompts) == expected
        assert [n for n, module in model.named_modules() if "forward" in vars(module)] == forwards
        with torch.no_grad():
            attention = model.model.layers[0].self_attn
            attention.k_proj.weight = torch.nn.Parameter(attention.k_proj.weight * 0.5)
            model.lm_head.weight.mul_(-1)
    assert driver.resolved["fusion"] == "projections"
    assert driver.resolved["fused_projections"]["num_fused"] == 2 * len(model.model.layers)


def test_a_step_that_computes_something_else_ends_the_run(
    new_model, make_driver, prompts, greedy, monkeypatch
):
    """In warmup, and in a drive without one; with the check off, nobody notices."""
    original = EagerSteps.run

    def run_wrongly(runner, bucket, num_steps):
        original(runner, bucket, num_steps)
        if bucket == 2:
            runner._buffers.token_ids.add_(1)

    model, settings = new_model("qwen3"), {"fusion": "projections", "max_requests_per_batch": 2}
    monkeypatch.setattr(EagerSteps, "run", run_wrongly)
    driver = make_driver(model, num_blocks=64, **settings)
    with pytest.raises(EngineError, match="Self-check of compile mode eager, batch of 2 rows"):
        driver.warmup()
    driver.add_requests(prompts)
    with pytest.raises(EngineError, match="batch of 2 rows: the rows did not advance"):
        driver.drive_until_empty()
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    careless = make_driver(model, num_blocks=64, max_burst=1, self_check=False, **settings)
    assert [len(tokens) for tokens in drive(careless, prompts)] == [12] * 7
    monkeypatch.setattr(EagerSteps, "run", original)
    assert drive(driver, prompts) == expected
