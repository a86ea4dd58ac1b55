"""Decode steps of transformers' models compiled on a CPU: whole or by layers, over training and after failures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cbexp.engine.compile_modes import build_step_runner
from cbexp.engine.compiled_layers import find_decoder_layers
from cbexp.engine.compiler_session import CompileOptions, compile_alone
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.self_check import check_bucket
from cbexp.engine.types import EngineError, UnsupportedModelError
from tests.engine.decode_fixtures import (
    build_buffers,
    build_decode_model,
    build_pools,
    set_rows,
    state_of,
)

POSITIONS = (3, 9, -1, 8, 15, 0, 12, 7)
MAX_ROWS = 9


def build_model_runners(family, region):
    model = build_decode_model(family)
    buffers = build_buffers(MAX_ROWS, family=family)
    forward = ModelForward(model, buffers.layers)
    runner = build_step_runner(forward, buffers, "default", region=region, model=model)
    return model, buffers, runner, build_step_runner(forward, buffers, "eager")


def burst_of_model(runner, buffers, bucket):
    set_rows(buffers, POSITIONS[:bucket])
    before = [layer.pages.clone() for layer in buffers.layers]
    runner.prepare(bucket)
    runner.run(bucket, 4)
    state = state_of(buffers)
    for layer, pages in zip(buffers.layers, before, strict=True):
        layer.pages.copy_(pages)
    return state


def assert_same_bursts_of_model(runner, eager, buffers, buckets):
    for bucket in buckets:
        actual, expected = (burst_of_model(r, buffers, bucket) for r in (runner, eager))
        for value, expected_value in zip(actual, expected, strict=True):
            torch.testing.assert_close(value, expected_value)


def train_a_step(model):
    """What a trainer does between two drives: train mode, other flags, gradients, new values."""
    implementation, model.config._attn_implementation = model.config._attn_implementation, "eager"
    model.train()
    for module in (model.lm_head, model.model.layers[1]):
        module.requires_grad_(False)
    token_ids = torch.arange(12).view(2, 6)
    model(input_ids=token_ids, labels=token_ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.eval()
    model.config._attn_implementation = implementation


@pytest.mark.parametrize(
    ("family", "region", "programs"),
    # One for all layers of a kind; Gemma 2's sliding layers have other pages than its full ones.
    [("qwen3", "model", 1), ("qwen3", "layer", 1), ("gemma2", "layer", 2)],
)
def test_a_models_steps_compile_once_and_survive_training(family, region, programs):
    model, buffers, runner, eager = build_model_runners(family, region)
    assert_same_bursts_of_model(runner, eager, buffers, (8, 2, 5, 4))
    train_a_step(model)
    assert_same_bursts_of_model(runner, eager, buffers, (4, 8, 3))
    assert (runner.stats.programs, runner.stats.recompiles) == (programs, 0)
    assert not model.lm_head.weight.requires_grad
    assert model.model.embed_tokens.weight.requires_grad
    runner.close()


@pytest.mark.parametrize(
    ("region", "dtype", "bound"),
    [("layer", torch.float32, 1e-4), ("model", torch.float32, 1e-4), ("model", torch.bfloat16, 0.2)],
    ids=str,
)
def test_compiled_steps_pass_the_self_check_and_serve_decode_steps_alone(region, dtype, bound):
    pools = build_pools(30, dtype=dtype)
    model = build_decode_model().to(dtype)
    with torch.no_grad():
        # Small logits err little: no order of sums in bfloat16 comes near the bounds.
        model.lm_head.weight.mul_(0.25)
    buffers = build_buffers(MAX_ROWS, pools=pools)
    forward = ModelForward(model, buffers.layers)
    runner = build_step_runner(forward, buffers, "default", region=region, model=model)
    for bucket in (8, 1):
        runner.prepare(bucket)
        result = check_bucket(runner, forward, forward.logits, buffers, pools, bucket=bucket, mode="default")
        assert 0 <= result.mean_logit_error <= result.max_logit_error < bound
        assert result.max_logprob_error == 0.0  # of the forward run eagerly, which is the reference here
    assert runner.stats.programs == 2
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    runner.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_check_finds_a_compiled_step_of_other_logits(dtype):
    """The forward run eagerly is right, and so are the tokens and the cache."""
    pools = build_pools(30, dtype=dtype)
    model, other = (build_decode_model().to(dtype) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(0.8)
    buffers = build_buffers(MAX_ROWS, pools=pools)
    forward = ModelForward(model, buffers.layers)
    runner = build_step_runner(ModelForward(other, buffers.layers), buffers, "default", model=other)
    runner.prepare(8)
    with pytest.raises(EngineError, match="default, batch of 8 rows: the step's best logits differ by up to"):
        check_bucket(runner, forward, forward.logits, buffers, pools, bucket=8, mode="default")
    runner.close()


def test_a_failing_step_gives_the_layers_back():
    model = build_decode_model()
    buffers = build_buffers(4)

    class Failing(ModelForward):
        def logits(self, token_ids, positions):
            super().logits(token_ids, positions)
            raise KeyError("in the step")

    runner = build_step_runner(
        Failing(model, buffers.layers), buffers, "default", region="layer", model=model
    )
    with pytest.raises(KeyError):
        runner.prepare(2)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_decoder_layers_are_found_or_missed_by_name():
    model = build_decode_model()
    assert find_decoder_layers(model) == tuple(model.model.layers)
    with pytest.raises(UnsupportedModelError, match="finds no list of decoder layers in Linear"):
        find_decoder_layers(nn.Linear(2, 2))
    model.model.layers[1].forward = model.model.layers[1].forward
    with pytest.raises(UnsupportedModelError, match="Qwen3DecoderLayer, and layer 1 has another one"):
        find_decoder_layers(model)


def test_no_operator_is_new_to_the_compiler():
    """One that is new to torch 2.11 is described with all that it is computed from, which takes minutes."""
    compile_alone(lambda: None, CompileOptions("default", "default", None, True))
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    operators = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cbexp::")}
    assert {"cbexp::best_tokens", "cbexp::paged_decode_attention"} <= operators <= set(FALLBACK_ALLOW_LIST)
