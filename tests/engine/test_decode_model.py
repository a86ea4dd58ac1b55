"""What runs fused, and when compiled or captured code no longer fits the caller's weights."""

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cbexp.engine.decode_model import DecodeModel, resolve_fusion
from cbexp.engine.buffers import LayerPages
from cbexp.engine.types import EngineError


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


# Nothing runs here: one row of one block, for every layer.
PAGES = (LayerPages(torch.zeros(2, 4, 1, 8), torch.zeros(1, 1, dtype=torch.int32), torch.tensor(0), 0),) * 3


@pytest.fixture(params=["none", "projections", "layers"])
def decode_model(request, model):
    decode_model = DecodeModel(model, PAGES, request.param, max_positions=64)
    assert decode_model.begin()
    decode_model.end()
    yield decode_model
    decode_model.close()


def test_a_second_drive_finds_everything_in_place(decode_model):
    forward = decode_model.forward
    assert not decode_model.begin()
    assert decode_model.forward is forward


def test_weights_written_in_place_keep_compiled_code(decode_model, model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert not decode_model.begin()


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "input_layernorm"])
def test_a_reassigned_parameter_voids_compiled_code(decode_model, model, name):
    module = model.model.layers[1].get_submodule(name)
    module.weight.data = module.weight.data.clone() + 1
    assert decode_model.begin()
    assert not decode_model.begin()


def test_switching_an_adapter_voids_compiled_code(model):
    """A flag of PEFT's moves no parameter."""
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    decode_model = DecodeModel(lora.get_base_model(), (), "projections", max_positions=64)
    assert decode_model.begin()
    assert not decode_model.begin()
    with lora.disable_adapter():
        assert decode_model.begin()
    assert decode_model.begin()
    decode_model.close()


def test_auto_fuses_nothing_on_a_cpu(model):
    assert resolve_fusion(model, "auto", allows_layers=True) == "none"


def test_layers_are_refused_with_the_reason(model):
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(EngineError, match=r"fusion='layers' is impossible: .*q_proj"):
        resolve_fusion(lora.get_base_model(), "layers", allows_layers=True)


def test_a_hook_or_another_forward_voids_compiled_code(decode_model, model):
    """No guard of the compiler's sees a hook, and a captured graph sees nothing."""
    if decode_model.fusion == "layers":
        pytest.skip("whole layers run no hooks: they are refused")
    handle = model.model.layers[0].register_forward_hook(lambda module, inputs, output: output)
    assert decode_model.begin()
    assert not decode_model.begin()
    handle.remove()
    assert decode_model.begin()
    model.lm_head.forward = model.lm_head.forward
    assert decode_model.begin()


def test_a_buffer_that_moves_voids_compiled_code(decode_model, model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    assert decode_model.begin()


def test_a_drive_after_a_failed_one_builds_again(decode_model, model, monkeypatch):
    def fail(self):
        raise torch.OutOfMemoryError("no memory for rotary tables")

    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    with monkeypatch.context() as patched:
        patched.setattr(DecodeModel, "_build_forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            decode_model.begin()
    assert decode_model.begin()
