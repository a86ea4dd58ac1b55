"""Sector 0 of the cache, which transformers' padding reads, is zero bit for bit after every kind of run."""

from __future__ import annotations

import pytest

from cbexp.engine.step_loop import StepLoop

RUNS = {
    "natural batches": {"batch_shape": "natural"},
    "padding": {"buckets": (16,)},
    "always full": {"batch_shape": "full", "max_requests_per_batch": 24},
    "single steps": {"max_burst": 1},
    "chunks": {"max_batch_tokens": 5},
    "eviction": {"num_blocks": 20},
    "shared blocks": {"allow_block_sharing": True},
    "early ends": {"eos_token_id": tuple(range(0, 97, 7))},
    "fused projections, checked": {"fusion": "projections"},
    "few rows": {"max_requests_per_batch": 2, "scheduler": "prefill_first"},
    "transformers' own steps": {"attn_implementation": "sdpa"},
    "transformers' own steps, crowded": {"attn_implementation": "sdpa", "num_blocks": 20},
}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_the_read_trash_stays_zero(new_model, shared_model, make_driver, prompts, family, settings):
    # Fusing moves weights, so not on a model that others use.
    model = (new_model if "fusion" in settings else shared_model)(family)
    driver = make_driver(model, **({"num_blocks": 120} | settings))
    driver.warmup()
    for num_generations in (1, 3):
        driver.add_requests(prompts, num_generations=num_generations)
        driver.drive_until_empty()
    require_zero(driver)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_it_stays_zero_when_a_burst_breaks_off_and_when_steps_are_timed(
    shared_model, make_driver, prompts, family, monkeypatch
):
    driver = make_driver(shared_model(family), num_blocks=80, max_requests_per_batch=8)
    driver.time_decode_steps(batch=8, context=30, num_steps=4, num_bursts=2)
    require_zero(driver)
    original = StepLoop.run

    def break_off(runner, bucket, num_steps):
        original(runner, bucket, num_steps // 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(StepLoop, "run", break_off)
    driver.add_requests(prompts)
    with pytest.raises(KeyboardInterrupt):
        driver.drive_until_empty()
    require_zero(driver)


def require_zero(driver):
    trash = driver._slot._engine.read_trash
    assert trash.numel() > 0
    assert not trash.any()
