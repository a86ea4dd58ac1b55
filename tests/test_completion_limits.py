"""Limits of new tokens: one for all, from a file, drawn; and what they do to plans, caches and records."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from cbexp.config import DatasetConfig, ExperimentConfig, ModelConfig, SamplingConfig
from cbexp.dataset.completion_limits import draw_limits, load_completion_limits
from cbexp.errors import ConfigError
from cbexp.planning import cache_sizing
from cbexp.planning.dry_run import summarize_dry_run
from cbexp.planning.plan import build_plan
from tests.model_fixtures import QWEN3

DRAWN = SamplingConfig(max_new_tokens=8192, median_new_tokens=600)


def experiment(sampling: SamplingConfig, num_prompts: int = 3, seed: int = 0) -> ExperimentConfig:
    config = ExperimentConfig(
        model=ModelConfig(name="test", init="random", architecture=QWEN3, device="cpu"),
        dataset=DatasetConfig(
            kind="synthetic", name="synthetic", num_prompts=num_prompts, min_length=5, max_length=5
        ),
        sampling=sampling,
        seed=seed,
    )
    config.cache.page_size = 16
    return config


def from_file(tmp_path, text: str, num_prompts: int = 3) -> ExperimentConfig:
    path = tmp_path / "limits.json"
    path.write_text(text)
    return experiment(SamplingConfig(max_new_tokens_file=str(path)), num_prompts)


def test_one_limit_holds_for_every_prompt():
    assert load_completion_limits(experiment(SamplingConfig(max_new_tokens=7))) == [7, 7, 7]
    assert load_completion_limits(experiment(SamplingConfig())) == [512] * 3


def test_limits_of_a_file_are_taken_in_order(tmp_path):
    assert load_completion_limits(from_file(tmp_path, "[4, 90, 1]")) == [4, 90, 1]


@pytest.mark.parametrize("text", ["4 90 1", "{}", "[4, 0, 1]", "[4, 1.5, 2]", '[4, "5", 2]', "[true, 4, 5]"])
def test_file_that_is_no_list_of_limits_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens_file=.*limits.json"):
        load_completion_limits(from_file(tmp_path, text))


def test_file_that_is_not_there_or_has_another_number_of_limits_is_refused(tmp_path):
    config = experiment(SamplingConfig(max_new_tokens_file=str(tmp_path / "none.json")))
    with pytest.raises(ConfigError, match=r"none.json.* cannot be read: "):
        load_completion_limits(config)
    for num_prompts in (2, 4):
        with pytest.raises(ConfigError, match=f"has 3 limits, and dataset.num_prompts={num_prompts}"):
            load_completion_limits(from_file(tmp_path, "[4, 90, 1]", num_prompts))


def test_drawn_limits_are_log_normal():
    limits = draw_limits(DRAWN, 20_000, seed=1)
    logarithms = [math.log(limit) for limit in limits]
    assert statistics.median(limits) == pytest.approx(600, rel=0.03)
    assert statistics.stdev(logarithms) == pytest.approx(1.0, rel=0.03)
    assert max(limits) == 8192
    assert min(limits) >= 1
    assert (
        draw_limits(SamplingConfig(max_new_tokens=9, median_new_tokens=5, sigma_new_tokens=0), 4, 0)
        == [5] * 4
    )


def test_drawn_limits_are_fixed_by_their_seed_and_begin_alike():
    assert draw_limits(DRAWN, 8, seed=1) == draw_limits(DRAWN, 20, seed=1)[:8]
    assert draw_limits(DRAWN, 8, seed=1) != draw_limits(DRAWN, 8, seed=2)
    own = SamplingConfig(max_new_tokens=8192, median_new_tokens=600, new_tokens_seed=5)
    assert load_completion_limits(experiment(own, seed=1)) == load_completion_limits(experiment(own, seed=2))
    assert load_completion_limits(experiment(DRAWN, seed=1)) == draw_limits(DRAWN, 3, seed=1)


def test_plan_counts_every_request_at_its_own_length(tmp_path):
    config = from_file(tmp_path, "[4, 90, 1]")
    plan = build_plan(config)
    assert (plan.limits, plan.max_new_tokens) == ((4, 90, 1), 90)
    assert json.loads(json.dumps(plan.to_dict()))["mean_max_new_tokens"] == pytest.approx(95 / 3)
    size = cache_sizing.size_cache(plan, [5, 5, 20], 2, rounding_blocks=0, free_bytes=2**30)
    assert size.num_blocks == 2 * (1 + 6 + 2)
    report = summarize_dry_run(config)
    assert report.cache_tokens_asked == (1 + 6 + 1) * 16
    assert report.longest_request_tokens == 6 * 16


def test_request_that_is_too_long_is_the_longest_with_its_own_limit(tmp_path):
    config = from_file(tmp_path, "[200, 90, 1]")
    plan = build_plan(config)
    with pytest.raises(ConfigError, match="prompt 1 has 170 tokens, which with 90 new tokens exceed"):
        cache_sizing.check_prompt_lengths(plan, [5, 170, 250])
    config.cache.num_tokens = 64
    with pytest.raises(ConfigError, match=r"prompt 0 needs 13 .* \(5 prompt \+ 200 new\)"):
        cache_sizing.size_cache(build_plan(config), [5, 5, 5], 1, rounding_blocks=0, free_bytes=2**30)
