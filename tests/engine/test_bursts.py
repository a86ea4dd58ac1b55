"""Bursts: their number and shapes, the batch sizes that are made ready, and what they may write."""

import math

import pytest
import torch
from torch import nn

from cbexp.engine.decode.shapes import ADMISSION_BURST, TAIL_BURST_ON_CPU
from cbexp.engine.decode.step import EagerSteps
from tests.engine.driving import drive


def test_with_an_eos_the_host_looks_more_often(check_drive, make_prompts, references):
    """While requests wait, to let others in; in the tail, to shrink the batch."""
    prompts = make_prompts((10,) * 5)
    made = {token for tokens in references("qwen3", prompts, 41) for token in tokens}
    unused = (next(token for token in range(97) if token not in made),)
    driver = check_drive("qwen3", prompts, 41, unused, max_requests_per_batch=4, num_blocks=200)
    num_waiting, num_tail = math.ceil(40 / ADMISSION_BURST), math.ceil(40 / TAIL_BURST_ON_CPU)
    steps = [step for step in driver.steps if step.kind == "decode"]
    assert len(steps) == num_waiting + num_tail
    assert steps[0].num_steps == ADMISSION_BURST
    assert steps[num_waiting].num_steps == TAIL_BURST_ON_CPU


def test_a_row_that_ends_early_idles_and_the_batch_shrinks(check_drive, make_prompts):
    settings = {"num_blocks": 100, "max_requests_per_batch": 4}
    driver = check_drive("qwen3", make_prompts((9, 9, 9)), [41, 11, 21], **settings)
    # Three rows compute four; the first end leaves two.
    steps = [(s.num_steps, s.bucket, s.num_tokens, s.num_padding) for s in driver.steps[1:]]
    assert steps == [(10, 4, 30, 10), (10, 2, 20, 0), (20, 1, 20, 0)]
    assert [step.num_finished for step in driver.steps] == [0, 1, 1, 1]


def test_a_crowded_cache_shortens_bursts_before_it_evicts(check_drive, make_prompts):
    """0.6 of the blocks that all need at full length: every request comes through, most steps still in bursts."""
    driver = check_drive("qwen3", make_prompts((8,) * 6), 57, num_blocks=int(0.6 * 6 * 8))
    bursts = [step for step in driver.steps if step.bucket is not None]
    assert sum(step.num_steps for step in bursts) > 5 * len(bursts)
    assert any(step.bucket is None and step.kind == "decode" for step in driver.steps), "nobody was evicted"
    assert max(step.num_waiting for step in driver.steps[1:]) > 0


@pytest.mark.parametrize("has_fixed_size", [True, False])
def test_every_size_is_prepared_once_for_weights_that_stay(
    new_model, make_driver, prompts, has_fixed_size, monkeypatch
):
    """By the warm-up the largest first; without a cache of a fixed size when it comes."""
    model, settings = new_model("qwen3"), {"num_blocks": 64} if has_fixed_size else {}
    driver = make_driver(model, max_requests_per_batch=4, **settings)
    prepared = []
    monkeypatch.setattr(EagerSteps, "prepare", lambda steps, bucket: prepared.append(bucket))
    driver.warmup()
    assert prepared == ([4, 2, 1] if has_fixed_size else [])
    for _ in range(2):
        drive(driver, prompts[:3], max_new_tokens=[20, 5, 30])
        driver.warmup()
        assert prepared == [4, 2, 1]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    driver.warmup()
    assert prepared == [4, 2, 1] * 2


@pytest.mark.parametrize(("family", "batch_shape"), [("qwen3", "buckets"), ("mistral", "full")])
def test_nan_in_one_request_stays_there(new_model, make_driver, greedy, family, batch_shape):
    """The poisoned rows end beside the others, and pages of theirs are used again afterwards."""
    model, poison = new_model(family), 96
    prompts = [[1, 2, 3, 4, 5], [6, poison, 7], [8] * 12, [9, 10, poison], [11, 12]]
    clean = [index for index, prompt in enumerate(prompts) if poison not in prompt]
    expected = [greedy(model, prompts[index], 20) for index in clean]
    assert not any(poison in tokens for tokens in expected)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = math.nan
    driver = make_driver(model, max_new_tokens=20, num_blocks=24, batch_shape=batch_shape)
    # Pages are given out in the order of the prompts.
    for order in ((0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (4, 2, 0, 3, 1)):
        completions = drive(driver, [prompts[index] for index in order])
        assert [completions[order.index(index)] for index in clean] == expected
        assert [len(tokens) for tokens in completions] == [20 if index in clean else 0 for index in order]
    assert drive(driver, [prompts[index] for index in clean]) == expected
