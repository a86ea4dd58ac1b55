"""Completions equal `generate` token for token in fp32, however a round is batched, chunked, forked or evicted."""

import pytest
import torch

from cbexp.engine.driver import _Engine
from cbexp.engine.requests import PromptGroup
from cbexp.engine.sizing import count_blocks_needed
from tests.engine.driving import count_referenced_blocks, drive

ALL_FAMILIES = ("qwen3", "llama", "gemma2", "gemma3", "mistral", "gpt_oss")
FORK_FAMILIES = ("qwen3", "gemma2", "mistral")
NUM_NEW = 12


def kinds(driver):
    return [(step.kind, step.num_requests, step.num_steps) for step in driver.steps]


def crowd(driver, share=0.6):
    """Settings of a cache of a share of what the driver's last round took."""
    taken = driver.resolved["num_blocks"] * max(step.cache_used_fraction for step in driver.steps)
    return {"num_blocks": int(share * taken)}


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_with_and_without_room(family, shared_model, make_driver, prompts, references, scheduler):
    """An exactly sized cache admits the round at once; one of 0.6 of that evicts, reads again and says the same."""
    expected = references(family, prompts)
    assert len({token for tokens in expected for token in tokens}) > 20, "repetition proves nothing"
    roomy = make_driver(shared_model(family), scheduler=scheduler)
    assert drive(roomy, prompts) == expected
    assert kinds(roomy) == [("prefill", 7, 1), ("decode", 7, NUM_NEW - 1)]
    assert roomy.resolved["safety_margin"] == 0
    crowded = make_driver(shared_model(family), scheduler=scheduler, **crowd(roomy))
    assert drive(crowded, prompts) == expected
    assert sum(step.num_tokens for step in crowded.steps) > sum(step.num_tokens for step in roomy.steps)
    assert crowded.resolved["safety_margin"] > 0


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_rounds_follow_each_other_in_chunks(
    family, shared_model, make_driver, prompts, make_prompts, references
):
    driver = make_driver(shared_model(family), num_blocks=64, max_batch_tokens=11)
    others, limits = make_prompts((5, 30, 9), seed=1), [3, 1, 20]
    for _ in range(2):
        driver.add_requests(prompts)
        completions = driver.drive_until_empty().values()
        assert [c.completion_ids for c in completions] == references(family, prompts)
        assert [c.prompt_ids for c in completions] == [tuple(prompt) for prompt in prompts]
        assert {c.finish_reason for c in completions} == {"length"}
        assert max(step.num_tokens for step in driver.steps if step.kind == "prefill") == 11
        assert drive(driver, others, max_new_tokens=limits) == references(family, others, limits)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("num_ids", [1, 2])
def test_early_eos(family, shared_model, make_driver, prompts, references, num_ids):
    full = references(family, prompts)
    eos = (full[2][3], full[5][6])[:num_ids]
    driver = make_driver(shared_model(family), eos_token_id=eos[0] if num_ids == 1 else list(eos))
    driver.add_requests(prompts)
    completions = driver.drive_until_empty().values()
    expected = references(family, prompts, NUM_NEW, eos)
    assert [c.completion_ids for c in completions] == expected
    assert [c.finish_reason == "eos" for c in completions] == [tokens[-1] in eos for tokens in expected]
    assert min(map(len, completions)) < NUM_NEW


def test_eos_ids_cut_evicted_requests_too(shared_model, make_driver, prompts, references):
    eos = (references("qwen3", prompts, 40)[0][30],)
    driver = make_driver(shared_model("qwen3"), max_new_tokens=40, eos_token_id=eos, num_blocks=20)
    assert drive(driver, prompts) == references("qwen3", prompts, 40, eos)


def test_few_requests_a_batch(shared_model, make_driver, prompts, references):
    driver = make_driver(shared_model("qwen3"), max_requests_per_batch=2)
    assert drive(driver, prompts) == references("qwen3", prompts)
    assert max(step.num_requests for step in driver.steps) == 2


def test_a_round_that_needs_more_makes_the_cache_grow(shared_model, make_driver, make_prompts, references):
    driver = make_driver(shared_model("qwen3"))
    assert "num_blocks" not in driver.resolved
    sizes = []
    for lengths in ((4,), (40, 50, 60), (4,)):
        prompts = make_prompts(lengths)
        assert drive(driver, prompts) == references("qwen3", prompts)
        sizes.append(driver.resolved["num_blocks"])
    assert sizes[0] < sizes[1] == sizes[2]


