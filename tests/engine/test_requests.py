"""What add_requests takes and refuses: everything is checked before anything is queued."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture
def driver(shared_model, make_driver):
    return make_driver(shared_model("qwen3"), num_blocks=16)


BAD_PROMPTS = {
    "empty": ([[1, 2], []], r"prompts\[1\] is empty"),
    "above the vocabulary": ([[1], [2, 97]], r"prompts\[1\]\[1\] is 97: token ids of this model are 0 to 96"),
    "negative": ([[1], [2], [-1]], r"prompts\[2\]\[0\] is -1"),
    "float": ([[1.0]], r"prompts\[0\]\[0\] is 1.0 \(float\): token ids are plain ints"),
    "bool": ([[3, True]], r"prompts\[0\]\[1\] is True \(bool\)"),
    "text": ([[1], "hello"], r"prompts\[1\] is not a sequence of token ids"),
    "flat": ([1, 2, 3], r"prompts\[0\] is not a sequence of token ids: 1"),
    "nested": ([[[1, 2]]], r"prompts\[0\]\[0\] is \[1, 2\] \(list\)"),
    "too long for the cache": (
        [[1], [1] * 118],
        r"prompts\[1\]: 118 prompt \+ 12 new tokens = 130 can never fit the cache, which holds 128 tokens of one "
        r"request: raise num_blocks",
    ),
    "too long for the model": (
        [[1] * 245],
        r"prompts\[0\]: 245 prompt \+ 12 new tokens = 257 exceed the model's 256 positions "
        r"\(max_position_embeddings\)",
    ),
}


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_named_and_nothing_is_queued(driver, prompts, message):
    with pytest.raises(ValueError, match=message):
        driver.add_requests(prompts)
    assert driver.drive_until_empty() == {}
    assert driver.add_requests([[5]]) == ["req_0"]


@pytest.mark.parametrize(
    "prompts", [None, 5, ([1] for _ in range(2))], ids=lambda value: type(value).__name__
)
def test_what_is_no_list_of_prompts_is_named(driver, prompts):
    with pytest.raises(ValueError, match=r"prompt_ids_list=.* is a \w+: it must be a list of prompts"):
        driver.add_requests(prompts)
    assert driver.add_requests([[5]]) == ["req_0"]


@pytest.mark.parametrize(
    "limits", [np.int64(3), torch.tensor(3), np.array([3]), torch.tensor([3]), [np.int32(3)]]
)
def test_limits_as_numpy_and_torch_have_them(driver, limits):
    driver.add_requests([[1]], max_new_tokens=limits, num_generations=np.int64(2))
    assert [len(completion) for completion in driver.drive_until_empty().values()] == [3, 3]


BAD_LIMITS = {
    "a float for all": (1.5, r"max_new_tokens=1.5 \(float\) must be an int of at least 1, or a list"),
    "text": ("55", r"max_new_tokens='55' \(str\)"),
    "a set": ({3, 4}, r"max_new_tokens=\{3, 4\} \(set\)"),
    "a tensor of floats": (torch.tensor([1.0, 2.0]), r"max_new_tokens of prompts\[0\] is 1.0"),
    "a column": (torch.tensor([[1], [2]]), r"max_new_tokens of prompts\[0\] is \[1\]"),
    "true": (torch.tensor(True), r"max_new_tokens of prompts\[0\] is True"),
    "zero": (0, r"max_new_tokens of prompts\[0\] is 0"),
    "negative in a list": ([1, -2], r"max_new_tokens of prompts\[1\] is -2"),
    "float": ([1, 2.0], r"max_new_tokens of prompts\[1\] is 2.0"),
    "too few": ([1], "max_new_tokens has 1 values for 2 prompts"),
    "too many": ([1, 2, 3], "max_new_tokens has 3 values for 2 prompts"),
}


@pytest.mark.parametrize(("limits", "message"), BAD_LIMITS.values(), ids=BAD_LIMITS.keys())
def test_a_bad_limit_is_named_and_nothing_is_queued(driver, limits, message):
    with pytest.raises(ValueError, match=message):
        driver.add_requests([[1], [2]], max_new_tokens=limits)
    assert driver.drive_until_empty() == {}


@pytest.mark.parametrize("num_generations", [0, -1, 1.5, True])
def test_a_bad_number_of_generations(driver, num_generations):
    with pytest.raises(ValueError, match="num_generations"):
        driver.add_requests([[1]], num_generations=num_generations)


def test_what_fits_exactly_is_served(driver, make_prompts, reference):
    """The last token is never stored: 117 + 12 - 1 tokens fill 16 blocks of 8."""
    (prompt,) = make_prompts((117,))
    driver.add_requests([prompt])
    (completion,) = driver.drive_until_empty().values()
    assert completion.completion_ids == reference("qwen3", prompt, 12)
    assert driver.steps[-1].cache_used_fraction == 1


def test_a_growing_cache_refuses_nothing_that_the_model_takes(
    shared_model, make_driver, make_prompts, reference
):
    driver = make_driver(shared_model("qwen3"))
    driver.add_requests([[1]])
    driver.drive_until_empty()
    (prompt,) = make_prompts((244,))
    driver.add_requests([prompt])
    (completion,) = driver.drive_until_empty().values()
    assert completion.completion_ids == reference("qwen3", prompt, 12)


def test_a_window_bounds_what_a_request_stores(shared_model, make_driver, make_prompts, reference):
    """Sliding layers alone keep two pages of a window of 12, so a prompt of 200 fits a cache of 16 tokens."""
    driver = make_driver(shared_model("mistral"), num_blocks=2)
    (prompt,) = make_prompts((200,))
    driver.add_requests([prompt])
    (completion,) = driver.drive_until_empty().values()
    assert completion.completion_ids == reference("mistral", prompt, 12)


def test_no_prompts_are_no_error(driver):
    assert driver.add_requests([]) == []
    assert driver.drive_until_empty() == {}
    assert driver.steps == []


def test_several_calls_make_one_round_in_order(driver, make_prompts):
    first = driver.add_requests(make_prompts((3, 4)), num_generations=2, max_new_tokens=5)
    second = driver.add_requests(tuple(map(tuple, make_prompts((9,)))), max_new_tokens=1)
    assert first == ["req_0", "req_1", "req_2", "req_3"]
    assert second == ["req_4"]
    completions = driver.drive_until_empty()
    assert list(completions) == first + second
    assert [len(c) for c in completions.values()] == [5, 5, 5, 5, 1]
    assert driver.add_requests([[1]]) == ["req_5"]
