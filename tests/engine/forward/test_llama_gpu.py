"""On a CUDA device: whole decode steps of fused kernels, one by one and in a graph, against the model's own code."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cbexp.engine.decode.step import run_step
from cbexp.engine.forward import PlainForward
from cbexp.engine.kernels.tiles import MAX_SKINNY_ROWS
from cbexp.engine.sampling import advance, choose
from tests.engine.forward import models
from tests.engine.forward.models import fused_forward
from tests.engine.graph_capture import capture

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_fp32")]

DEVICE = "cuda"
SHAPE = {"vocab_size": 2003, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def build_model(dtype):
    return models.build("Qwen3", weight_std=0.15, **SHAPE).requires_grad_(False).to(DEVICE, dtype)


def build_buffers(model, num_rows, max_burst=1):
    return models.build_buffers(model, num_rows, max_burst, page_size=16)


def start_rows(buffers):
    """A token each; every seventh row is not there, some end early."""
    rows = torch.arange(buffers.max_rows, device=DEVICE)
    buffers.token_ids.copy_(rows * 31 % 2003)
    buffers.positions.copy_(torch.where(rows % 7 == 3, -1, 0))
    buffers.remaining.copy_(torch.where(rows % 5 == 1, 9, 1000))
    buffers.step.zero_()
    buffers.outputs.fill_(-1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_rows", "is_captured"), [(1, True), (4, False), (33, True), (65, False), (200, True)]
)
def test_steps_choose_what_the_models_own_code_does(num_rows, is_captured):
    """In fp32, but for logits that differ by less than their rounding; both go on from the same tokens."""
    num_steps, model = 30, build_model(torch.float32)
    own_buffers, buffers = (build_buffers(model, num_rows, num_steps) for _ in range(2))
    own, fused = PlainForward(model, own_buffers.layers), fused_forward(model, buffers)
    run = partial(run_step, fused, buffers)
    run = capture(run).replay if is_captured else run
    # Rows that are not there have left nothing behind.
    assert all(layer.pages.isnan().all() for layer in buffers.layers)
    start_rows(own_buffers)
    start_rows(buffers)
    for index in range(num_steps):
        is_active = own_buffers.positions >= 0
        logits = own(own_buffers.token_ids, own_buffers.positions)
        run()
        chosen = buffers.outputs[index].long()
        assert (chosen >= 0).equal(is_active)
        of_chosen = logits.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
        assert (logits.amax(1) - of_chosen)[is_active].max() < 1e-3
        best_logits = buffers.best_logits[is_active]
        torch.testing.assert_close(best_logits, of_chosen[is_active], rtol=1e-3, atol=1e-3)
        advance(own_buffers, chosen.clamp(min=0), of_chosen)
        assert buffers.token_ids.equal(own_buffers.token_ids)
        assert buffers.positions.equal(own_buffers.positions)
    for layer, expected in zip(buffers.layers, own_buffers.layers, strict=True):
        torch.testing.assert_close(layer.pages, expected.pages, rtol=1e-3, atol=1e-3, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [*((num_rows, torch.bfloat16) for num_rows in (1, 33, MAX_SKINNY_ROWS)), (33, torch.float32)],
    ids=str,
)
def test_steps_replayed_back_to_back_equal_single_ones(num_rows, dtype):
    """Bit for bit, while every kernel may start before its predecessor has ended: sums have one order."""
    num_steps, model = 100, build_model(dtype)
    single, replayed = (build_buffers(model, num_rows, num_steps) for _ in range(2))
    forwards = [fused_forward(model, buffers) for buffers in (single, replayed)]
    start_rows(single)
    for _ in range(num_steps):
        next_ids, best_logits = choose(forwards[0](single.token_ids, single.positions))
        torch.cuda.synchronize()
        advance(single, next_ids, best_logits)
        torch.cuda.synchronize()
    graph = capture(lambda: run_step(forwards[1], replayed))
    start_rows(replayed)
    for _ in range(num_steps):
        graph.replay()
    assert len(single.outputs.unique()) > 1
    assert replayed.outputs.equal(single.outputs)
    is_active = single.outputs[-1] >= 0
    assert replayed.best_logits[is_active].equal(single.best_logits[is_active])
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for layer, expected in zip(replayed.layers, single.layers, strict=True):
        assert layer.pages.view(bits).equal(expected.pages.view(bits))
