"""Completions equal `generate` token for token in fp32, however a round is batched, chunked, forked or evicted."""

import pytest

from cbexp.engine.driver import _Engine
from tests.engine.driving import count_referenced_blocks, drive

NUM_NEW = 12


def kinds(driver):
    return [(step.kind, step.num_requests, step.num_steps) for step in driver.steps]


def crowd(driver, share=0.6):
    """Blocks: a share of what the driver's last round took."""
    return int(share * driver.resolved["num_blocks"] * max(step.cache_used_fraction for step in driver.steps))


@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3", {}), ("gemma2", {"num_blocks": 20}), ("gpt_oss", {})]
)
def test_early_eos(family, settings, shared_model, make_driver, prompts, references):
    """Also of requests that are evicted and read again."""
    full = references(family, prompts)
    eos = (full[2][3], full[5][6])
    driver = make_driver(shared_model(family), eos_token_id=list(eos), **settings)
    driver.add_requests(prompts)
    completions = driver.drive_until_empty().values()
    expected = references(family, prompts, NUM_NEW, eos)
    assert [c.completion_ids for c in completions] == expected
    assert [c.prompt_ids for c in completions] == [tuple(prompt) for prompt in prompts]
    assert [c.finish_reason == "eos" for c in completions] == [tokens[-1] in eos for tokens in expected]
    assert min(map(len, completions)) < NUM_NEW


def test_a_round_that_needs_more_makes_the_cache_grow(shared_model, make_driver, make_prompts, check_drive):
    driver, sizes = make_driver(shared_model("qwen3")), []
    assert "num_blocks" not in driver.resolved
    for lengths in ((4,), (40, 50, 60), (4,)):
        check_drive("qwen3", make_prompts(lengths), driver=driver)
        sizes.append(driver.resolved["num_blocks"])
    assert sizes[0] < sizes[1] == sizes[2]


# Several generations of a prompt


@pytest.mark.parametrize(
    ("family", "allow_block_sharing", "scheduler"),
    [("qwen3", True, "fifo"), ("qwen3", False, "prefill_first"), ("gemma2", True, "prefill_first")],
)
def test_forks_with_and_without_room(check_drive, make_prompts, family, allow_block_sharing, scheduler):
    """Forks decode at once; some are evicted, read again, and their blocks shared, replaced and copied."""
    asked = (family, make_prompts((33, 9, 16, 1), seed=3), 30, (), 4)
    settings = {"allow_block_sharing": allow_block_sharing, "scheduler": scheduler}
    roomy = check_drive(*asked, **settings)
    # All but the last token of each prompt once: that is the first one that each generation feeds.
    assert kinds(roomy) == [("prefill", 4, 1), ("decode", 16, 30)]
    assert [step.num_tokens for step in roomy.steps] == [32 + 8 + 15 + 0, 16 * 30]
    assert roomy.resolved["safety_margin"] == 0
    is_shared = allow_block_sharing and family == "qwen3"
    assert roomy.resolved["block_sharing"] is is_shared
    for share in (0.6, 0.35):
        crowded = check_drive(*asked, **settings, num_blocks=crowd(roomy, share))
    # Without shared blocks, some forks are not even made.
    assert is_shared or max(step.num_requests for step in crowded.steps) < 16
    assert max(step.num_waiting for step in crowded.steps[1:]) > 0, "nobody was evicted"


# Prompt lengths, generations, settings
ODD_GROUPS = {
    "one token alone": ((1,), 3, {}),
    "one token beside more": ((1, 1, 4), 3, {}),
    # One token is read beside parents that have none to run, after a batch in which as many rows had one each.
    "more rows without a token than tokens": ((2, 1, 1, 1), 5, {}),
    "more of them in chunks": ((13, 1, 1, 1), 5, {"max_batch_tokens": 4}),
    "chunks": ((33, 32, 50), 3, {"max_batch_tokens": 16}),
    "more than a batch takes": ((12, 20), 8, {"max_requests_per_batch": 5}),
}


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("case", ODD_GROUPS)
def test_odd_groups(check_drive, prompts, make_prompts, family, case):
    lengths, num_generations, settings = ODD_GROUPS[case]
    driver = check_drive(family, prompts, num_blocks=100, **settings)
    check_drive(family, make_prompts(lengths), num_generations=num_generations, driver=driver)
    if "max_requests_per_batch" in settings:
        assert max(step.num_requests for step in driver.steps) == 5


def test_a_matched_prefix_that_leaves_one_token(check_drive, make_prompts):
    """17 tokens on pages of 8: an equal second prompt finds 16 of them cached, so a step may have nothing to run."""
    # A batch of one request keeps the others waiting until the first one's blocks are there to match.
    settings = {"allow_block_sharing": True, "max_requests_per_batch": 1, "scheduler": "prefill_first"}
    driver = check_drive("qwen3", make_prompts((17,)) * 3, num_generations=3, **settings)
    assert 0 in [step.num_tokens for step in driver.steps]


# Requests that end where they begin, in every shape of batch


@pytest.fixture(params=[("natural", 1, False), ("buckets", 128, True), ("full", 5, False)], ids=str)
def shape(request):
    return dict(zip(("batch_shape", "max_burst", "allow_block_sharing"), request.param, strict=True))


def test_a_limit_of_one_token(check_drive, prompts, shape):
    """Alone it ends with its prompt; forks get their one token from a decode step."""
    driver = check_drive("qwen3", prompts, 1, num_blocks=80, **shape)
    assert {step.kind for step in driver.steps} == {"prefill"}
    check_drive("qwen3", prompts, 1, num_generations=4, driver=driver)
    assert {step.kind for step in driver.steps} == {"prefill", "decode"}


@pytest.mark.parametrize("place", [0, 1], ids=["with the prompt", "in the first decode step"])
def test_an_eos_at_once(check_drive, prompts, references, shape, place):
    """The request's row is free for others after one step; the others go on."""
    eos = (references("qwen3", prompts)[3][place],)
    driver = check_drive("qwen3", prompts, NUM_NEW, eos, num_blocks=60, max_requests_per_batch=3, **shape)
    check_drive("qwen3", prompts, NUM_NEW, eos, num_generations=2, driver=driver)
    # A burst whose rows are all inactive after one step gives one token each.
    check_drive("qwen3", [prompts[3]] * 3, 100, eos, driver=driver)
    assert [step.num_tokens for step in driver.steps if step.kind == "decode"] == [3] * place


def test_more_groups_of_eight_than_rows(check_drive, make_prompts, shape):
    """Two groups at a time in twenty rows: a group is let in when eight rows are free, all of it at once."""
    prompts, limits = make_prompts((9, 17, 30, 8, 25, 12)), [5, 20, 1, 11, 2, 16]
    settings = {"num_generations": 8, "max_requests_per_batch": 20, "num_blocks": 140}
    driver = check_drive("qwen3", prompts, limits, **settings, **shape)
    bursts = [step.num_requests for step in driver.steps if step.bucket is not None]
    assert max(bursts) == 16
    assert {num_requests % 8 for num_requests in bursts} == {0}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
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
