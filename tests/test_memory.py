"""Bytes of weights, and of keys and values, with worked numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cbexp.engine.sizing import kv_bytes_per_token
from cbexp.model.memory import measure_weights

SHAPE = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
QWEN3_4B = AutoConfig.for_model("qwen3", **SHAPE)


def test_weights_of_a_4b_model_whose_architecture_stays_as_it_was():
    """By hand: embedding 151,936 x 2,560; a layer 2 x 4,096 x 2,560 + 2 x 1,024 x 2,560 + 3 x 9,728 x 2,560 + norms."""
    before = QWEN3_4B.to_dict()
    layer = 2 * 4096 * 2560 + 2 * 1024 * 2560 + 3 * 9728 * 2560 + 2 * 128 + 2 * 2560
    embedding = 151936 * 2560
    num_parameters = embedding + 36 * layer + 2560
    size = measure_weights(QWEN3_4B, torch.bfloat16)
    assert size.num_parameters == num_parameters == 4_022_468_096
    assert size.num_bytes == 2 * num_parameters
    assert QWEN3_4B.to_dict() == before
    untied = AutoConfig.for_model("qwen3", **SHAPE | {"tie_word_embeddings": False})
    assert measure_weights(untied, torch.float32).num_bytes == 4 * (num_parameters + embedding)


@pytest.mark.parametrize(
    ("model_type", "shape"),
    [("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}), ("gpt2", {})],
)
def test_kv_bytes_are_what_a_real_cache_takes(model_type, shape):
    config = AutoConfig.for_model(model_type, vocab_size=64, hidden_size=48, num_hidden_layers=3, **shape)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        cache = model(torch.arange(10)[None], use_cache=True).past_key_values
    stored = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert kv_bytes_per_token(config, torch.float32) * 10 == stored
