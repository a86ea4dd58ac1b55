"""The paged cache between drives: nothing referenced, its read trash zero, nothing of old weights reused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from cbexp.engine.paged_engine import PagedEngine


@pytest.fixture
def watch_ends(monkeypatch):
    """What the cache holds at the end of each drive, before it is reset."""
    ends = []

    def reset(engine, original=PagedEngine.reset):
        ends.append((engine.num_referenced_blocks, engine.cache_used_fraction, engine.read_trash.clone()))
        original(engine)

    monkeypatch.setattr(PagedEngine, "reset", reset)
    return ends


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gemma3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 20}, {"allow_block_sharing": True}], ids=str)
def test_the_cache_is_empty_and_its_read_trash_zero(
    shared_model, make_driver, prompts, watch_ends, family, settings
):
    driver = make_driver(shared_model(family), **settings)
    for num_generations in (1, 3):
        driver.add_requests(prompts, num_generations=num_generations)
        driver.drive_until_empty()
    assert len(watch_ends) == 2
    for num_referenced, used_fraction, read_trash in watch_ends:
        assert num_referenced == 0
        assert used_fraction == pytest.approx(0, abs=1e-9)
        assert read_trash.numel() > 0
        assert not read_trash.any()


def test_a_weight_change_between_rounds_counts(new_model, make_driver, prompts, greedy):
    """With block sharing, keys and values of the old weights must not serve the new ones."""
    model = new_model("qwen3")
    driver = make_driver(model, allow_block_sharing=True, num_blocks=128)
    driver.add_requests(prompts, num_generations=2)
    before = list(driver.drive_until_empty().values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    driver.add_requests(prompts, num_generations=2)
    after = list(driver.drive_until_empty().values())
    expected = [greedy(model, prompt, 12) for prompt in prompts for _ in range(2)]
    assert [c.completion_ids for c in after] == expected
    assert [c.completion_ids for c in before] != expected


def test_a_cache_that_cannot_fit_names_what_to_lower(shared_model, make_driver):
    with pytest.raises(MemoryError, match="lower num_blocks, max_batch_tokens or max_requests_per_batch"):
        make_driver(shared_model("qwen3"), num_blocks=10**9)


def test_close_frees_the_cache(new_model, make_driver, prompts):
    driver = make_driver(new_model("qwen3"), num_blocks=64)
    driver.add_requests(prompts)
    driver.drive_until_empty()
    cache = weakref.ref(driver._slot._engine._cache)
    assert cache() is not None
    driver.close()
    gc.collect()
    assert cache() is None


def test_step_time_does_not_grow_with_the_cache(shared_model, make_driver, make_prompts):
    """A step that copied or scanned the cache would: 250 times the blocks may not take three times as long."""
    medians = []
    for num_blocks in (16, 4000):
        driver = make_driver(shared_model("qwen3"), num_blocks=num_blocks, max_new_tokens=60)
        driver.add_requests(make_prompts((20,)))
        driver.drive_until_empty()
        durations = sorted(step.duration_s for step in driver.steps if step.kind == "decode")
        medians.append(durations[len(durations) // 2])
    assert medians[1] < 3 * medians[0]


def test_a_round_of_one_page_has_room_for_the_self_check(shared_model, make_driver, prompts, greedy):
    model = shared_model("qwen3")
    driver = make_driver(model, fusion="projections", page_size=64, num_blocks=None)
    driver.add_requests([prompts[0][:5]], max_new_tokens=3)
    (completion,) = driver.drive_until_empty().values()
    assert tuple(completion) == greedy(model, prompts[0][:5], 3)
    assert driver.resolved["self_check_results"]


@pytest.mark.parametrize("num_blocks", [None, 60])
def test_another_dtype_between_rounds_gets_another_cache(new_model, make_driver, prompts, greedy, num_blocks):
    model = new_model("qwen3")
    driver = make_driver(model, num_blocks=num_blocks)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        driver.add_requests(prompts[:2], max_new_tokens=4)
        tokens = [tuple(c) for c in driver.drive_until_empty().values()]
        assert tokens == [greedy(model, prompt, 4) for prompt in prompts[:2]]
