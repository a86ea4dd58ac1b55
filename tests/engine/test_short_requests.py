"""Requests that end where they begin: a limit of one token, an EOS at once; and groups that are more than the rows."""

from __future__ import annotations

import itertools

import pytest

SHAPES = ("natural", "buckets", "full")
NUM_NEW = 12


@pytest.fixture(params=list(itertools.product(SHAPES, (1, 128))), ids=lambda p: f"{p[0]}-bursts of {p[1]}")
def shape(request):
    return dict(zip(("batch_shape", "max_burst"), request.param, strict=True))


def drive(driver, prompts, **kwargs):
    driver.add_requests(prompts, **kwargs)
    completions = list(driver.drive_until_empty().values())
    return [c.completion_ids for c in completions], [c.finish_reason for c in completions]


def test_a_limit_of_one_token(shared_model, make_driver, prompts, reference, shape):
    """Alone it ends with its prompt; forks get their one token from a decode step."""
    driver = make_driver(shared_model("qwen3"), num_blocks=80, **shape)
    for num_generations, kinds in ((1, {"prefill"}), (4, {"prefill", "decode"})):
        tokens, reasons = drive(driver, prompts, num_generations=num_generations, max_new_tokens=1)
        assert tokens == [reference("qwen3", p, 1) for p in prompts for _ in range(num_generations)]
        assert set(reasons) == {"length"}
        assert {step.kind for step in driver.steps} == kinds


@pytest.mark.parametrize("place", [0, 1], ids=["with the prompt", "in the first decode step"])
def test_an_eos_at_once(shared_model, make_driver, prompts, reference, shape, place):
    """The request's row is free for others after one step; the others go on."""
    eos = reference("qwen3", prompts[3], NUM_NEW)[place]
    assert place == 0 or eos != reference("qwen3", prompts[3], NUM_NEW)[0]
    expected = [reference("qwen3", prompt, NUM_NEW, (eos,)) for prompt in prompts]
    assert [len(tokens) for tokens in expected].count(place + 1) < len(prompts)
    driver = make_driver(
        shared_model("qwen3"), eos_token_id=eos, num_blocks=60, max_requests_per_batch=3, **shape
    )
    for num_generations in (1, 2):
        tokens, reasons = drive(driver, prompts, num_generations=num_generations)
        assert tokens == [completion for completion in expected for _ in range(num_generations)]
        assert [r == "eos" for r in reasons] == [t[-1] == eos for t in tokens]
    assert len(expected[3]) == place + 1


def test_every_row_ends_in_the_first_step(shared_model, make_driver, make_prompts, reference, shape):
    """A burst whose rows are all inactive after one step runs to its end and gives one token each."""
    (prompt,) = make_prompts((20,))
    eos = reference("qwen3", prompt, 2)[1]
    driver = make_driver(shared_model("qwen3"), eos_token_id=eos, num_blocks=60, max_new_tokens=100, **shape)
    tokens, reasons = drive(driver, [prompt] * 5)
    assert tokens == [reference("qwen3", prompt, 2, (eos,))] * 5
    assert set(reasons) == {"eos"}
    decode = [step for step in driver.steps if step.kind == "decode"]
    assert [step.num_tokens for step in decode] == [5]


@pytest.mark.parametrize("allow_block_sharing", [False, True])
def test_more_groups_of_eight_than_rows(
    shared_model, make_driver, make_prompts, reference, shape, allow_block_sharing
):
    """Two groups at a time in twenty rows: a group is let in when eight rows are free, all of it at once."""
    prompts, limits = make_prompts((9, 17, 30, 8, 25, 12)), [5, 20, 1, 11, 2, 16]
    driver = make_driver(
        shared_model("qwen3"),
        max_requests_per_batch=20,
        num_blocks=140,
        allow_block_sharing=allow_block_sharing,
        **shape,
    )
    tokens, _ = drive(driver, prompts, num_generations=8, max_new_tokens=limits)
    pairs = list(zip(prompts, limits, strict=True))
    assert tokens == [reference("qwen3", prompt, limit) for prompt, limit in pairs for _ in range(8)]
    bursts = [step for step in driver.steps if step.bucket is not None]
    assert max(step.num_requests for step in bursts) == 16
    assert all(step.num_requests % 8 == 0 for step in bursts)
