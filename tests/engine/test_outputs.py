"""Completions equal `generate` token for token in fp32, however a round is batched, chunked or evicted."""

from __future__ import annotations

import pytest

from cbexp.engine.sizing import count_blocks_needed

ALL_FAMILIES = ("qwen3", "llama", "gemma2", "gemma3", "mistral", "gpt_oss")
NUM_NEW = 12


def drive(driver, prompts, **kwargs):
    request_ids = driver.add_requests(prompts, **kwargs)
    completions = driver.drive_until_empty()
    assert list(completions) == request_ids
    return list(completions.values())


@pytest.fixture(params=ALL_FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def expected(family, prompts, reference):
    tokens = [reference(family, prompt, NUM_NEW) for prompt in prompts]
    assert len({t for c in tokens for t in c}) > 20, "a model that repeats itself proves nothing"
    return tokens


def test_a_round_equals_generate(family, shared_model, make_driver, prompts, expected):
    completions = drive(make_driver(shared_model(family)), prompts)
    assert [c.completion_ids for c in completions] == expected
    assert [c.prompt_ids for c in completions] == [tuple(p) for p in prompts]
    assert {c.finish_reason for c in completions} == {"length"}


def test_prompts_are_read_in_chunks(family, shared_model, make_driver, prompts, expected):
    driver = make_driver(shared_model(family), max_batch_tokens=11)
    assert [c.completion_ids for c in drive(driver, prompts)] == expected
    assert max(step.num_tokens for step in driver.steps if step.kind == "prefill") == 11


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_more_requests_than_fit(family, shared_model, make_driver, prompts, expected, scheduler):
    """A cache of 0.6 of what a round takes evicts, reads again and still says the same."""
    roomy = make_driver(shared_model(family), scheduler=scheduler)
    drive(roomy, prompts)
    blocks_taken = roomy.resolved["num_blocks"] * max(step.cache_used_fraction for step in roomy.steps)

    crowded = make_driver(shared_model(family), scheduler=scheduler, num_blocks=int(0.6 * blocks_taken))
    assert [c.completion_ids for c in drive(crowded, prompts)] == expected
    assert sum(step.num_tokens for step in crowded.steps) > sum(step.num_tokens for step in roomy.steps)
    assert crowded.resolved["safety_margin"] > 0


def test_rounds_follow_each_other(
    family, shared_model, make_driver, prompts, expected, make_prompts, reference
):
    driver = make_driver(shared_model(family), num_blocks=64)
    others = make_prompts((5, 30, 9), seed=1)
    for _ in range(2):
        assert [c.completion_ids for c in drive(driver, prompts)] == expected
        limits = [3, 1, 20]
        completions = drive(driver, others, max_new_tokens=limits)
        wanted = [reference(family, p, n) for p, n in zip(others, limits, strict=True)]
        assert [c.completion_ids for c in completions] == wanted


def test_an_exactly_sized_cache_admits_the_whole_round(family, shared_model, make_driver, prompts, expected):
    """One step reads all prompts and one burst makes all but the first tokens: nobody waited, nobody was evicted."""
    driver = make_driver(shared_model(family))
    assert [c.completion_ids for c in drive(driver, prompts)] == expected
    assert [(step.kind, step.num_steps) for step in driver.steps] == [("prefill", 1), ("decode", NUM_NEW - 1)]
    assert driver.resolved["safety_margin"] == 0


@pytest.mark.parametrize("as_ids", [lambda ids: ids[0], list], ids=["one", "several"])
def test_early_eos(family, shared_model, make_driver, prompts, expected, reference, as_ids):
    eos = as_ids([expected[2][3], expected[5][6]])
    eos_ids = (eos,) if isinstance(eos, int) else tuple(eos)
    completions = drive(make_driver(shared_model(family), eos_token_id=eos), prompts)
    wanted = [reference(family, prompt, NUM_NEW, eos_ids) for prompt in prompts]
    assert [c.completion_ids for c in completions] == wanted
    assert [c.finish_reason for c in completions] == [
        "eos" if tokens[-1] in eos_ids else "length" for tokens in wanted
    ]
    assert min(len(c) for c in completions) < NUM_NEW


def test_eos_ids_cut_evicted_requests_too(shared_model, make_driver, prompts, reference):
    full = [reference("qwen3", prompt, 40) for prompt in prompts]
    eos = (full[0][30],)
    driver = make_driver(shared_model("qwen3"), max_new_tokens=40, eos_token_id=eos, num_blocks=20)
    completions = drive(driver, prompts)
    assert [c.completion_ids for c in completions] == [reference("qwen3", p, 40, eos) for p in prompts]


def test_few_requests_a_batch(shared_model, make_driver, prompts, reference):
    driver = make_driver(shared_model("qwen3"), max_requests_per_batch=2)
    expected = [reference("qwen3", prompt, NUM_NEW) for prompt in prompts]
    assert [c.completion_ids for c in drive(driver, prompts)] == expected
    assert max(step.num_requests for step in driver.steps) == 2


def test_a_round_that_needs_more_makes_the_cache_grow(shared_model, make_driver, make_prompts, reference):
    driver = make_driver(shared_model("qwen3"))
    assert "num_blocks" not in driver.resolved
    sizes = []
    for lengths in ((4,), (40, 50, 60), (4,)):
        round_prompts = make_prompts(lengths)
        completions = drive(driver, round_prompts)
        assert [c.completion_ids for c in completions] == [
            reference("qwen3", p, NUM_NEW) for p in round_prompts
        ]
        sizes.append(driver.resolved["num_blocks"])
    assert sizes[0] < sizes[1] == sizes[2]


def test_greedy_decoding_draws_nothing(shared_model, make_driver, prompts):
    import torch

    first = drive(make_driver(shared_model("qwen3")), prompts)
    torch.manual_seed(12345)
    second = drive(make_driver(shared_model("qwen3")), prompts)
    assert [c.completion_ids for c in first] == [c.completion_ids for c in second]


def test_blocks_needed_by_hand():
    from cbexp.engine.requests import PromptGroup

    # 9 + 8 - 1 = 16 stored tokens are two pages of 8, times three generations; 1 + 1 - 1 = 1 token is one page.
    groups = [
        PromptGroup(("a", "b", "c"), tuple(range(9)), 8, (), 0.0),
        PromptGroup(("d",), (1,), 1, (), 0.0),
    ]
    assert count_blocks_needed(groups, page_size=8, slack_blocks=2) == 3 * 2 + 1 + 2
