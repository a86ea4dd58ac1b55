"""What of a run is rescored, and what the records say of it."""

import json

import pytest
import torch

from cbexp.config import RescoreConfig
from cbexp.engine.rescoring import RescoredCompletion, Rescoring
from cbexp.rescoring import choose_sample, describe_rescoring, list_details


@pytest.mark.parametrize(
    ("completions", "num_rounds", "num_requests", "expected"),
    [("8", 5, 256, 8), ("8", 1, 6, 6), ("8", 3, 6, 8), ("all", 3, 6, 18), ("1", 5, 256, 1), ("0", 2, 6, 0)],
)
def test_a_sample_is_of_all_rounds_and_of_all_parts_of_a_round(
    completions, num_rounds, num_requests, expected
):
    samples = [
        choose_sample(RescoreConfig(completions), num_rounds, num_requests, seed) for seed in (1, 1, 2)
    ]
    assert samples[0] == samples[1]
    assert (len(samples[0]), len(set(samples[0]))) == (expected, expected)
    if expected:
        rounds, requests = zip(*samples[0], strict=True)
        assert set(rounds) == set(range(num_rounds)) or len(rounds) < num_rounds
        assert num_requests - 1 in requests
        assert len(set(requests)) == min(expected, num_requests)
    if num_requests == 256 and expected > 1:
        assert samples[2] != samples[0]
        assert {request // 32 for request in requests} == set(range(8))


def rescoring_of(is_greedy, differences=None):
    lags = torch.tensor([0.0, 0.5], dtype=torch.float64)
    if differences is not None:
        differences = torch.tensor(differences, dtype=torch.float64)
    return Rescoring(
        [RescoredCompletion("round 1, req_0", lags, lags + 1, lags + 1, 0, differences)], is_greedy
    )


COUNTS = {"num_completions": 1, "num_tokens": 2}
GREEDY = {"max_lag": 0.5, "mean_lag": 0.25, "not_best_share": 0.5}
SAMPLED = {"kl": 0.005008, "max_logprob_difference": 0.1, "beyond_cap_share": 0.0}


@pytest.mark.parametrize(
    ("is_greedy", "differences", "figures", "note"),
    [
        (True, None, GREEDY, None),
        (True, [0.1, -0.1], GREEDY | SAMPLED, None),
        (False, [0.1, -0.1], SAMPLED, None),
        (
            False,
            None,
            {},
            "driver=manager gives no log-probabilities: only that logits are finite was checked",
        ),
    ],
)
def test_records_have_the_figures_that_exist(is_greedy, differences, figures, note):
    rescoring = rescoring_of(is_greedy, differences)
    summary = describe_rescoring(rescoring, "manager")
    assert summary.pop("note") == note
    assert summary == pytest.approx(COUNTS | figures, rel=1e-3)
    details = json.loads(json.dumps(list_details(rescoring, summary), allow_nan=False))
    (row,) = details["completions"]
    assert row.items() >= figures.items() if not differences else row["ratio"] == pytest.approx(1.0)
    assert (row["name"], row["num_tokens"], details["problem"]) == ("round 1, req_0", 2, None)
    assert ("k1" in details, "k1" in row) == (bool(differences), bool(differences))
