"""Models whose layers cannot run fused, and what is said of each."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from torch import nn

from cbexp.engine import EngineError
from cbexp.engine.forward.llama import why_not_llama
from tests.engine.forward.models import SHAPE, build, layer, with_lora


class Qwen3ForCausalLM(transformers.Qwen3ForCausalLM):
    """Another model by the same name."""


class ScaledLinear(nn.Linear):
    pass


class PackedParameter(nn.Parameter):
    pass


def changed(change):
    def make():
        model = build()
        change(model)
        return model

    return make


def other_weight(change):
    def replace(model):
        linear = layer(model).self_attn.o_proj
        linear.weight = change(linear.weight)

    return changed(replace)


DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
REFUSED = [
    (lambda: Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)), "Qwen3ForCausalLM is not one of"),
    (
        lambda: with_lora(build()).base_model.model,
        r"q_proj is a peft\.tuners\.lora\.layer\.Linear \(an adapter",
    ),
    (lambda: build("Llama", rope_parameters=DYNAMIC_ROPE), r"rope_type=dynamic\) changes with the length"),
    (lambda: build(hidden_act="gelu"), "its activation is gelu"),
    (lambda: build(intermediate_size=40), r"its intermediate_size \(40\) is not a multiple of 16"),
    (lambda: build(head_dim=8), r"its head_dim \(8\) is not a multiple of 16"),
    (lambda: build("Llama", mlp_bias=True), r"mlp\.gate_proj\.bias is a bias where"),
    (lambda: build().to(torch.float64), "its dtype is torch.float64"),
    (changed(lambda m: setattr(m, "lm_head", nn.Linear(32, 97))), r"lm_head\.bias is a bias"),
    (
        changed(lambda m: setattr(layer(m).mlp, "up_proj", ScaledLinear(32, 48))),
        "up_proj is a .*ScaledLinear",
    ),
    (changed(lambda m: layer(m).mlp.register_forward_hook(print)), r"layers\.0\.mlp has a hook"),
    (changed(lambda m: m.model.norm.register_forward_pre_hook(print)), r"model\.norm has a hook"),
    (changed(lambda m: setattr(layer(m).mlp, "forward", print)), r"mlp has a hook or a replaced forward"),
    (changed(lambda m: m.model.norm.half()), "differ in dtype: torch.float16, torch.float32"),
    (
        changed(lambda m: setattr(layer(m).self_attn.k_proj, "bias", nn.Parameter(torch.zeros(32)))),
        "only some of the projections have a bias",
    ),
    (other_weight(PackedParameter), r"o_proj\.weight is a PackedParameter"),
    (other_weight(lambda weight: nn.Parameter(weight.t())), r"o_proj\.weight is not contiguous"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_fused_is_told_why(make, reason):
    assert re.search(reason, why_not_llama(make()))


def test_a_driver_of_a_model_without_fused_layers_is_not_built(make_driver_anywhere, new_model):
    """Also without a cache yet, which the first drive would build."""
    with pytest.raises(EngineError, match="fusion='layers' is impossible: Gemma2ForCausalLM is not one of"):
        make_driver_anywhere(new_model("gemma2"), fusion="layers")
