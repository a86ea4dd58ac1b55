"""What the self-check reports and allows: averages over rows, the noise of rounding, the bounds of a dtype."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cbexp.engine.self_check import SelfCheckResult, _rounding_noise, summarize_errors


@pytest.mark.parametrize("num_layers", [4, 36])
def test_rounding_noise_is_that_of_a_rounded_residual_stream(num_layers):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    exact, head = draw(16, 256).bfloat16().float(), draw(256, 2000) / 16
    streams = [exact.bfloat16(), exact.bfloat16()]
    for _ in range(2 * num_layers):
        added = draw(16, 256)
        exact = exact + added
        # Each side has computed what it adds in an order of its own, and rounded that.
        noisy = [added * (1 + 2**-9 * draw(16, 256)) for _ in streams]
        streams = [stream + own.bfloat16() for stream, own in zip(streams, noisy, strict=True)]
    logits = [functional.rms_norm(s.float(), (256,)) @ head for s in streams]
    difference = (logits[0] - logits[1]).abs().mean()
    assert difference < _rounding_noise(logits[0].bfloat16(), num_layers) < 3 * difference


def test_the_average_error_is_over_rows_not_over_batch_sizes():
    def result(num_rows, error):
        logit_errors = error / 10, error / 5
        return SelfCheckResult(num_rows, num_rows, 0, error, 2 * error, *logit_errors, 0.0, 0.0, 0.0, 0.0)

    errors = {
        "mean_logprob_error": 0.18,
        "max_logprob_error": 1.8,
        "mean_logit_error": 0.018,
        "max_logit_error": 0.18,
    }
    assert summarize_errors([result(1, 0.9), result(9, 0.1)]) == pytest.approx(errors)
    assert summarize_errors([]) == dict.fromkeys(errors)


@pytest.mark.parametrize("settings", [{"fusion": "projections"}, {"compile_mode": "default"}], ids=str)
def test_steps_in_float64_are_checked_as_strictly_as_in_float32(
    new_model, make_driver, prompts, greedy, settings
):
    model = new_model("qwen3").to(torch.float64)
    driver = make_driver(model, buckets=(8,), num_blocks=64, **settings)
    driver.add_requests(prompts)
    completions = [completion.completion_ids for completion in driver.drive_until_empty().values()]
    assert completions == [greedy(model, prompt, 12) for prompt in prompts]
    (result,) = driver.resolved["self_check_results"]
    assert result["max_logprob_error"] < 1e-5
    assert result["max_logit_error"] < 1e-5
