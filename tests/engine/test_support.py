"""Models and versions that the driver does not take: refused at construction, with name and reason."""

from importlib.metadata import requires

import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, LlamaModel, T5Config, T5ForConditionalGeneration

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


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def changed(change):
    """A change of a good model, given back."""
    return lambda model: change(model) or model


def built(name, **changes):
    config = getattr(transformers, f"{name}Config")
    return lambda model: AutoModelForCausalLM.from_config(config(**(TINY | changes)))


def image_text_model(model):
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama"} | TINY,
        vision_config={"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    )
    return transformers.LlavaForConditionalGeneration(config)


T5 = T5Config(vocab_size=97, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
FAILS = r"its forward fails on a paged cache \((TypeError|AttributeError)"

# What is made of a good model -> the reason; its class is named beside it.
REFUSED = {
    "a wrapped model": (Wrapper, "not a transformers model; pass the module inside"),
    "a name": (lambda model: "org/name", "not a transformers model"),
    "the meta device": (lambda model: model.to("meta"), "meta device"),
    "several devices": (changed(lambda model: model.lm_head.to("meta") and None), "spread over cpu, meta"),
    "several GPUs": (changed(lambda m: setattr(m, "hf_device_map", {"a": 0, "b": 1})), "spread over 0, 1"),
    "a disk": (changed(lambda m: setattr(m, "hf_device_map", {"a": 0, "b": "disk"})), "spread over 0, disk"),
    "tensor-parallel": (changed(lambda model: setattr(model, "_device_mesh", object())), "tensor-parallel"),
    "an encoder-decoder": (lambda model: T5ForConditionalGeneration(T5), "encoder-decoder"),
    "images": (image_text_model, "takes more than text"),
    "no head": (lambda model: LlamaModel(model.config), "no language-model head"),
    "a recurrent state": (built("Mamba"), "recurrent state"),
    "linear attention": (built("Qwen3Next", num_experts=2, head_dim=8), "recurrent state"),
    "another kind of layer": (
        changed(lambda m: setattr(m.config, "layer_types", ["full_attention", "chunked_attention"])),
        "full and sliding attention only .*chunked_attention",
    ),
    "latent attention": (built("DeepseekV3", **EXPERTS), "latent attention"),
    "attention of its own": (built("Bloom"), "attention interface"),
    "a failing forward": (built("OPT", ffn_dim=48, word_embed_proj_dim=32), FAILS),
    "another failing forward": (built("GPTNeoX"), FAILS),
    "prompt learning": (lambda model: get_peft_model(model, PROMPT_TUNING), "prompt-learning"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_driven(new_model, case):
    make, reason = REFUSED[case]
    model = make(new_model("llama"))
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        SyncCBDriver(model)
    assert type(model).__name__ in str(error.value)


def test_sharded_parameters(new_model, tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = new_model("qwen3")
        mesh = init_device_mesh("cpu", (1,))
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh))
        with pytest.raises(UnsupportedModelError, match=r"Qwen3ForCausalLM.*parameters are sharded"):
            SyncCBDriver(model)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("attention", ["flex_attention", "some_kernel"])
def test_an_attention_implementation_that_reads_no_paged_cache(new_model, attention):
    model = new_model("qwen3")
    model.config._attn_implementation = attention
    with pytest.raises(UnsupportedModelError, match=f"qwen3 .*='{attention}'.*sdpa, eager or a flash"):
        SyncCBDriver(model, config=CBSyncConfig(attn_implementation=attention))


def test_running_out_of_memory_is_no_refusal(new_model):
    model = new_model("qwen3")

    def run_out(module, args):
        raise torch.OutOfMemoryError("no room")

    model.model.layers[0].register_forward_pre_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        SyncCBDriver(model)


@pytest.mark.parametrize("version", ["5.24.0", "5.24.3", "5.24.0.dev0", "5.24.1rc1"])
def test_supported_versions(version):
    check_transformers_version(version)


@pytest.mark.parametrize("version", ["4.57.1", "5.23.9", "5.25.0", "6.0.0", "unknown"])
def test_other_versions_are_refused_in_one_line(version):
    with pytest.raises(UnsupportedTransformersError) as error:
        check_transformers_version(version)
    assert str(error.value) == f"transformers {version} is not supported: install >=5.24,<5.25."


def test_the_driver_checks_the_version_first(monkeypatch):
    # Importing peft has transformers imported a second time: the driver's own it is.
    monkeypatch.setattr("cbexp.engine.driver.transformers.__version__", "5.25.0")
    with pytest.raises(UnsupportedTransformersError, match=r"5\.25\.0 is not supported"):
        SyncCBDriver(object())


def test_the_declared_range_is_the_one_that_is_checked():
    declared = [line for line in requires("cbexp") or [] if line.startswith("transformers")]
    first, end = (".".join(map(str, version)) for version in SUPPORTED_TRANSFORMERS)
    assert set(declared[0].removeprefix("transformers").split(",")) == {f">={first}", f"<{end}"}
