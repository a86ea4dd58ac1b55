"""Several generations of a prompt: forked or read again, shared blocks or copied, always all of them, side by side."""

from __future__ import annotations

import pytest

NUM_NEW = 10


@pytest.fixture(params=["qwen3", "gemma2", "mistral"])
def family(request):
    return request.param


@pytest.fixture
def check(make_driver, shared_model, reference):
    """Drive `num_generations` of each prompt; each must equal `generate`. Returns the driver."""

    def run(family, prompts, num_generations, rounds=1, **settings):
        driver = make_driver(shared_model(family), max_new_tokens=NUM_NEW, **settings)
        for _ in range(rounds):
            request_ids = driver.add_requests(prompts, num_generations=num_generations)
            assert len(set(request_ids)) == len(prompts) * num_generations
            completions = driver.drive_until_empty()
            assert list(completions) == request_ids
            for index, completion in enumerate(completions.values()):
                prompt = prompts[index // num_generations]
                assert completion.prompt_ids == tuple(prompt)
                assert completion.completion_ids == reference(family, prompt, NUM_NEW)
                assert completion.finish_reason == "length"
        return driver

    return run


@pytest.mark.parametrize("allow_block_sharing", [False, True])
def test_every_generation_is_there_and_right(check, family, prompts, allow_block_sharing):
    driver = check(family, prompts, 4, rounds=2, allow_block_sharing=allow_block_sharing)
    assert driver.resolved["block_sharing"] == (allow_block_sharing and family == "qwen3")


def test_shared_blocks_take_less_of_the_cache(check, make_prompts):
    prompts = make_prompts((40, 56))
    copied, shared = (
        max(
            step.cache_used_fraction for step in check("qwen3", prompts, 6, allow_block_sharing=sharing).steps
        )
        for sharing in (False, True)
    )
    assert shared < 0.6 * copied


def test_a_prompt_is_read_once_for_all_its_generations(check, make_prompts):
    (length,) = (40,)
    steps = check("qwen3", make_prompts((length,)), 5).steps
    # All but the last prompt token once; that one is the first that each generation feeds.
    assert [(step.kind, step.num_steps, step.num_tokens) for step in steps] == [
        ("prefill", 1, length - 1),
        ("decode", NUM_NEW, 5 * NUM_NEW),
    ]


@pytest.mark.parametrize("prompts", [[[5]], [[5], [6]], [[5], [7, 8, 9, 10]]], ids=["alone", "two", "mixed"])
def test_one_token_prompts(check, family, prompts):
    check(family, prompts, 3)


def test_more_rows_without_a_token_than_tokens(check, make_prompts):
    """One token is read beside parents that have none to run, after a batch in which as many rows had one each."""
    check("qwen3", [*make_prompts((13,)), [1], [2], [3]], 5, max_batch_tokens=4)


def test_a_matched_prefix_that_leaves_one_token(check, make_prompts):
    """17 tokens on pages of 8: an equal second prompt finds 16 of them cached, so a step may have nothing to run."""
    (prompt,) = make_prompts((17,))
    # A batch of one request keeps the others waiting until the first one's blocks are there to match.
    settings = {"allow_block_sharing": True, "max_requests_per_batch": 1, "scheduler": "prefill_first"}
    driver = check("qwen3", [prompt, prompt, prompt], 3, **settings)
    assert 0 in [step.num_tokens for step in driver.steps]


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("allow_block_sharing", [False, True])
def test_forks_that_do_not_fit_are_read_again(check, family, make_prompts, allow_block_sharing, scheduler):
    driver = check(
        family,
        make_prompts((30, 9, 41)),
        5,
        num_blocks=14,
        scheduler=scheduler,
        allow_block_sharing=allow_block_sharing,
    )
    assert max(step.num_requests for step in driver.steps) < 15


def test_chunked_prompts_fork_after_their_last_chunk(check, family, make_prompts):
    check(family, make_prompts((33, 32, 50)), 3, max_batch_tokens=16)


def test_more_generations_than_a_batch_takes(check, make_prompts):
    driver = check("qwen3", make_prompts((12, 20)), 8, max_requests_per_batch=5)
    assert max(step.num_requests for step in driver.steps) == 5
