"""What add_requests takes and refuses: everything is checked before anything is queued."""

import numpy as np
import pytest
import torch

from tests.engine.driving import drive


@pytest.fixture
def driver(shared_model, make_driver):
    return make_driver(shared_model("qwen3"), num_blocks=16)


CACHE_LIMIT = (
    r"prompts\[1\]: 118 prompt \+ 12 new tokens = 130 can never fit the cache, which holds 128 tokens of one request: "
    "raise num_blocks"
)
MODEL_LIMIT = r"prompts\[0\]: 245 prompt \+ 12 new tokens = 257 exceed the model's 256 positions"
TWO = [[1], [2]]
# Prompts, what else is said of them, the message.
BAD = {
    "no list": (None, {}, r"prompt_ids_list=None is a NoneType: it must be a list of lists of token ids"),
    "a generator": (([1] for _ in range(2)), {}, r"prompt_ids_list=.* is a generator: it must be a list"),
    "empty": ([[1, 2], []], {}, r"prompts\[1\] is empty"),
    "above": ([[1], [2, 97]], {}, r"prompts\[1\]\[1\] is 97: token ids of this model are 0 to 96"),
    "negative": ([[1], [2], [-1]], {}, r"prompts\[2\]\[0\] is -1"),
    "float": ([[1.0]], {}, r"prompts\[0\]\[0\] is 1.0 \(float\): token ids are plain ints"),
    "bool": ([[3, True]], {}, r"prompts\[0\]\[1\] is True \(bool\)"),
    "text": ([[1], "hello"], {}, r"prompts\[1\] is not a sequence of token ids"),
    "flat": ([1, 2, 3], {}, r"prompts\[0\] is not a sequence of token ids: 1"),
    "too long for the cache": ([[1], [1] * 118], {}, CACHE_LIMIT),
    "too long for the model": ([[1] * 245], {}, MODEL_LIMIT),
    "limit: float for all": (TWO, {"max_new_tokens": 1.5}, r"max_new_tokens=1.5 \(float\) must be an int"),
    "limit: text": (TWO, {"max_new_tokens": "55"}, r"max_new_tokens='55' \(str\)"),
    "limit: set": (TWO, {"max_new_tokens": {3, 4}}, r"max_new_tokens=\{3, 4\} \(set\)"),
    "limit: floats": (TWO, {"max_new_tokens": torch.ones(2)}, r"max_new_tokens of prompts\[0\] is 1.0"),
    "limit: zero": (TWO, {"max_new_tokens": 0}, r"max_new_tokens of prompts\[0\] is 0"),
    "limit: negative": (TWO, {"max_new_tokens": [1, -2]}, r"max_new_tokens of prompts\[1\] is -2"),
    "limit: too few": (TWO, {"max_new_tokens": [1]}, "max_new_tokens has 1 values for 2 prompts"),
    "generations: none": (TWO, {"num_generations": 0}, "num_generations=0"),
    "generations: float": (TWO, {"num_generations": 1.5}, "num_generations=1.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_served_is_named_and_nothing_is_queued(driver, case):
    prompts, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        driver.add_requests(prompts, **kwargs)
    assert driver.drive_until_empty() == {}
    assert driver.add_requests([[5]]) == ["req_0"]


@pytest.mark.parametrize("limits", [np.int64(3), np.array([3]), torch.tensor([3]), [np.int32(3)]])
def test_limits_as_numpy_and_torch_have_them(driver, limits):
    tokens = drive(driver, [[1]], max_new_tokens=limits, num_generations=np.int64(2))
    assert [len(completion) for completion in tokens] == [3, 3]


@pytest.mark.parametrize(
    ("family", "settings", "length"),
    [
        # The last token is never stored: 117 + 12 - 1 tokens fill 16 blocks of 8.
        ("qwen3", {"num_blocks": 16}, 117),
        # A growing cache refuses nothing that the model takes.
        ("qwen3", {}, 244),
        # Sliding layers alone keep two pages of a window of 12, so any prompt fits a cache of 16 tokens.
        ("mistral", {"num_blocks": 2}, 200),
    ],
)
def test_what_fits_exactly_is_served(check_drive, make_prompts, family, settings, length):
    driver = check_drive(family, [[1]], **settings)
    check_drive(family, make_prompts((length,)), driver=driver)


def test_several_calls_make_one_round_in_order(driver, make_prompts):
    assert driver.add_requests([]) == []
    assert driver.drive_until_empty() == {}
    assert driver.steps == []
    first = driver.add_requests(make_prompts((3, 4)), num_generations=2, max_new_tokens=5)
    second = driver.add_requests(tuple(map(tuple, make_prompts((9,)))), max_new_tokens=1)
    assert (first, second) == (["req_0", "req_1", "req_2", "req_3"], ["req_4"])
    completions = driver.drive_until_empty()
    assert list(completions) == first + second
    assert [len(c) for c in completions.values()] == [5, 5, 5, 5, 1]
    assert driver.add_requests([[1]]) == ["req_5"]
