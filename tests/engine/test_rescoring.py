"""Rescoring: faults that the self-check cannot see, planted in a driver; right drives pass; the figures are right."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from peft import LoraConfig, get_peft_model

from cbexp.engine import EngineError, SyncCBDriver
from cbexp.engine import rescoring as rescoring_module
from cbexp.engine.attention import attention
from cbexp.engine.decode import Decoder
from cbexp.engine.rescoring import RescoredCompletion, Rescoring, rescore, takes_best_tokens
from cbexp.engine.types import Sampling
from cbexp.engine.upstream import Batcher
from tests.engine.models import VOCAB_SIZE, random_prompts

PROMPTS = random_prompts((1, 2, 7, 16, 17, 40, 20, 21), seed=3)


def rescore_rounds(model, driver, num_rounds=1):
    """All completions of some rounds, by the model itself."""
    sampling = Sampling(**driver.resolved["sampling"])
    rescored = []
    for index in range(num_rounds):
        driver.add_requests(PROMPTS)
        rescored += [
            rescore(
                model,
                f"round {index}, {completion.request_id}",
                prompt,
                completion.completion_ids,
                logprobs=completion.logprobs_model or None,
                temperature=sampling.temperature,
            )
            for prompt, completion in zip(PROMPTS, driver.drive_until_empty().values(), strict=True)
        ]
    return Rescoring(rescored, takes_best_tokens(sampling))


# What is wrong


def change_result(monkeypatch, kind, method, change):
    """Have a method of a class return what `change` makes of its result and its object."""
    original = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, *args: change(self, original(self, *args)))


def change_rows(monkeypatch, change):
    change_result(monkeypatch, Batcher, "_build_rows", lambda self, rows: change(rows))


def exchange_results(monkeypatch):
    """Of the last two requests, whose prompts are about as long."""

    def exchange(driver, completions):
        *_, one, other = completions
        return completions | {one: completions[other], other: completions[one]}

    change_result(monkeypatch, SyncCBDriver, "drive_until_empty", exchange)


def feed_one_off(monkeypatch):
    """Each row has the token of its neighbour."""
    change_rows(
        monkeypatch,
        lambda rows: [replace(row, token_id=rows[place - 1].token_id) for place, row in enumerate(rows)],
    )


def place_one_off(step):
    def plant(monkeypatch):
        change_rows(
            monkeypatch, lambda rows: [replace(row, position=max(0, row.position + step)) for row in rows]
        )

    return plant


def exchange_tables(monkeypatch):
    def exchange(rows):
        one, other, *rest = rows
        return [replace(one, blocks=other.blocks), replace(other, blocks=one.blocks), *rest]

    change_rows(monkeypatch, lambda rows: exchange(rows) if len(rows) > 1 else rows)


def reserve_nothing(monkeypatch):
    """Tokens of a burst go beyond the blocks that their rows have."""
    monkeypatch.setattr(Batcher, "_reserve_room", lambda self, states, num_steps: num_steps)


def weaken_prompts(monkeypatch):
    original = attention.attend_packed
    monkeypatch.setattr(attention, "attend_packed", lambda *args: 0.9 * original(*args))


def sharpen_later(monkeypatch):
    """The scale of attention is another one after the first drive."""
    original, drives = attention.paged_decode_attention, []
    begin = Decoder.begin

    def attend(*args):
        args = list(args)
        args[7] *= 1 if len(drives) == 1 else 1.2
        return original(*args)

    monkeypatch.setattr(attention, "paged_decode_attention", attend)
    monkeypatch.setattr(Decoder, "begin", lambda self, *args: drives.append(self) or begin(self, *args))


FAULTS = {
    "results of two requests exchanged": exchange_results,
    "a row fed one off": feed_one_off,
    "a row placed one too far": place_one_off(1),
    "a row placed one short": place_one_off(-1),
    "tables of two rows exchanged": exchange_tables,
    "blocks never reserved": reserve_nothing,
    "prompts' attention off by a tenth": weaken_prompts,
    "a scale wrong only after the first round": sharpen_later,
}


SUBTLE = ("results of two requests exchanged", "a scale wrong only after the first round")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FAULTS), (SUBTLE[1], torch.bfloat16)],
    ids=str,
)
def test_a_fault_that_the_self_check_cannot_see_is_found(new_model, make_driver, monkeypatch, name, dtype):
    model = new_model("qwen3").to(dtype)
    driver = make_driver(model, fusion="projections")
    FAULTS[name](monkeypatch)
    problem = rescore_rounds(model, driver, num_rounds=2).find_problem()
    assert "less likely than the best one" in (problem or "")
    assert driver.resolved["self_check_results"]  # which were passed


@pytest.mark.parametrize("name", [None, *SUBTLE])
def test_a_fault_in_sampled_rounds_is_found_by_their_log_probabilities(
    shared_model, make_driver, monkeypatch, name
):
    """With all that changes a distribution: log-probabilities are the model's own."""
    model, sampling = shared_model("qwen3"), Sampling(0.8, top_k=20, top_p=0.9, repetition_penalty=1.2)
    driver = make_driver(model, sampling=sampling, logprobs=True)
    if name is not None:
        FAULTS[name](monkeypatch)
    rescoring = rescore_rounds(model, driver, num_rounds=2)
    if name is None:
        assert (rescoring.find_problem(), rescoring.is_greedy) == (None, False)
        assert rescoring.figures == pytest.approx(
            {"kl": 0.0, "max_logprob_difference": 0.0, "beyond_cap_share": 0.0}, abs=1e-4
        )
    else:
        assert "KL divergence" in rescoring.find_problem()


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -2])
def test_a_token_outside_the_vocabulary_is_refused_by_name(shared_model, make_driver, monkeypatch, token_id):
    def spoil(driver, completions):
        last = list(completions)[-1]
        ids = (*completions[last].completion_ids[:-1], token_id)
        return completions | {last: replace(completions[last], completion_ids=ids)}

    change_result(monkeypatch, SyncCBDriver, "drive_until_empty", spoil)
    model = shared_model("qwen3")
    message = rf"round 0, req_7, completion\[11\] is {token_id}: token ids of this model are 0 to 96"
    with pytest.raises(EngineError, match=message):
        rescore_rounds(model, make_driver(model))


