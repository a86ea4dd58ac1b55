"""The kernels that sample, in Triton's interpreter; run by `test_interpreted`."""

import random

import pytest
import torch

from cbexp.engine.kernels import sampling as kernels
from cbexp.engine.sampling import sample_plainly
from tests.engine.kernels.cases import build_sampling_case, check_sampled, mostly_slow, randn

SETTINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 30.0},
    "cold": {"temperature": 1e-5},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k of more than tiles": {"temperature": 1.0, "top_k": 40},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "top-p of 0": {"temperature": 1.0, "top_p": 0.0},
    "min-p": {"temperature": 2.0, "min_p": 0.3},
    "all": {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "penalty": 1.5, "is_early": True},
    "penalty": {"temperature": 1.0, "penalty": 0.5},
    "suppressed": {"temperature": 1.0, "suppressed": True},
    "greedy, suppressed": {"suppressed": True, "penalty": 2.0, "is_early": True},
}


@pytest.mark.parametrize("dtype", mostly_slow(torch.bfloat16, torch.float32))
@pytest.mark.parametrize("vocab_size", mostly_slow(1000, 128, 97, 4097))
def test_each_setting(vocab_size, dtype):
    """Rows of all settings side by side choose what plain torch chooses, whatever the number of rows."""
    logits = (3 * randn(len(SETTINGS), vocab_size)).to(dtype)
    case = build_sampling_case(logits, list(SETTINGS.values()))
    check_sampled(kernels.sample(*case), sample_plainly(*case))


def test_rows_that_do_not_choose():
    """Inactive ones, and those with a NaN, an infinity, or nothing left; the others are as without them."""
    logits = 2 * randn(6, 300)
    settings = [{"temperature": 1.0}] * 6
    expected = sample_plainly(*build_sampling_case(logits.clone(), settings))
    logits[1, 299], logits[2, 0], logits[3] = torch.nan, torch.inf, -torch.inf
    case = build_sampling_case(logits, settings)
    case[2][4] = -1
    tokens, _, logprobs = kernels.sample(*case)
    assert tokens[[1, 2, 3]].tolist() == [-2, -2, -2]
    assert logprobs.isfinite().all()
    assert tokens[[0, 5]].tolist() == expected[0][[0, 5]].tolist()
    torch.testing.assert_close(logprobs[[0, 5]], expected[2][[0, 5]], rtol=1e-4, atol=1e-5)


def test_random_settings():
    rng = random.Random(0)
    settings = [
        {
            "temperature": rng.choice([0.0, 0.3, 1.0, 3.0]),
            "top_k": rng.choice([0, 1, 5, 200]),
            "top_p": rng.choice([1.0, rng.random()]),
            "min_p": rng.choice([0.0, rng.random()]),
            "penalty": rng.choice([1.0, rng.uniform(0.3, 3)]),
            "suppressed": rng.random() < 0.3,
            "is_early": rng.random() < 0.3,
        }
        for _ in range(24)
    ]
    case = build_sampling_case(4 * randn(24, 700, seed=3), settings)
    check_sampled(kernels.sample(*case), sample_plainly(*case))
