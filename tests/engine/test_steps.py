"""Step records, callbacks and request times."""

from __future__ import annotations

import pytest


def test_each_step_is_recorded_and_reported(shared_model, make_driver, make_prompts):
    reported = []
    driver = make_driver(
        shared_model("qwen3"),
        num_blocks=64,
        max_batch_tokens=16,
        on_step=lambda index, info: reported.append((index, info)),
    )
    driver.add_requests(make_prompts((10, 20)), max_new_tokens=[3, 4])
    driver.drive_until_empty()
    assert [info for _, info in reported] == driver.steps
    # Ten tokens of one and six of the other; its other 14; then what is left of each, in one burst.
    assert [(s.kind, s.num_requests, s.num_steps, s.num_tokens, s.num_finished) for s in driver.steps] == [
        ("prefill", 2, 1, 16, 0),
        ("prefill", 1, 1, 14, 0),
        ("decode", 2, 3, 2 + 3, 2),
    ]
    assert [(s.bucket, s.num_padding) for s in driver.steps] == [(None, 0), (None, 0), (2, 1)]
    assert all(s.start_s < s.end_s for s in driver.steps)
    assert driver.steps[0].cache_used_fraction == pytest.approx((2 + 1) / 64)
    assert driver.steps[-1].cache_used_fraction == pytest.approx((2 + 3) / 64)


def test_step_indices_count_over_the_drivers_life_and_steps_over_a_drive(shared_model, make_driver, prompts):
    """A burst counts all of its steps."""
    indices = []
    driver = make_driver(shared_model("qwen3"), on_step=lambda index, info: indices.append(index))
    for _ in range(3):
        driver.add_requests(prompts, max_new_tokens=4)
        driver.drive_until_empty()
        assert [step.num_steps for step in driver.steps] == [1, 3]
    assert indices == [0, 1, 4, 5, 8, 9]


def test_waiting_requests_are_counted(shared_model, make_driver, make_prompts):
    driver = make_driver(shared_model("qwen3"), max_requests_per_batch=1, num_blocks=64)
    driver.add_requests(make_prompts((5, 5, 5)), max_new_tokens=2)
    driver.drive_until_empty()
    assert [step.num_waiting for step in driver.steps] == [2, 2, 1, 1, 0, 0]


def check_times(completions):
    for completion in completions:
        times = completion.timings
        assert times.submitted_s < times.scheduled_s < times.first_token_s <= times.finished_s


def test_times_of_a_request_are_in_order(shared_model, make_driver, prompts):
    driver = make_driver(shared_model("qwen3"))
    driver.add_requests(prompts, num_generations=2)
    completions = list(driver.drive_until_empty().values())
    check_times(completions)
    assert {c.timings.finished_s for c in completions} == {driver.steps[-1].end_s}
    assert {c.timings.scheduled_s for c in completions[2::2]} == {driver.steps[0].start_s}


def test_times_survive_eviction(shared_model, make_driver, prompts):
    """Whoever was admitted at first keeps the times of its first life, though it was evicted and read again."""
    driver = make_driver(shared_model("qwen3"), num_blocks=20)
    driver.add_requests(prompts)
    completions = list(driver.drive_until_empty().values())
    check_times(completions)
    in_first_step = [c for c in completions if c.timings.scheduled_s == driver.steps[0].start_s]
    assert len(in_first_step) == driver.steps[0].num_requests
    assert {c.timings.first_token_s for c in in_first_step} == {driver.steps[0].end_s}
    assert max(step.num_waiting for step in driver.steps[1:]) > driver.steps[0].num_waiting, (
        "nobody was evicted"
    )