# What is right


@pytest.mark.parametrize(
    ("family", "num_layers", "scale"),
    [
        ("gemma2", 2, 1.0),  # caps its logits
        ("qwen3_moe", 2, 1.0),  # rounding chooses other experts: single tokens lag by more than a nat
        ("qwen3", 2, 0.05),  # hardly any token is likelier than another
        pytest.param("qwen3", 80, 0.5, marks=pytest.mark.slow),
    ],
)
def test_right_tokens_in_half_precision_pass_and_those_of_another_prompt_do_not(
    new_model, make_driver, family, num_layers, scale
):
    model = new_model(family, num_hidden_layers=num_layers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    driver = make_driver(model.bfloat16())
    driver.add_requests(PROMPTS)
    tokens = [completion.completion_ids for completion in driver.drive_until_empty().values()]

    def rescore_with(prompts):
        return Rescoring([rescore(model, "it", *pair) for pair in zip(prompts, tokens, strict=True)], True)

    right, wrong = rescore_with(PROMPTS), rescore_with([*PROMPTS[:-2], PROMPTS[-1], PROMPTS[-2]])
    assert (right.find_problem(), right.num_tokens) == (None, 8 * 12)
    assert wrong.find_problem() is not None


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_scores_are_those_of_the_whole_forward_and_the_layers_run_once(shared_model, monkeypatch, family):
    """The temperature is the one that log-probabilities are of."""
    model, prompt, tokens = shared_model(family), *random_prompts((9, 8))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, 8:-1].double()
    raw = logits.log_softmax(-1)
    ids = torch.tensor(tokens)[:, None]
    expected = (logits / 0.7).log_softmax(-1).gather(1, ids)[:, 0]
    runs = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    monkeypatch.setattr(rescoring_module, "MAX_LOGITS", 3 * VOCAB_SIZE)
    scored = rescore(model, "it", prompt, tokens, logprobs=[-1.0] * 8, temperature=0.7)
    hook.remove()
    assert len(runs) == 1
    torch.testing.assert_close(scored.differences, expected + 1.0, rtol=0, atol=1e-5)
    torch.testing.assert_close(scored.lags, (raw.amax(-1) - raw.gather(1, ids)[:, 0]), rtol=0, atol=1e-5)
    assert "forward" not in model.model.__dict__


