"""Sampled drives: each token is what the model's own forward, the settings and the counters of that token give."""

import random
import struct
from dataclasses import replace

import pytest
import torch

from cbexp.engine import CBSyncConfig, EngineError, Sampling, SyncCBDriver
from cbexp.engine.buffers import set_width
from cbexp.engine.decode.step import EagerSteps
from cbexp.engine.row_sampling import make_key
from cbexp.engine.sampling import sample_plainly
from tests.engine.driving import check_cache_at_rest, drive
from tests.engine.models import VOCAB_SIZE, build_model, random_prompts

LONG = Sampling(temperature=1.0)
SEED = 7


def bit_set(token_ids):
    words = [0] * set_width(VOCAB_SIZE)
    for token_id in set(token_ids):
        words[token_id // 32] |= 1 << token_id % 32
    return [struct.unpack("<i", struct.pack("<I", word))[0] for word in words]


@torch.no_grad()
def sample_slowly(model, prompt, sampling, max_new_tokens, draws, *, eos=(), seed=SEED, known=()):
    """Tokens and log-probabilities of a completion that goes on after `known`, by whole forwards."""
    ids, logprobs = [*prompt, *known], []
    stops = {*eos, *sampling.stop_token_ids}
    sets = torch.tensor(
        [bit_set([]), bit_set(stops), bit_set(sampling.suppress_token_ids)], dtype=torch.int32
    )

    def bits(number):
        return struct.unpack("<i", struct.pack("<f", number))[0]

    settings = torch.tensor(
        [
            [
                bits(sampling.temperature),
                sampling.top_k,
                bits(sampling.top_p),
                bits(sampling.min_p),
                bits(sampling.repetition_penalty),
                len(prompt) + sampling.min_new_tokens,
                1,
                2,
                *draws,
            ]
        ],
        dtype=torch.int32,
    )
    while len(ids) < len(prompt) + max_new_tokens:
        logits = model(torch.tensor([ids])).logits[:, -1]
        seen = torch.tensor([bit_set(ids)], dtype=torch.int32)
        position = torch.tensor([len(ids) - 1], dtype=torch.int32)
        next_ids, _, of_token = sample_plainly(logits, settings, position, seen, sets, make_key(seed))
        ids.append(int(next_ids))
        logprobs.append(of_token[0].tolist())
        if ids[-1] in stops:
            break
    return tuple(ids[len(prompt) :]), logprobs


def draw_sampling(rng):
    def sometimes(value, otherwise):
        return value if rng.random() < 0.4 else otherwise

    return Sampling(
        temperature=rng.choice([0.0, 0.7, 1.0, 2.5]),
        top_k=sometimes(rng.randint(1, 30), rng.choice([0, -1])),
        top_p=sometimes(rng.random(), 1.0),
        min_p=sometimes(rng.random() / 3, 0.0),
        repetition_penalty=sometimes(rng.uniform(0.5, 2), 1.0),
        min_new_tokens=sometimes(rng.randint(1, 5), 0),
        stop_token_ids=sometimes(tuple(rng.sample(range(VOCAB_SIZE), 3)), ()),
        suppress_token_ids=sometimes(tuple(rng.sample(range(VOCAB_SIZE), 40)), ()),
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 8 else pytest.mark.slow) for seed in range(60)]
)
def test_a_random_round(shared_model, make_driver, seed):
    """Other rows, batch sizes, evictions, chunks of prompts and the mode of the steps change nothing."""
    rng = random.Random(seed)
    model = shared_model(("qwen3", "gemma3", "gpt_oss")[seed % 3])
    prompts = random_prompts([rng.randint(1, 40) for _ in range(rng.randint(1, 5))], seed)
    limits = [rng.randint(5, 14) for _ in prompts]
    samplings = [draw_sampling(rng) for _ in prompts]
    eos, num_generations = (rng.randrange(VOCAB_SIZE),), rng.choice([1, 3])
    settings = {
        "page_size": rng.choice([4, 16]),
        "max_batch_tokens": rng.choice([8, 256]),
        "allow_block_sharing": rng.random() < 0.5,
        "num_blocks": rng.choice([None, 24]),
    }
    if rng.random() < 0.3:
        settings["attn_implementation"] = model.config._attn_implementation
    else:
        settings |= {
            "batch_shape": rng.choice(["natural", "buckets", "full"]),
            "max_burst": rng.choice([3, 128]),
        }
    driver = make_driver(model, eos_token_id=eos, seed=SEED, logprobs=True, **settings)
    for submission in range(2):
        driver.add_requests(
            prompts, max_new_tokens=limits, num_generations=num_generations, sampling=samplings
        )
        completions = list(driver.drive_until_empty().values())
        check_cache_at_rest(driver)
        for number, completion in enumerate(completions):
            index, generation = divmod(number, num_generations)
            ids, logprobs = sample_slowly(
                model,
                prompts[index],
                samplings[index],
                limits[index],
                (submission, index, generation),
                eos=eos,
            )
            assert completion.completion_ids == ids
            last = ids[-1]
            reason = "eos" if last in eos else "stop" if last in samplings[index].stop_token_ids else "length"
            assert (completion.finish_reason, completion.stop_reason) == (
                reason,
                last if reason == "stop" else None,
            )
            assert completion.versions == ((0, len(ids)),)
            columns = (
                completion.logprobs_model,
                completion.logprobs_sampled,
                completion.logprobs_raw,
                completion.kept_mass,
            )
            torch.testing.assert_close(torch.tensor(columns).T, torch.tensor(logprobs), atol=2e-4, rtol=1e-3)


