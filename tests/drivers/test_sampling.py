"""Other drivers draw tokens from the distribution that our own one draws from, or refuse a setting by its name."""

import math
from collections import Counter
from contextlib import ExitStack

import pytest
import torch

from cbexp.drivers.generate import GenerateDriver
from cbexp.drivers.manager import ManagerDriver
from cbexp.drivers.peer_sampling import logprob_columns
from cbexp.drivers.registry import DRIVERS
from cbexp.engine import EngineError, Sampling, SyncCBDriver
from tests.drivers.conftest import drive, ids_of, make_config
from tests.drivers.test_contract import random_states
from tests.model_fixtures import build_tokenizer

PROMPT = [5, 9, 2, 9, 41]
NUM_DRAWS = 600
SHAPED = {"temperature": 1.5, "top_k": 12, "top_p": 0.9}
ALL = SHAPED | {"min_p": 0.1, "repetition_penalty": 1.3, "suppress_token_ids": (3, 60)}


@torch.no_grad()
def probabilities(model, prompt, sampling):
    """Of the next token, in plain torch and the order that `Sampling` states."""
    logits = model(torch.tensor([prompt])).logits[0, -1].double()
    seen = torch.tensor(sorted(set(prompt)))
    penalized = torch.where(
        logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
    )
    logits[seen] = penalized[seen]
    logits[list(sampling.suppress_token_ids)] = -torch.inf
    ordered, order = (logits / sampling.temperature).sort(descending=True)
    if sampling.top_k > 0:
        ordered[sampling.top_k :] = -torch.inf
    before = ordered.softmax(0).cumsum(0).roll(1)
    before[0] = 0
    ordered[before >= sampling.top_p] = -torch.inf
    masses = ordered.softmax(0)
    masses[masses < sampling.min_p * masses[0]] = 0
    return (masses / masses.sum()).new_zeros(len(logits)).scatter(0, order, masses / masses.sum())


def check_draws(draws, expected):
    """A chi-square test beyond six deviations; rare tokens count together, and impossible ones must not come."""
    counts = Counter(draws)
    assert all(expected[token] > 0 for token in counts)
    common = [token for token in range(len(expected)) if expected[token] * len(draws) >= 5]
    assert len(common) > 4
    pairs = [(counts[token], float(expected[token]) * len(draws)) for token in common]
    rest = len(draws) - sum(mean for _, mean in pairs)
    if rest > 1:
        pairs.append((len(draws) - sum(count for count, _ in pairs), rest))
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("driver_class", "settings"),
    [(GenerateDriver, ALL), (ManagerDriver, SHAPED), (ManagerDriver, {"temperature": 0.7, "min_p": 0.02})],
)
def test_draws_have_the_distribution_that_is_asked_for(qwen3, driver_class, settings):
    sampling = Sampling(**settings)
    before = random_states()
    config = make_config(sampling=sampling, max_new_tokens=1, num_blocks=2048)
    with driver_class(qwen3, config) as driver:
        rounds = [ids_of(drive(driver, [PROMPT], num_generations=NUM_DRAWS)) for _ in range(2)]
    assert random_states() == before
    assert rounds[0] != rounds[1]
    with driver_class(qwen3, config) as again:
        repeated = ids_of(drive(again, [PROMPT], num_generations=NUM_DRAWS))
    if driver_class is GenerateDriver:  # the manager's batches depend on its thread
        assert repeated == rounds[0]
    check_draws([token for ids in rounds for (token,) in ids], probabilities(qwen3, PROMPT, sampling))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4, "suppress_token_ids": (7, 30)},
        {"stop_token_ids": tuple(range(0, 97, 9))},
        {"stop_token_ids": tuple(range(0, 97, 9)), "min_new_tokens": 4},
        {"stop_strings": ("A", "&", "p", "'")},
        {"stop_strings": tuple("ABCDEFGHIJKLMNOP"), "min_new_tokens": 3},
    ],
)
def test_generate_does_without_temperature_what_our_own_driver_does(qwen3, prompts, settings):
    def run(driver_class):
        config = make_config(sampling=Sampling(**settings), max_new_tokens=12, eos_token_id=(11,))
        with driver_class(qwen3, config=config, tokenizer=build_tokenizer()) as driver:
            completions = drive(driver, prompts)
        return [(c.completion_ids, c.finish_reason, c.stop_reason) for c in completions]

    expected = run(SyncCBDriver)
    assert run(GenerateDriver) == expected
    if "repetition_penalty" not in settings:
        assert {reason for _, reason, _ in expected} >= {"stop"}


