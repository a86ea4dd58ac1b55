"""Ten thousand requests through one driver: each served, nothing of them kept, neither in the cache nor in memory."""

from __future__ import annotations

import gc
import random

import psutil

NUM_ROUNDS, PROMPTS_PER_ROUND = 8, 1250
MAX_PROMPT, MAX_NEW = 24, 12


def draw_prompts(rng):
    """Some share their starts; lengths and limits are random."""
    starts = [[rng.randrange(97) for _ in range(16)] for _ in range(20)]
    prompts = []
    for _ in range(PROMPTS_PER_ROUND):
        length = rng.randint(1, MAX_PROMPT)
        start = rng.choice(starts) if rng.random() < 0.3 else []
        prompts.append([*start, *(rng.randrange(97) for _ in range(MAX_PROMPT))][:length])
    return prompts, [rng.randint(1, MAX_NEW) for _ in prompts]


def memory_in_use():
    """Python objects alive, and MiB of the process."""
    gc.collect()
    return len(gc.get_objects()), psutil.Process().memory_info().rss / 2**20


def test_ten_thousand_requests(new_model, make_driver, greedy):
    rng, eos = random.Random(0), 5
    model = new_model("qwen3", num_hidden_layers=1)
    driver = make_driver(
        model,
        max_requests_per_batch=64,
        num_blocks=150,
        max_batch_tokens=512,
        eos_token_id=eos,
        allow_block_sharing=True,
    )
    reasons, kinds, in_use = set(), set(), []
    for _ in range(NUM_ROUNDS):
        prompts, limits = draw_prompts(rng)
        request_ids = driver.add_requests(prompts, max_new_tokens=limits)
        completions = driver.drive_until_empty()
        assert list(completions) == request_ids
        rows = list(zip(prompts, limits, completions.values(), strict=True))
        for prompt, limit, completion in rng.sample(rows, 10):
            assert completion.completion_ids == greedy(model, prompt, limit, (eos,))
        reasons |= {completion.finish_reason for completion in completions.values()}
        kinds |= {(step.kind, step.bucket is None) for step in driver.steps}
        engine = driver._slot._engine
        assert (engine.num_referenced_blocks, engine.cache_used_fraction) == (0, 0)
        assert not engine.read_trash.any()
        del completions, rows, completion
        driver._steps.clear()
        in_use.append(memory_in_use())
    assert reasons == {"eos", "length"}
    assert ("decode", True) in kinds, "nobody was evicted"
    # The first round fills caches. A request that left one object, or a kibibyte, would show.
    (objects, mib), (objects_after, mib_after) = in_use[1], in_use[-1]
    assert objects_after - objects < PROMPTS_PER_ROUND
    assert mib_after - mib < 8
