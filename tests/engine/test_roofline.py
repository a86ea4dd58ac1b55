"""The bytes of a decode step, by hand; the bandwidth probe where there is a device."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

from cbexp.engine.roofline import decode_step_bytes, kv_bytes_by_layer, measure_read_bandwidth
from cbexp.engine.types import EngineError

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KV_TOKEN_BYTES = 2 * 2 * 8 * 2  # keys and values x heads x dimension x bfloat16


def build_meta_model(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model, dict(model.named_parameters())


def sum_bytes(model):
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_a_tied_model_reads_every_weight_and_the_cache_of_each_row():
    config = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    model, params = build_meta_model(config)
    step = decode_step_bytes(config, params, batch=3, context=100)
    assert step.weight_bytes == sum_bytes(model)
    assert step.kv_bytes == 3 * 100 * 2 * KV_TOKEN_BYTES
    assert step.total_bytes == step.weight_bytes + step.kv_bytes


def test_an_untied_embedding_is_read_for_the_tokens_of_the_batch_alone():
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False)
    model, params = build_meta_model(config)
    table_bytes = 128 * 32 * 2
    for batch in (1, 5):
        step = decode_step_bytes(config, params, batch, context=1)
        assert step.weight_bytes == sum_bytes(model) - table_bytes + batch * 32 * 2
    # No more than the whole table, however many rows.
    assert decode_step_bytes(config, params, 1000, context=1).weight_bytes == sum_bytes(model)


def test_only_the_experts_that_a_batch_reaches_count():
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=True)
    model, params = build_meta_model(config)
    expert_bytes = 2 * 8 * (3 * 16 * 32) * 2  # layers x experts x gate, up, down x bfloat16
    dense_bytes = sum_bytes(model) - expert_bytes
    for batch, num_touched in ((1, 2), (2, 8 * (1 - 0.75**2)), (10_000, 8)):
        step = decode_step_bytes(config, params, batch, context=1)
        assert step.weight_bytes == pytest.approx(dense_bytes + expert_bytes * num_touched / 8, abs=1)


def test_sliding_layers_read_no_more_than_their_window():
    layer_types = ["sliding_attention", "full_attention"]
    mixed = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=16, layer_types=layer_types)
    assert kv_bytes_by_layer(mixed, torch.bfloat16, 100) == [16 * KV_TOKEN_BYTES, 100 * KV_TOKEN_BYTES]
    assert kv_bytes_by_layer(mixed, torch.bfloat16, 10) == [10 * KV_TOKEN_BYTES] * 2
    # All layers slide where the config names no kinds; none does without a window.
    sliding, full = MistralConfig(**SHAPE, sliding_window=16), MistralConfig(**SHAPE, sliding_window=None)
    assert kv_bytes_by_layer(sliding, torch.bfloat16, 100) == [16 * KV_TOKEN_BYTES] * 2
    assert kv_bytes_by_layer(full, torch.bfloat16, 100) == [100 * KV_TOKEN_BYTES] * 2


def test_what_cannot_be_known_is_said():
    with pytest.raises(EngineError, match="no parameter is an embedding"):
        decode_step_bytes(Qwen3Config(**SHAPE), {"lm_head.weight": torch.zeros(2, 2)}, 1, 1)
    with pytest.raises(EngineError, match=r"CUDA events.*cpu"):
        measure_read_bandwidth(torch.device("cpu"))


@pytest.mark.gpu
def test_the_probe_measures_and_gives_its_memory_back():
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    assert 1e11 < measure_read_bandwidth(device) < 2e13
    assert torch.cuda.memory_reserved(device) == before