def test_greedy_decoding_draws_nothing(shared_model, make_driver, prompts):
    first = drive(make_driver(shared_model("qwen3")), prompts)
    torch.manual_seed(12345)
    assert drive(make_driver(shared_model("qwen3")), prompts) == first


def test_blocks_needed_by_hand():
    # 9 + 8 - 1 = 16 stored tokens are two pages of 8, times three generations; 1 + 1 - 1 = 1 token is one page.
    groups = [
        PromptGroup(("a", "b", "c"), tuple(range(9)), 8, (), 0.0),
        PromptGroup(("d",), (1,), 1, (), 0.0),
    ]
    assert count_blocks_needed(groups, page_size=8, rounding_blocks=2) == 3 * 2 + 1 + 2


# Several generations of a prompt


@pytest.mark.parametrize("family", FORK_FAMILIES)
@pytest.mark.parametrize("allow_block_sharing", [False, True])
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_forks_with_and_without_room(
    shared_model, make_driver, make_prompts, references, family, allow_block_sharing, scheduler
):
    """Forks decode at once; some are evicted, read again, and their blocks shared, replaced and copied."""
    prompts = make_prompts((33, 9, 16, 1), seed=3)
    settings = {"allow_block_sharing": allow_block_sharing, "scheduler": scheduler, "max_new_tokens": 30}
    roomy = make_driver(shared_model(family), **settings)
    expected = references(family, prompts, 30, num_generations=4)
    assert drive(roomy, prompts, num_generations=4) == expected
    # All but the last token of each prompt once: that is the first one that each generation feeds.
    assert kinds(roomy) == [("prefill", 4, 1), ("decode", 16, 30)]
    assert [step.num_tokens for step in roomy.steps] == [32 + 8 + 15 + 0, 16 * 30]
    is_shared = allow_block_sharing and family == "qwen3"
    assert roomy.resolved["block_sharing"] is is_shared
    for share in (0.6, 0.35):
        crowded = make_driver(shared_model(family), **settings, **crowd(roomy, share))
        assert drive(crowded, prompts, num_generations=4) == expected
    # Without shared blocks, some forks are not even made.
    assert is_shared or max(step.num_requests for step in crowded.steps) < 16
    assert max(step.num_waiting for step in crowded.steps[1:]) > 0, "nobody was evicted"


# Prompt lengths, generations, settings
ODD_GROUPS = {
    "one token alone": ((1,), 3, {}),
    "one token each": ((1, 1), 3, {}),
    "one token beside more": ((1, 4), 3, {}),
    # One token is read beside parents that have none to run, after a batch in which as many rows had one each.
    "more rows without a token than tokens": ((2, 1, 1, 1), 5, {}),
    "more of them in chunks": ((13, 1, 1, 1), 5, {"max_batch_tokens": 4}),
    "chunks": ((33, 32, 50), 3, {"max_batch_tokens": 16}),
    "more than a batch takes": ((12, 20), 8, {"max_requests_per_batch": 5}),
}


@pytest.mark.parametrize("family", FORK_FAMILIES)
@pytest.mark.parametrize("case", ODD_GROUPS)
def test_odd_groups(shared_model, make_driver, prompts, make_prompts, references, family, case):
    lengths, num_generations, settings = ODD_GROUPS[case]
    driver = make_driver(shared_model(family), num_blocks=100, **settings)
    assert drive(driver, prompts) == references(family, prompts)
    odd = make_prompts(lengths)
    expected = references(family, odd, num_generations=num_generations)
    assert drive(driver, odd, num_generations=num_generations) == expected
    if "max_requests_per_batch" in settings:
        assert max(step.num_requests for step in driver.steps) == 5


def test_a_matched_prefix_that_leaves_one_token(shared_model, make_driver, make_prompts, references):
    """17 tokens on pages of 8: an equal second prompt finds 16 of them cached, so a step may have nothing to run."""
    prompts = make_prompts((17,)) * 3
    # A batch of one request keeps the others waiting until the first one's blocks are there to match.
    settings = {"allow_block_sharing": True, "max_requests_per_batch": 1, "scheduler": "prefill_first"}
    driver = make_driver(shared_model("qwen3"), **settings)
    assert drive(driver, prompts, num_generations=3) == references("qwen3", prompts, num_generations=3)
    assert 0 in [step.num_tokens for step in driver.steps]


