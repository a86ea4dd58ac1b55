"""Models and versions that the driver does not take: refused at construction, with name and reason."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaModel,
    MambaConfig,
    OPTConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from cbexp.engine import (
    SUPPORTED_TRANSFORMERS,
    CBSyncConfig,
    SyncCBDriver,
    UnsupportedModelError,
    UnsupportedTransformersError,
    check_transformers_version,
)

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def build(config_class, **changes):
    return AutoModelForCausalLM.from_config(config_class(**(TINY | changes)))


def check_refused(model, reason, name=None):
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        SyncCBDriver(model)
    assert (name or type(model).__name__) in str(error.value)


def test_a_wrapped_model(new_model):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    check_refused(Wrapper(new_model("qwen3")), "not a transformers model; pass the module inside")
    check_refused("org/name", "not a transformers model", name="str")


def test_a_model_on_the_meta_device(new_model):
    check_refused(new_model("qwen3").to("meta"), "meta device")


def test_a_model_over_several_devices(new_model):
    model = new_model("qwen3")
    model.lm_head.to("meta")
    check_refused(model, "spread over cpu, meta")


@pytest.mark.parametrize("places", [{"a": 0, "b": 1}, {"a": 0, "b": "disk"}])
def test_a_dispatched_model(new_model, places):
    model = new_model("qwen3")
    model.hf_device_map = places
    check_refused(model, f"spread over {places['a']}, {places['b']}")


def test_a_tensor_parallel_model(new_model):
    model = new_model("qwen3")
    model._device_mesh = object()
    check_refused(model, "tensor-parallel")


def test_sharded_parameters(new_model, tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = new_model("qwen3")
        mesh = init_device_mesh("cpu", (1,))
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh))
        check_refused(model, "parameters are sharded")
    finally:
        distributed.destroy_process_group()


def test_an_encoder_decoder_model():
    config = T5Config(vocab_size=97, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    check_refused(T5ForConditionalGeneration(config), "encoder-decoder")


def test_an_image_text_model():
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config={"model_type": "llama"} | TINY,
        vision_config={"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    )
    check_refused(LlavaForConditionalGeneration(config), "takes more than text")


def test_a_model_without_a_head(new_model):
    check_refused(LlamaModel(new_model("llama").config), "no language-model head")


def test_recurrent_and_linear_layers():
    check_refused(build(MambaConfig), "recurrent state")
    check_refused(build(Qwen3NextConfig, num_experts=2, head_dim=8), "recurrent state")


def test_layers_of_a_type_that_the_cache_does_not_know(new_model):
    model = new_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    check_refused(model, "full and sliding attention only .*chunked_attention", name="qwen3")


def test_latent_attention():
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(**TINY, n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=16)
    check_refused(AutoModelForCausalLM.from_config(config), "latent attention")


def test_attention_that_does_not_use_the_interface():
    from transformers import BloomConfig

    check_refused(build(BloomConfig), "attention interface")


@pytest.mark.parametrize("attention", ["flex_attention", "some_kernel"])
def test_an_attention_implementation_that_reads_no_paged_cache(new_model, attention):
    model = new_model("qwen3")
    model.config._attn_implementation = attention
    with pytest.raises(UnsupportedModelError, match=f"qwen3 .*='{attention}'.*sdpa, eager or a flash"):
        SyncCBDriver(model, config=CBSyncConfig(attn_implementation=attention))


@pytest.mark.parametrize("config_class", [OPTConfig, GPTNeoXConfig])
def test_a_forward_that_fails_on_a_paged_cache(config_class):
    model = build(config_class, ffn_dim=48, word_embed_proj_dim=32)
    check_refused(model, r"its forward fails on a paged cache \((TypeError|AttributeError)")


def test_running_out_of_memory_is_no_refusal(new_model):
    model = new_model("qwen3")

    def run_out(module, args):
        raise torch.OutOfMemoryError("no room")

    model.model.layers[0].register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        SyncCBDriver(model)


def test_prompt_learning_adapters(new_model):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(
        new_model("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    check_refused(model, "prompt-learning")


@pytest.mark.parametrize("version", ["5.24.0", "5.24.3", "5.24.0.dev0", "5.24.1rc1"])
def test_supported_versions(version):
    check_transformers_version(version)


@pytest.mark.parametrize("version", ["4.57.1", "5.23.9", "5.25.0", "6.0.0", "unknown"])
def test_other_versions_are_refused_in_one_line(version):
    with pytest.raises(UnsupportedTransformersError) as error:
        check_transformers_version(version)
    assert str(error.value) == f"transformers {version} is not supported: install >=5.24,<5.25."


def test_the_driver_checks_the_version_first(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.25.0")
    with pytest.raises(UnsupportedTransformersError, match=r"5\.25\.0 is not supported"):
        SyncCBDriver(object())


def test_the_declared_range_is_the_one_that_is_checked():
    from importlib.metadata import requires

    declared = [line for line in requires("cbexp") or [] if line.startswith("transformers")]
    first, end = (".".join(map(str, version)) for version in SUPPORTED_TRANSFORMERS)
    assert set(declared[0].removeprefix("transformers").split(",")) == {f">={first}", f"<{end}"}