def test_random_numbers_go_on_and_can_be_restored(shared_model, make_driver):
    model, prompts = shared_model("qwen3"), random_prompts((3, 3, 9))

    def rollout(driver, count=2):
        return [drive(driver, prompts, max_new_tokens=8, num_generations=2) for _ in range(count)]

    driver = make_driver(model, sampling=LONG, seed=SEED)
    first, second = rollout(driver)
    flat = [*first, *second]
    assert len(set(flat)) == len(flat)  # rounds, prompts and generations differ
    state = driver.state_dict()
    third = rollout(driver, 1)
    again = make_driver(model, sampling=LONG, seed=SEED)
    again.load_state_dict(state)
    assert rollout(again, 1) == third
    assert rollout(make_driver(model, sampling=LONG, seed=SEED)) == [first, second]
    assert rollout(make_driver(model, sampling=LONG, seed=SEED + 1), 1) != [first]
    # What was refused has not moved the counter on.
    with pytest.raises(ValueError, match="prompts"):
        again.add_requests([[]], max_new_tokens=3)
    assert again.state_dict() == {"num_submissions": 3}
    for state in ({}, {"num_submissions": -1}, {"num_submissions": "3"}, None):
        with pytest.raises(ValueError, match="is not from state_dict"):
            again.load_state_dict(state)


def test_ranks_differ(monkeypatch):
    keys = []
    for rank in (None, 0, 1):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda rank=rank: rank is not None)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        keys += [tuple(make_key(seed).tolist()) for seed in (0, 1, 2**64 - 1)]
    assert keys[:3] == keys[3:6]
    assert len(set(keys)) == 6


def test_generators_of_the_process_are_left_alone(shared_model, make_driver):
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(3), random.random()
    torch.manual_seed(3)
    random.seed(3)
    drive(make_driver(shared_model("qwen3"), sampling=LONG), random_prompts((4,)), max_new_tokens=5)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


@pytest.mark.parametrize("sampling", [Sampling(), LONG])
@pytest.mark.parametrize("num_blocks", [None, 8])
def test_a_request_whose_logits_are_not_finite_fails_alone(make_driver, sampling, num_blocks):
    """At its prompt, or at a token that it has made; others go on, also in the blocks that it had."""
    model = build_model("qwen3")
    prompts = random_prompts((5, 12, 9, 30))
    settings = {
        "sampling": sampling,
        "page_size": 8,
        "num_blocks": num_blocks,
        "seed": SEED,
        "logprobs": True,
    }
    expected = drive(make_driver(model, **settings), prompts, max_new_tokens=14)
    bad = next(
        token
        for token in expected[1][3:-1]
        if sum(token in [*prompt, *ids] for prompt, ids in zip(prompts, expected, strict=True)) == 1
    )
    place = expected[1].index(bad) + 1
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    driver = make_driver(model, **settings)
    for _ in range(2):
        driver._queue.num_submissions = 0
        driver.add_requests([*prompts, [1, bad, 2]], max_new_tokens=14)
        *completions, last = driver.drive_until_empty().values()
        assert [c.completion_ids for c in completions] == [
            ids[:place] if index == 1 else ids for index, ids in enumerate(expected)
        ]
        assert [c.finish_reason for c in completions] == ["length", "failed", "length", "length"]
        assert "not finite" in completions[1].error
        assert len(completions[1].logprobs_model) == place
        assert (last.finish_reason, last.completion_ids, last.versions) == ("failed", (), ())
        check_cache_at_rest(driver)