# Requests that end where they begin, in every shape of batch

SHAPES = [("natural", 1, False), ("buckets", 128, True), ("full", 5, False)]


@pytest.fixture(params=SHAPES, ids=lambda shape: shape[0])
def shape(request):
    return dict(zip(("batch_shape", "max_burst", "allow_block_sharing"), request.param, strict=True))


def test_a_limit_of_one_token(shared_model, make_driver, prompts, references, shape):
    """Alone it ends with its prompt; forks get their one token from a decode step."""
    driver = make_driver(shared_model("qwen3"), num_blocks=80, **shape)
    for num_generations, step_kinds in ((1, {"prefill"}), (4, {"prefill", "decode"})):
        tokens = drive(driver, prompts, num_generations=num_generations, max_new_tokens=1)
        assert tokens == references("qwen3", prompts, 1, num_generations=num_generations)
        assert {step.kind for step in driver.steps} == step_kinds


@pytest.mark.parametrize("place", [0, 1], ids=["with the prompt", "in the first decode step"])
def test_an_eos_at_once(shared_model, make_driver, prompts, reference, references, shape, place):
    """The request's row is free for others after one step; the others go on."""
    eos = reference("qwen3", prompts[3], NUM_NEW)[place]
    expected = references("qwen3", prompts, NUM_NEW, (eos,))
    assert len(expected[3]) == place + 1
    assert [len(tokens) for tokens in expected].count(place + 1) < len(prompts)
    settings = {"eos_token_id": eos, "num_blocks": 60, "max_requests_per_batch": 3}
    driver = make_driver(shared_model("qwen3"), **settings, **shape)
    for num_generations in (1, 2):
        tokens = drive(driver, prompts, num_generations=num_generations)
        assert tokens == references("qwen3", prompts, NUM_NEW, (eos,), num_generations)


def test_every_row_ends_in_the_first_step(shared_model, make_driver, make_prompts, reference, shape):
    """A burst whose rows are all inactive after one step runs to its end and gives one token each."""
    (prompt,) = make_prompts((20,))
    eos = reference("qwen3", prompt, 2)[1]
    driver = make_driver(shared_model("qwen3"), eos_token_id=eos, num_blocks=60, max_new_tokens=100, **shape)
    driver.add_requests([prompt] * 5)
    completions = list(driver.drive_until_empty().values())
    assert [c.completion_ids for c in completions] == [reference("qwen3", prompt, 2)] * 5
    assert {c.finish_reason for c in completions} == {"eos"}
    assert [step.num_tokens for step in driver.steps if step.kind == "decode"] == [5]


def test_more_groups_of_eight_than_rows(shared_model, make_driver, make_prompts, references, shape):
    """Two groups at a time in twenty rows: a group is let in when eight rows are free, all of it at once."""
    prompts, limits = make_prompts((9, 17, 30, 8, 25, 12)), [5, 20, 1, 11, 2, 16]
    driver = make_driver(shared_model("qwen3"), max_requests_per_batch=20, num_blocks=140, **shape)
    tokens = drive(driver, prompts, num_generations=8, max_new_tokens=limits)
    assert tokens == references("qwen3", prompts, limits, num_generations=8)
    bursts = [step for step in driver.steps if step.bucket is not None]
    assert max(step.num_requests for step in bursts) == 16
    assert all(step.num_requests % 8 == 0 for step in bursts)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_requests_leave_the_cache_by_themselves(family, shared_model, make_driver, prompts, monkeypatch):
    """Before it is reset, which would hide what they leave behind."""
    driver, ends = make_driver(shared_model(family), num_blocks=20, allow_block_sharing=True), []

    def reset(engine, original=_Engine.reset):
        ends.append((count_referenced_blocks(driver), engine.batcher.cache_used_fraction))
        original(engine)

    monkeypatch.setattr(_Engine, "reset", reset)
    for num_generations in (1, 3):
        drive(driver, prompts, num_generations=num_generations)
    assert ends == [(0, pytest.approx(0, abs=1e-9))] * 2