def test_the_model_runs_as_it_is_trained_but_for_dropout(new_model):
    """With its adapter, in the autocast of its wrappers; and it is left as it was."""
    model = new_model("qwen3", attention_dropout=0.9)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    prompt, tokens = random_prompts((9, 8))

    def score(wrapped):
        return rescore(wrapped, "it", prompt, tokens, logprobs=[0.0] * 8)

    plain = score(adapted)
    adapted.train()
    model.model.layers[0].eval()
    assert torch.equal(score(adapted).differences, plain.differences)
    assert (adapted.training, model.model.layers[0].training, model.lm_head.training) == (True, False, True)
    with adapted.disable_adapter():
        assert not torch.allclose(score(adapted).differences, plain.differences)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.eval()
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, 8:-1].float()
        model.train()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].double()
    adapted.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(adapted.forward))
    rounded = score(torch.nn.DataParallel(adapted))
    torch.testing.assert_close(rounded.differences, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(rounded.differences, plain.differences, atol=1e-4)
    assert rounded.lag_bounds.min() > 100 * plain.lag_bounds.max()


# Figures


def completion_of(differences=None, lags=(0.0, 0.0), bound=1.0, mean_bound=0.1, num_rerouted=0):
    lags = torch.tensor(lags, dtype=torch.float64)
    return RescoredCompletion(
        name="it",
        lags=lags,
        lag_bounds=torch.full_like(lags, bound),
        mean_lag_bounds=torch.full_like(lags, mean_bound),
        num_rerouted=num_rerouted,
        differences=None if differences is None else torch.tensor(differences, dtype=torch.float64),
    )


def test_figures_of_log_probabilities():
    """Forward minus driver: ratios are exp of their sums."""
    rescoring = Rescoring([completion_of([0.5, 0.7]), completion_of([-0.3, 0.1])], is_greedy=False)
    kl = sum(math.exp(d) - 1 - d for d in (0.5, 0.7, -0.3, 0.1)) / 4
    expected = {"kl": kl, "max_logprob_difference": 0.7, "beyond_cap_share": 0.5}
    assert rescoring.figures == pytest.approx(expected)
    assert rescoring.details == pytest.approx({"mean_logprob_difference": 0.4, "k1": -0.25, "k3": kl})
    assert [completion.ratio for completion in rescoring.completions] == pytest.approx(
        [math.exp(1.2), math.exp(-0.2)]
    )
    assert completion_of([400.0, 400.0]).ratio == rescoring_module.LARGEST_RATIO
    assert re.fullmatch(
        r"the driver's .* KL divergence of 0\.\d+ nats, .* 0\.015 at most\.", rescoring.find_problem()
    )
    assert Rescoring([completion_of([0.15, -0.15])], is_greedy=False).find_problem() is None
    # Of greedy tokens the distribution is not known by those that were drawn.
    assert Rescoring([completion_of([0.5, 0.7])], is_greedy=True).find_problem() is None


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ({"lags": [0.0, 0.1, 0.1]}, None),
        ({"lags": [0.0, 1.1] + [0.0] * 20}, "it: token 1 is less likely than the best one by 1.1 nats"),
        ({"lags": [0.0, math.nan]}, "on average by nan"),
        ({"lags": [0.2, 0.2]}, "on average by 0.2 nats, where rounding makes 0.1 at most"),
        ({"lags": [9.0, 9.0, 0.0], "num_rerouted": 2}, None),
        ({"lags": [9.0, 9.0, 9.0], "num_rerouted": 2}, "of 3 tokens 3 are beyond that"),
        ({"lags": [9.0], "differences": [0.1]}, "it: token 0"),
    ],
)
def test_a_greedy_token_that_lags_is_a_problem(completion, problem):
    rescoring = Rescoring([completion_of(**completion)], is_greedy=True)
    if problem is None:
        assert rescoring.find_problem() is None
    else:
        assert problem in rescoring.find_problem()
    assert Rescoring([completion_of(lags=completion["lags"])], is_greedy=False).find_problem() is None


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(top_k=3, top_p=0.5, stop_token_ids=(1,)), True),
        (Sampling(temperature=0.1), False),
        (Sampling(repetition_penalty=1.1), False),
        (Sampling(min_new_tokens=2), False),
        (Sampling(suppress_token_ids=(1,)), False),
    ],
)
def test_which_tokens_are_to_be_the_best_ones(sampling, expected):
    assert takes_best_tokens(sampling) is expected


@pytest.mark.parametrize(
    ("prompt", "tokens", "logprobs", "message"),
    [
        ([1], [], None, "it, completion is empty"),
        ([VOCAB_SIZE], [1], None, r"it, prompt\[0\] is 97"),
        ([1], [2, 3], [0.0], "it has 2 tokens and 1 log-probabilities"),
        ([1], [2], [math.nan], "it: a log-probability of the driver's is not finite"),
    ],
)
def test_what_cannot_be_rescored_is_refused(shared_model, prompt, tokens, logprobs, message):
    with pytest.raises(EngineError, match=message):
        rescore(shared_model("qwen3"), "it", prompt, tokens, logprobs=logprobs)


def test_logits_that_are_not_finite_are_the_models_fault(new_model):
    model = new_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight[3] = math.inf
    with pytest.raises(EngineError, match="it: the model's own logits are not finite; look at its weights"):
        rescore(model, "it", [1], [2])
