"""Models whose layers cannot run fused, and what is said of each."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from cbexp.engine import EngineError
from cbexp.engine.forward.llama import why_not_llama
from tests.engine.forward.models import HEAD_DIM, NUM_KV_HEADS, SHAPE, build


def with_lora():
    config = LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM")
    return get_peft_model(build(), config).base_model.model


def with_saved_head():
    config = LoraConfig(
        r=2,
        target_modules=["o_proj"],
        modules_to_save=["lm_head"],
        layers_to_transform=[0],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(build(), config).base_model.model


def quantised():
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(build("Llama"), {nn.Linear}, dtype=torch.qint8)


def changed(change, family="Qwen3", **changes):
    def make():
        model = build(family, **changes)
        change(model, model.model.layers[1])
        return model

    return make


def own_linear(model, layer):
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    layer.mlp.down_proj = Scaled(48, 32, bias=False)


def own_norm(model, layer):
    layer.input_layernorm = nn.RMSNorm(32)


def forward_hook(model, layer):
    layer.self_attn.register_forward_hook(lambda module, args, output: output)


def forward_pre_hook(model, layer):
    model.model.norm.register_forward_pre_hook(lambda module, args: args)


def replaced_forward(model, layer):
    layer.mlp.forward = lambda x: x


def one_in_float64(model, layer):
    layer.mlp.up_proj.to(torch.float64)


def norms_in_float32(model, layer):
    model.to(torch.bfloat16)
    model.model.norm.to(torch.float32)


def other_parameter(model, layer):
    class Packed(nn.Parameter):
        pass

    layer.self_attn.o_proj.weight = Packed(layer.self_attn.o_proj.weight)


def head_with_bias(model, layer):
    model.lm_head = nn.Linear(32, 97)


def bias_of_up(model, layer):
    layer.mlp.up_proj.bias = nn.Parameter(torch.zeros(48))


def some_biases(model, layer):
    layer.self_attn.k_proj.bias = nn.Parameter(torch.zeros(NUM_KV_HEADS * HEAD_DIM))


def transposed(model, layer):
    layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data.t().contiguous().t()


class Qwen3ForCausalLM(transformers.Qwen3ForCausalLM):
    """Another model by the same name."""


def same_name():
    return Qwen3ForCausalLM._from_config(transformers.Qwen3Config(**SHAPE))


REFUSED = {
    "gemma 2": (lambda: build("Gemma2"), "Gemma2ForCausalLM is not one of LlamaForCausalLM"),
    "the same name": (same_name, "Qwen3ForCausalLM is not one of"),
    "lora": (with_lora, r"o_proj is a peft\.tuners\.lora\.layer\.Linear \(an adapter"),
    "a head that is trained beside lora": (with_saved_head, r"is a peft\."),
    "quantised": (quantised, r"is a torch\.ao\..*Linear \(an adapter, or quantised"),
    "a linear layer of another kind": (changed(own_linear), r"layers\.1\.mlp\.down_proj is a .*Scaled"),
    "a norm of another kind": (changed(own_norm), r"input_layernorm is a torch\.nn\.modules\.normalization"),
    "a hook": (changed(forward_hook), r"layers\.1\.self_attn has a hook"),
    "a hook before": (changed(forward_pre_hook), r"model\.norm has a hook"),
    "a forward": (changed(replaced_forward), r"layers\.1\.mlp has a hook or a replaced forward"),
    "dynamic rope": (
        lambda: build(
            "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
        ),
        r"rope_type=dynamic\) changes with the length",
    ),
    "gelu": (lambda: build(hidden_act="gelu"), "its activation is gelu"),
    "odd sizes": (lambda: build(intermediate_size=40), r"its intermediate_size \(40\) is not a multiple"),
    "odd heads": (lambda: build(head_dim=8), r"its head_dim \(8\) is not a multiple of 16"),
    "biases in the mlp": (lambda: build("Llama", mlp_bias=True), r"mlp\.gate_proj\.bias is a bias where"),
    "one bias in the mlp": (changed(bias_of_up), r"layers\.1\.mlp\.up_proj\.bias is a bias"),
    "one bias in attention": (changed(some_biases), "only some of the projections have a bias"),
    "a bias of the head": (changed(head_with_bias), r"lm_head\.bias is a bias"),
    "a weight in float64": (changed(one_in_float64), "differ in dtype: torch.float32, torch.float64"),
    "all in float64": (lambda: build().to(torch.float64), "its dtype is torch.float64"),
    "norms in float32": (changed(norms_in_float32), "differ in dtype: torch.bfloat16, torch.float32"),
    "a parameter of another kind": (changed(other_parameter), r"o_proj\.weight is a Packed"),
    "a weight that is transposed": (changed(transposed), r"o_proj\.weight is not contiguous"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_fused_is_told_why(make, reason):
    problem = why_not_llama(make())
    assert problem is not None
    assert re.search(reason, problem)


def test_a_driver_of_a_model_without_fused_layers_is_not_built(make_driver_anywhere, new_model):
    """Also without a cache yet, which the first drive would build."""
    with pytest.raises(EngineError, match="fusion='layers' is impossible: Gemma2ForCausalLM is not one of"):
        make_driver_anywhere(new_model("gemma2"), fusion="layers")