def test_new_weights_in_a_drive(make_driver):
    """What was generated stays, and goes on as the new weights would have it from there."""
    model, prompts = build_model("qwen3"), random_prompts((5, 20, 3))
    other = build_model("qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    calls = []

    def on_step(index, info):
        calls.append(index)
        if len(calls) == 3:
            with torch.no_grad():
                for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
                    parameter.copy_(new)
            if is_said:
                driver.weights_changed(40)

    for is_said in (True, False):
        model.load_state_dict(build_model("qwen3").state_dict())
        calls.clear()
        driver = make_driver(
            model, sampling=LONG, seed=SEED, logprobs=True, max_burst=4, on_step=on_step, page_size=8
        )
        driver.weights_changed(3)
        driver.add_requests(prompts, max_new_tokens=16, num_generations=2)
        completions = list(driver.drive_until_empty().values())
        old_model = build_model("qwen3")
        assert {len(c.versions) for c in completions} == {2}
        for number, completion in enumerate(completions):
            draws = (0, *divmod(number, 2))
            (old, num_old), (new, num_new) = completion.versions
            assert (old, new) == ((3, 40) if is_said else (3, 4))
            assert num_old + num_new == len(completion.logprobs_raw) == 16
            begun, _ = sample_slowly(old_model, completion.prompt_ids, LONG, num_old, draws)
            whole, _ = sample_slowly(other, completion.prompt_ids, LONG, 16, draws, known=begun)
            assert completion.completion_ids == whole


def test_versions_between_drives(shared_model, make_driver):
    driver = make_driver(shared_model("qwen3"), max_new_tokens=3)
    versions = []
    for version in (None, 10, None):
        driver.weights_changed(version)
        driver.add_requests([[1, 2]])
        (completion,) = driver.drive_until_empty().values()
        versions += completion.versions
    assert versions == [(1, 3), (10, 3), (11, 3)]
    with pytest.raises(TypeError, match="version='x'"):
        driver.weights_changed("x")
    driver.close()
    with pytest.raises(EngineError, match="closed"):
        driver.weights_changed()


class Letters:
    """A tokenizer whose tokens are one character each."""

    def decode(self, token_ids, **_kwargs):
        return "".join(chr(33 + token_id) for token_id in token_ids)


@pytest.mark.parametrize("max_burst", [2, 128])
@pytest.mark.parametrize("sampling", [Sampling(), LONG])
def test_stop_strings(shared_model, make_driver, sampling, max_burst):
    """The completion ends with the token that completes one, whatever was made behind it in the same burst."""
    model, prompts = shared_model("qwen3"), random_prompts((5, 9, 3))
    settings = {"max_new_tokens": 20, "seed": SEED, "logprobs": True, "max_burst": max_burst}
    whole = drive(make_driver(model, sampling=sampling, **settings), prompts)
    texts = [Letters().decode(ids) for ids in whole]
    strings = [texts[0][5:7], texts[1][0], texts[2][18:20]]
    with SyncCBDriver(model, None, CBSyncConfig(**settings), tokenizer=Letters()) as driver:
        samplings = [replace(sampling, stop_strings=(string, "no such text")) for string in strings]
        driver.add_requests(prompts, sampling=samplings)
        for completion, ids, string, text in zip(
            driver.drive_until_empty().values(), whole, strings, texts, strict=True
        ):
            length = text.index(string) + len(string)
            assert completion.completion_ids == ids[:length]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", string)
            assert len(completion.logprobs_model) == length == sum(n for _, n in completion.versions)
        check_cache_at_rest(driver)
        # What would follow in the same burst does not count.
        driver._queue.num_submissions = 0
        bad = whole[0][texts[0].index(strings[0]) + len(strings[0])]
        if bad not in [*prompts[0], *whole[0][: texts[0].index(strings[0]) + len(strings[0])]]:
            weight = model.get_input_embeddings().weight
            with torch.no_grad():
                kept = weight[bad].clone()
                weight[bad] = torch.nan
            driver.add_requests([prompts[0]], sampling=samplings[0])
            (completion,) = driver.drive_until_empty().values()
            with torch.no_grad():
                weight[bad] = kept
            assert completion.finish_reason == "stop"
        # Nothing ends a completion before its least number of tokens.
        driver._queue.num_submissions = 0
        driver.add_requests([prompts[0]], sampling=replace(samplings[0], min_new_tokens=8))
        (completion,) = driver.drive_until_empty().values()
        assert len(completion) > 8


def test_warmup_is_for_the_steps_that_the_driver_will_run(shared_model, make_driver, monkeypatch):
    prepared = []
    monkeypatch.setattr(
        EagerSteps,
        "prepare",
        lambda steps, bucket: prepared.append((steps._buffers.sampling is not None, bucket)),
    )
    for settings, is_sampled in (({}, False), ({"sampling": LONG}, True), ({"logprobs": True}, True)):
        driver = make_driver(shared_model("qwen3"), num_blocks=40, max_requests_per_batch=4, **settings)
        prepared.clear()
        driver.warmup()
        assert prepared == [(is_sampled, 4), (is_sampled, 2), (is_sampled, 1)]
        drive(driver, [[1, 2], [3]], max_new_tokens=3)
        assert len(prepared) == 3
        assert len(driver.time_decode_steps(2, 20, 4, num_bursts=2)) == 2
