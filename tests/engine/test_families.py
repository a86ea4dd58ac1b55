"""The README's table of model families: exact against transformers' eager `generate`, or refused without weights.

A family is a tiny random model in fp32; windows are shorter than most prompts and are passed while decoding, too.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cbexp.engine import UnsupportedModelError
from cbexp.engine.support import find_architecture_problem, require_supported_model

NUM_NEW = 20
PROMPT_LENGTHS = (1, 7, 15, 16, 17, 45)
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Tied random weights make a model repeat its last token.
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2}
SERVED = {
    "llama": ("llama", {}),
    "llama, one head of keys": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16} | EXPERTS),
    "mistral, sliding": ("mistral", {"sliding_window": 12}),
    # A soft cap low enough to bend every attention score.
    "gemma2": (
        "gemma2",
        {"sliding_window": 16, "head_dim": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16},
    ),
    # Four sliding layers to a full one: their blocks differ in size.
    "gemma3_text": (
        "gemma3_text",
        {
            "sliding_window": 16,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "phi3, sliding": ("phi3", {"sliding_window": 9}),
    "olmo2": ("olmo2", {}),
    # Its second layer has no rotary positions.
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "smollm3, sliding": (
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 11},
    ),
    "gpt_oss": ("gpt_oss", {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4} | EXPERTS),
}
REFUSED = {
    "qwen3_5": "takes more than text",
    "qwen3_5_text": "linear_attention, which keep a recurrent state",
    "qwen3_next": "linear_attention, which keep a recurrent state",
    "mamba": "recurrent state",
    "deepseek_v3": "multi-head latent attention has keys and values of different shapes",
    "deepseek_v32": "layers of the kind indexed_attention",
    "mimo_v2_flash": "differ in head size",
    "llama4_text": "chunked_attention",
    "gemma3": "takes more than text",
    "qwen2_5_vl": "takes more than text",
    "llava": "takes more than text",
    "gemma3n_text": "use the keys and values of others",
    "dots3_note_text": "layers differ in shape",
    "doge": "masks of its own",
    "bloom": "attention interface",
    "t5": "encoder-decoder",
    "bert": "an encoder",
}


def build_model(family):
    """Weights large enough that completions differ from prompt to prompt."""
    model_type, values = SERVED[family]
    config = AutoConfig.for_model(model_type, **(SHAPE | values))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(("sinks", "bias")):
                parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def without_weights(model_type):
    config = AutoConfig.for_model(model_type)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return config, None
    return config, AutoModelForCausalLM._model_mapping[type(config)]


@pytest.mark.parametrize("family", SERVED)
def test_a_served_family_equals_generate(family, make_driver, make_prompts, greedy):
    model, prompts = build_model(family), make_prompts(PROMPT_LENGTHS)
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 15, (
        "a model that repeats itself proves nothing"
    )
    for settings in ({}, {"max_batch_tokens": 13}):
        driver = make_driver(model, max_new_tokens=NUM_NEW, **settings)
        driver.add_requests(prompts)
        assert [c.completion_ids for c in driver.drive_until_empty().values()] == expected


@pytest.mark.parametrize("family", SERVED)
def test_a_served_family_passes_without_weights(family):
    model_type, _ = SERVED[family]
    assert find_architecture_problem(*without_weights(model_type)) is None


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_is_refused_without_weights(model_type):
    reason = find_architecture_problem(*without_weights(model_type))
    assert reason is not None
    assert REFUSED[model_type] in reason


def test_a_refusal_names_the_model_and_the_reason():
    config = AutoConfig.for_model("doge", **SHAPE)
    with pytest.raises(
        UnsupportedModelError,
        match=r"DogeForCausalLM \(model type doge\) cannot be driven: .*masks of its own",
    ):
        require_supported_model(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("change", [{"use_bidirectional_attention": True}, {"is_causal": False}], ids=str)
def test_attention_that_looks_ahead_is_refused(change):
    config, model_class = without_weights("gemma3_text")
    config.update(change)
    assert "looks ahead" in find_architecture_problem(config, model_class)
