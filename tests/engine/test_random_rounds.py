"""Random rounds in random settings, ended or interrupted, and thousands of requests: always what `generate` says."""

import gc
import random

import psutil
import pytest

from tests.engine.driving import check_cache_at_rest, drive

FAMILIES = ("qwen3", "gemma2", "gemma3", "mistral", "gpt_oss")
MAX_NEW = 24
QUICK_SEEDS = range(1, 11)
SEEDS = [pytest.param(seed, marks=() if seed in QUICK_SEEDS else pytest.mark.slow) for seed in range(60)]


class InterruptedDriveError(Exception):
    pass


def draw_round(rng):
    """Prompts with shared starts, a limit for each, and how many generations."""
    bases = [[rng.randrange(97) for _ in range(rng.randint(1, 50))] for _ in range(rng.randint(1, 4))]
    prompts = [base[: rng.randint(1, len(base))] for base in bases for _ in range(rng.randint(1, 3))]
    return prompts, [rng.randint(1, MAX_NEW) for _ in prompts], rng.choice([1, 2, 5])


def draw_settings(rng, longest, own_attention):
    settings = {
        "page_size": rng.choice([4, 8, 16]),
        "max_batch_tokens": rng.choice([3, 8, 32, 256]),
        "max_requests_per_batch": rng.choice([None, 1, 4]),
        "scheduler": rng.choice(["fifo", "prefill_first"]),
        "allow_block_sharing": rng.random() < 0.5,
        "eos_token_id": rng.sample(range(97), rng.choice([0, 5])),
    }
    if rng.random() < 0.7:
        settings["num_blocks"] = rng.choice([2, 3]) * (longest // settings["page_size"] + 1) + 4
    if rng.random() < 0.2:
        return settings | {"attn_implementation": own_attention}  # every step is one of transformers'
    settings["max_burst"] = rng.choice([1, 5, 128])
    settings["batch_shape"] = rng.choice(["natural", "buckets", "full"])
    return settings | {"fusion": rng.choice(["none", "projections"])}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_round(shared_model, make_driver, references, seed):
    rng, family = random.Random(seed), FAMILIES[seed % len(FAMILIES)]
    prompts, limits, num_generations = draw_round(rng)
    interrupted_at = rng.choice([None, rng.randint(0, 15)])

    def on_step(index, info):
        if index == interrupted_at:
            raise InterruptedDriveError

    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    model = shared_model(family)
    settings = draw_settings(rng, longest, model.config._attn_implementation)
    driver = make_driver(model, on_step=on_step, **settings)
    expected = references(family, prompts, limits, settings["eos_token_id"], num_generations)
    for _ in range(2):
        request_ids = driver.add_requests(prompts, max_new_tokens=limits, num_generations=num_generations)
        try:
            completions = driver.drive_until_empty()
            assert {c.finish_reason for c in completions.values()} <= {"length", "eos"}
        except InterruptedDriveError:
            completions = driver.partial_completions
        check_cache_at_rest(driver)
        assert list(completions) == request_ids
        for completion, tokens in zip(completions.values(), expected, strict=True):
            has_failed = completion.finish_reason == "failed"
            assert completion.completion_ids == (tokens[: len(completion)] if has_failed else tokens)


@pytest.mark.parametrize(
    ("num_rounds", "num_prompts"), [(3, 150), pytest.param(8, 1250, marks=pytest.mark.slow)]
)
def test_nothing_is_kept_of_thousands_of_requests(new_model, make_driver, greedy, num_rounds, num_prompts):
    """Each is served, and leaves neither blocks in the cache nor objects in memory."""
    rng, eos = random.Random(0), 5
    starts = [[rng.randrange(97) for _ in range(16)] for _ in range(20)]
    model = new_model("qwen3", num_hidden_layers=1)
    settings = {"max_requests_per_batch": 64, "num_blocks": 150, "max_batch_tokens": 512}
    driver = make_driver(model, eos_token_id=eos, allow_block_sharing=True, **settings)
    in_use = []
    for _ in range(num_rounds):
        prompts = [
            [*(rng.choice(starts) if rng.random() < 0.3 else []), *(rng.randrange(97) for _ in range(24))]
            for _ in range(num_prompts)
        ]
        prompts = [prompt[: rng.randint(1, 24)] for prompt in prompts]
        limits = [rng.randint(1, 12) for _ in prompts]
        tokens = drive(driver, prompts, max_new_tokens=limits)
        for index in rng.sample(range(num_prompts), 10):
            assert tokens[index] == greedy(model, prompts[index], limits[index], (eos,))
        assert any(step.kind == "decode" and step.bucket is None for step in driver.steps), (
            "nobody was evicted"
        )
        check_cache_at_rest(driver)
        del prompts, limits, tokens
        driver._steps.clear()
        gc.collect()
        in_use.append((len(gc.get_objects()), psutil.Process().memory_info().rss / 2**20))
    # The first round fills caches. A request that left an object would show, and of 1250 one that left a kibibyte.
    (objects, mib), (objects_after, mib_after) = in_use[1], in_use[-1]
    assert objects_after - objects < num_prompts
    assert mib_after - mib < 8
