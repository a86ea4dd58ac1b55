"""LoRA adapters: random ones change the outputs, saved ones come back, wrong ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from cbexp.config import AdapterConfig, ModelConfig
from cbexp.errors import ModelError
from cbexp.model.loading import LoadedModel, load_model
from tests.model_fixtures import QWEN3

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PROMPT = torch.arange(1, 12)[None]


def load(adapter: AdapterConfig, dtype: str = "float32", **changes: Any) -> LoadedModel:
    config = ModelConfig(init="random", architecture={**QWEN3, **changes}, device="cpu", dtype=dtype)
    return load_model(config, adapter, seed=1)


def lora(**settings: Any) -> AdapterConfig:
    return AdapterConfig(kind="lora", **settings)


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(PROMPT).logits


def save_adapter(folder: Path, **settings: Any) -> Path:
    values = dict(QWEN3)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    settings = {"target_modules": ["q_proj", "v_proj"], **settings}
    config = LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def test_a_random_adapter_follows_the_seed_changes_the_outputs_and_can_be_merged():
    small = {"rank": 4, "alpha": 8}
    bare, apart, again = load(AdapterConfig()), load(lora(**small)), load(lora(**small))
    merged = load(lora(**small, merged=True))
    change = (logits(apart) - logits(bare)).norm() / logits(bare).norm()
    assert 1e-4 < change < 0.5
    assert torch.equal(logits(apart), logits(again))
    assert torch.allclose(logits(apart), logits(merged), atol=1e-5)
    assert type(bare.model).__name__ == type(merged.model).__name__ == "Qwen3ForCausalLM"
    description = "random, rank 4, alpha 8, on q_proj, k_proj, v_proj, o_proj"
    assert (bare.lora_adapter, bare.adapter_dtype) == (None, None)
    assert (apart.lora_adapter, apart.adapter_dtype) == (description, torch.float32)
    assert (merged.lora_adapter, merged.adapter_dtype) == (f"{description}, merged", None)
    assert apart.num_parameters > bare.num_parameters == merged.num_parameters
    assert not apart.model.training
    half = load(lora(), dtype="bfloat16")
    assert (half.dtype, half.adapter_dtype, logits(half).dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    )
    assert (apart.vocab_size, apart.generation_eos_ids) == (bare.vocab_size, (257,))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head", "q_proj"], "use_dora": True},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_merged_adapter_on_a_tied_weight_is_what_it_was_apart(tmp_path, settings):
    """Each load merges into weights of its own, which come to the same bits each time."""
    path = str(save_adapter(tmp_path / "adapter", **settings))
    bare, apart, merged, again = (
        logits(load(adapter))
        for adapter in (AdapterConfig(), lora(path=path), *[lora(path=path, merged=True)] * 2)
    )
    assert (apart - bare).norm() > 1e-2 * bare.norm()
    assert (apart - merged).norm() < 1e-5 * apart.norm()
    assert torch.equal(merged, again)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_bias": True}, "the base layer has no bias"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA does not support merging"),
        ({"trainable_token_indices": [4, 5], "target_modules": ["lm_head"]}, "it has tokens of its own"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path, settings, reason):
    path = str(save_adapter(tmp_path / "adapter", **settings))
    assert load(lora(path=path)).adapter_dtype == torch.float32
    message = rf"The LoRA adapter .*cannot be merged: .*{reason}.*\. Run it with adapter\.merged=false\.$"
    with pytest.raises(ModelError, match=message):
        load(lora(path=path, merged=True))


def test_a_saved_adapter_comes_back(tmp_path, monkeypatch):
    folder = save_adapter(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    bare, loaded = load(AdapterConfig()), load(lora(path="adapter"))
    assert loaded.lora_adapter == "adapter 'adapter'"
    assert not torch.allclose(logits(bare), logits(loaded), atol=1e-4)
    module = "base_model.model.model.layers.1.self_attn.v_proj.lora_B"
    saved = load_file(folder / "adapter_model.safetensors")[f"{module}.weight"]
    assert torch.equal(loaded.model.state_dict()[f"{module}.default.weight"], saved)


def test_target_modules_that_cannot_be_adapted_are_named():
    with pytest.raises(ModelError, match=r"ForCausalLM has no module 'q_porj'. Did you mean 'q_proj'"):
        load(lora(target_modules=["v_proj", "q_porj"]))
    with pytest.raises(ModelError, match=r"target_modules=\['q_norm'\]: Target module .* is not supported"):
        load(lora(target_modules=["q_norm"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "Qwen3ForCausalLM: size mismatch"),
        ({"num_hidden_layers": 3}, "4 weights find no match, .*layers.2"),
    ],
)
def test_an_adapter_of_another_base_is_refused(tmp_path, changes, message):
    folder = save_adapter(tmp_path / "adapter")
    with pytest.raises(ModelError, match=f"does not belong to this .*{message}") as caught:
        load(lora(path=str(folder)), **changes)
    assert "\n" not in str(caught.value)


def test_unreadable_and_foreign_adapters_are_explained(tmp_path):
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        load(lora(path=str(tmp_path)))
    with pytest.raises(ModelError, match=r"the hub cannot be reached. Give a local folder in adapter\.path"):
        load(lora(path="nobody/no-adapter"))
    folder = save_adapter(tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(ModelError, match="damaged safetensors file"):
        load(lora(path=str(folder)))
    PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM").save_pretrained(str(folder))
    with pytest.raises(ModelError, match="PROMPT_TUNING, and only LoRA is supported"):
        load(lora(path=str(folder)))
