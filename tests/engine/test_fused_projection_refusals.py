"""What fused projections leave alone, by name: odd weights, adapters, blocks and families."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.engine.projection_cases import (
    NUM_GROUPS,
    SHAPE,
    TOLERANCE,
    build,
    layer,
    logits,
    with_lora,
)


def quantised(model):
    class Quantised(nn.Linear):
        pass

    layer(model).mlp.up_proj.__class__ = Quantised


def subclassed_parameter(model):
    class QuantisedTensor(nn.Parameter):
        pass

    projection = layer(model).mlp.up_proj
    projection.weight = QuantisedTensor(projection.weight.detach())


def another_dtype(model):
    layer(model).mlp.up_proj.to(torch.bfloat16)


def on_meta(model):
    layer(model).mlp.up_proj.to("meta")


def tied(model):
    layer(model).mlp.up_proj.weight = layer(model, 1).mlp.up_proj.weight


def tied_data(model):
    layer(model).mlp.up_proj.weight.data = layer(model).mlp.gate_proj.weight.data


def flat_buffer(model):
    weights = [layer(model).mlp.up_proj.weight, layer(model).mlp.down_proj.weight]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.data = part.view(weight.shape)


def sharded(model):
    weight = layer(model).mlp.up_proj.weight
    weight.data = weight.data.new_empty(0)


def transposed(model):
    weight = layer(model).mlp.up_proj.weight
    weight.data = weight.detach().t().contiguous().t()


def one_bias(model):
    layer(model).mlp.up_proj.bias = nn.Parameter(torch.zeros(SHAPE["intermediate_size"]))


REFUSALS = {
    quantised: "up_proj is a .*Quantised, not a plain torch.nn.Linear",
    subclassed_parameter: "up_proj.weight is a QuantisedTensor, not a plain parameter",
    another_dtype: "differ in dtype: torch.bfloat16, torch.float32",
    on_meta: "up_proj.weight holds no data",
    tied: "up_proj.weight is shared with another parameter",
    tied_data: "_proj.weight is shared with another parameter",
    flat_buffer: "up_proj.weight is a view into a larger storage",
    sharded: r"up_proj.weight is laid out as \(0,\), not as a contiguous \(48, 32\)",
    transposed: r"up_proj.weight is laid out as \(48, 32\), not as a contiguous \(48, 32\)",
    one_bias: "only some of the projections have a bias",
}


@pytest.mark.parametrize("spoil", REFUSALS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_cannot_be_fused_is_left_alone_and_named(spoil, when, fused):
    model = build()
    fusion = fused(model)
    if when == "after":
        fusion.install()
        fusion.remove()
    spoil(model)
    pointers = {name: p.data_ptr() for name, p in layer(model).mlp.named_parameters()}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    fusion.install()
    skipped = fusion.describe()["skipped"]
    # Tying spoils the group at the other end of the tie too.
    assert set(skipped) == {
        f"model.layers.{i}.mlp.gate_proj+up_proj" for i in ((0, 1) if spoil is tied else (0,))
    }
    assert re.search(REFUSALS[spoil], skipped["model.layers.0.mlp.gate_proj+up_proj"])
    assert fusion.describe()["num_fused"] == NUM_GROUPS - len(skipped)
    if when == "before":
        assert {name: p.data_ptr() for name, p in layer(model).mlp.named_parameters()} == pointers
    # The rest of a group that came apart does not keep the whole alive.
    gate = layer(model).mlp.gate_proj.weight
    assert gate.untyped_storage().nbytes() == gate.numel() * gate.element_size()
    assert fusion.weights.is_current()
    fusion.close()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            assert torch.equal(parameter, values[name]), name


@pytest.mark.parametrize("change", [{"use_dora": True}, {"alora_invocation_tokens": [1, 2]}])
def test_other_adapters_leave_their_projections_unfused(change, fused):
    model = with_lora(build(), targets=["v_proj"], **change, task_type="CAUSAL_LM")
    with torch.no_grad():
        plain = logits(model.base_model.model)
    fusion = fused(model)
    fusion.install()
    assert fusion.describe()["num_fused"] == NUM_GROUPS // 2
    assert all("LinearVariant" in reason for reason in fusion.describe()["skipped"].values())
    torch.testing.assert_close(logits(model.base_model.model), plain, **TOLERANCE)


def test_a_projection_with_a_forward_of_its_own_is_left_alone(fused):
    model = build()
    projection = layer(model).self_attn.k_proj
    own = projection.forward = lambda x: 2 * nn.functional.linear(x, projection.weight)
    plain = logits(model)
    fusion = fused(model)
    fusion.install()
    assert fusion.describe()["num_fused"] == NUM_GROUPS - 1
    assert (
        "replaced by somebody else"
        in fusion.describe()["skipped"]["model.layers.0.self_attn.q_proj+k_proj+v_proj"]
    )
    torch.testing.assert_close(logits(model), plain, **TOLERANCE)
    fusion.remove()
    assert projection.forward is own


def test_a_block_with_a_forward_of_its_own_gets_it_back(fused):
    model = build()
    mlp = layer(model).mlp
    inner = mlp.forward
    own = mlp.forward = lambda x: -inner(x)
    plain = logits(model)
    fusion = fused(model)
    fusion.install()
    torch.testing.assert_close(logits(model), plain, **TOLERANCE)
    fusion.remove()
    assert mlp.forward is own
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize(
    ("family", "changes", "num_fused", "num_skipped"),
    [
        ("Phi3", {"pad_token_id": 0}, 0, NUM_GROUPS),
        ("Olmo2", {}, NUM_GROUPS, 0),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, NUM_GROUPS // 2, 0),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            NUM_GROUPS // 2,
            0,
        ),
    ],
)
def test_other_families_are_fused_as_far_as_they_can_be(family, changes, num_fused, num_skipped, fused):
    model = build(family, **changes)
    plain = logits(model)
    fusion = fused(model)
    fusion.install()
    assert fusion.describe()["num_fused"] == num_fused
    assert fusion.describe()["num_skipped"] == num_skipped
    assert set(fusion.describe()["skipped"].values()) <= {"is one product already"}
    torch.testing.assert_close(logits(model), plain, **TOLERANCE)
