"""What the driver of `generate` sees of its steps, with worked numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cbexp.drivers.generate import GenerateDriver, _describe_steps, _trim_at_end
from tests.drivers.conftest import make_config


@pytest.mark.parametrize(
    ("token_ids", "limit", "eos", "kept", "has_ended"),
    [
        ([5, 6, 7], 3, (), (5, 6, 7), True),
        ([5, 6, 7], 2, (), (5, 6), True),
        ([5, 6], 3, (), (5, 6), False),
        ([5, 9, 9, 0], 4, (9,), (5, 9), True),
        ([5, 6, 9], 2, (9,), (5, 6), True),
        ([9], 4, (8, 9), (9,), True),
        ([], 4, (9,), (), False),
    ],
)
def test_trim_at_end(token_ids, limit, eos, kept, has_ended):
    assert _trim_at_end(token_ids, limit, eos) == (kept, has_ended)


def test_steps_of_a_batch():
    # Prompts of 2 and 5 tokens; completions of 1 and 3; four steps ran, since another limit would have been 4.
    times = [(0.0, 1.0), (1.0, 1.5), (1.5, 2.0), (2.0, 2.25)]
    steps = _describe_steps(times, prompt_lengths=[2, 5], completion_lengths=[1, 3], num_waiting=6)
    assert [step.kind for step in steps] == ["prefill", "decode", "decode", "decode"]
    assert [step.num_requests for step in steps] == [2, 1, 1, 0]
    assert [step.num_tokens for step in steps] == [7, 1, 1, 0]
    assert [step.num_padding for step in steps] == [3, 1, 1, 2]
    assert [step.num_finished for step in steps] == [1, 0, 1, 0]
    assert [step.duration_s for step in steps] == [1.0, 0.5, 0.5, 0.25]
    assert {(step.num_steps, step.num_waiting, step.bucket) for step in steps} == {(1, 6, None)}


def test_steps_of_a_drive_add_up(qwen3, prompts):
    driver = GenerateDriver(qwen3, make_config(max_requests_per_batch=4))
    driver.add_requests(prompts, max_new_tokens=[1, 2, 3, 4, 5, 6])
    completions = driver.drive_until_empty().values()
    steps = driver.steps
    assert [step.kind for step in steps].count("prefill") == 2
    assert len(steps) == 4 + 6
    assert sum(step.num_finished for step in steps) == 6
    assert [step.num_waiting for step in steps] == [2] * 4 + [0] * 6
    prefilled = sum(step.num_tokens for step in steps if step.kind == "prefill")
    decoded = sum(step.num_tokens for step in steps if step.kind == "decode")
    assert prefilled == sum(map(len, prompts))
    assert decoded == sum(map(len, completions)) - 6  # the first token of each comes from the prefill
    assert all(a.start_s < a.end_s <= b.start_s for a, b in pairwise(steps))
    driver.add_requests(prompts[:1], max_new_tokens=2)
    driver.drive_until_empty()
    assert len(driver.steps) == 2
