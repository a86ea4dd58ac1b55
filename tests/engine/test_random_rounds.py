"""Random rounds in random settings, ended or interrupted: what comes out always equals `generate`, or a start of it."""

from __future__ import annotations

import random

import pytest

MAX_NEW = 24


class InterruptedDriveError(Exception):
    pass


def draw_round(rng):
    """Prompts with shared starts, a limit for each, and how many generations."""
    bases = [[rng.randrange(97) for _ in range(rng.randint(1, 50))] for _ in range(rng.randint(1, 4))]
    prompts = [base[: rng.randint(1, len(base))] for base in bases for _ in range(rng.randint(1, 3))]
    return prompts, [rng.randint(1, MAX_NEW) for _ in prompts], rng.choice([1, 2, 5])


def draw_settings(rng, longest):
    settings = {
        "page_size": rng.choice([4, 8, 16]),
        "max_batch_tokens": rng.choice([3, 8, 32, 256]),
        "max_requests_per_batch": rng.choice([None, 1, 4]),
        "scheduler": rng.choice(["fifo", "prefill_first"]),
        "allow_block_sharing": rng.random() < 0.5,
    }
    if rng.random() < 0.7:
        settings["num_blocks"] = rng.choice([2, 3]) * (longest // settings["page_size"] + 1) + 4
    return settings


@pytest.mark.parametrize("seed", range(30))
def test_a_random_round(shared_model, make_driver, reference, seed):
    rng = random.Random(seed)
    family = ("qwen3", "gemma2", "gemma3", "mistral", "gpt_oss")[seed % 5]
    prompts, limits, num_generations = draw_round(rng)
    interrupted_at = rng.choice([None, rng.randint(0, 15)])

    def on_step(index, info):
        if index == interrupted_at:
            raise InterruptedDriveError

    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    driver = make_driver(shared_model(family), on_step=on_step, **draw_settings(rng, longest))
    for _ in range(2):
        request_ids = driver.add_requests(prompts, max_new_tokens=limits, num_generations=num_generations)
        try:
            completions = driver.drive_until_empty()
            assert {c.finish_reason for c in completions.values()} == {"length"}
        except InterruptedDriveError:
            completions = driver.partial_completions
        assert list(completions) == request_ids
        for index, completion in enumerate(completions.values()):
            group = index // num_generations
            expected = reference(family, prompts[group], MAX_NEW)[: limits[group]]
            if completion.finish_reason == "failed":
                expected = expected[: len(completion)]
            assert completion.completion_ids == expected