def test_the_manager_ends_at_stop_tokens(make_manager, qwen3, prompts):
    sampling = Sampling(stop_token_ids=tuple(range(0, 97, 9)))
    completions = drive(make_manager(qwen3, sampling=sampling), prompts)
    with SyncCBDriver(qwen3, config=make_config(sampling=sampling)) as ours:
        expected = drive(ours, prompts)
    assert [(c.completion_ids, c.stop_reason) for c in completions] == [
        (c.completion_ids, c.stop_reason) for c in expected
    ]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.7}, SHAPED])
def test_the_managers_log_probabilities_are_those_of_our_own_driver_where_it_has_them(
    make_manager, qwen3, prompts, settings
):
    sampling = Sampling(**settings)
    completions = drive(make_manager(qwen3, sampling=sampling, logprobs=True), prompts)
    columns = set(logprob_columns(sampling, processed=True))
    for completion in completions:
        known, expected = list(completion.prompt_ids), {name: [] for name in columns}
        for token in completion:
            with torch.no_grad():
                logits = qwen3(torch.tensor([known])).logits[0, -1]
            scaled = logits / (sampling.temperature or 1)
            of_each = {"logprobs_raw": logits.log_softmax(0), "logprobs_model": scaled.log_softmax(0)}
            if sampling.temperature:
                of_each["logprobs_sampled"] = probabilities(qwen3, known, sampling).log()
            for name in columns:
                expected[name].append(float(of_each[name][token]))
            known.append(token)
        for name in ("logprobs_model", "logprobs_sampled", "logprobs_raw", "kept_mass"):
            assert getattr(completion, name) == pytest.approx(expected.get(name, ()), abs=1e-4), name


@pytest.mark.parametrize(
    ("settings", "raw", "processed"),
    [
        ({}, "model raw", "model raw"),
        ({"stop_token_ids": (3,)}, "model raw", "model raw"),
        ({"temperature": 1}, "model sampled raw", "model sampled raw"),
        ({"temperature": 0.5}, "raw", "model sampled"),
        ({"temperature": 1, "top_p": 0.9}, "model raw", "sampled"),
        ({"temperature": 0.5, "min_p": 0.1}, "raw", "sampled"),
        ({"repetition_penalty": 1.1}, "model raw", ""),
    ],
)
def test_which_of_our_log_probabilities_a_single_one_is(settings, raw, processed):
    for is_processed, expected in ((False, raw), (True, processed)):
        found = logprob_columns(Sampling(**settings), processed=is_processed)
        assert found == tuple(f"logprobs_{name}" for name in expected.split())


@pytest.mark.parametrize(
    ("driver", "settings", "name"),
    [
        *(("manager", {name: value}, name) for name, value in ALL.items() if name not in {*SHAPED, "min_p"}),
        ("manager", {"min_new_tokens": 2}, "min_new_tokens=2"),
        ("manager", {"stop_strings": ("a",)}, "stop_strings"),
        ("generate", {"logprobs": True}, "logprobs=True"),
        ("vllm", {"suppress_token_ids": (1,)}, "suppress_token_ids"),
        ("vllm", {"temperature": 1, "min_p": 0.1, "top_p": 0.9}, "min_p=0.1"),
        ("vllm", {"temperature": 1, "top_p": 0.0}, "top_p=0.0"),
        ("vllm", {"temperature": 0.001}, "temperature=0.001"),
    ],
)
def test_what_a_driver_would_sample_otherwise_is_refused_by_its_name(driver, settings, name):
    asked = dict(settings)
    logprobs = asked.pop("logprobs", False)
    with pytest.raises(
        EngineError, match=f"^sampling.{name}.* does not work with driver={driver}, .*driver=sync"
    ):
        DRIVERS[driver].check_sampling(Sampling(**asked), logprobs)


def test_drivers_check_it_and_take_no_settings_for_a_single_request(qwen3):
    with pytest.raises(EngineError, match=r"sampling\.logprobs"):
        GenerateDriver(qwen3, make_config(logprobs=True))
    with pytest.raises(EngineError, match=r"sampling\.repetition_penalty"):
        ManagerDriver(qwen3, make_config(sampling=Sampling(repetition_penalty=2.0)))
    with ExitStack() as drivers:
        for driver_class in (GenerateDriver, ManagerDriver):
            driver = drivers.enter_context(driver_class(qwen3, make_config()))
            with pytest.raises(
                ValueError, match=r"prompts\[0\]: this driver samples all its requests by its own"
            ):
                driver.add_requests([PROMPT], sampling=Sampling(temperature=1.0))
