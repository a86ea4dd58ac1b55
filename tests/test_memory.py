"""Bytes and tokens, with worked numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

from cbexp.model.memory import (
    describe_cache_layout,
    estimate_cache_cost,
    free_memory_bytes,
    kv_bytes_per_token,
    measure_weights,
    request_blocks_needed,
)

SHAPE = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
QWEN3_4B = AutoConfig.for_model("qwen3", **SHAPE)
GEMMA2 = AutoConfig.for_model("gemma2", num_hidden_layers=4, sliding_window=64)
MISTRAL = AutoConfig.for_model("mistral", num_hidden_layers=4, sliding_window=64)
GIB = 1024**3


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


@pytest.mark.parametrize(
    ("architecture", "layers", "num_tokens", "num_blocks"),
    [
        (QWEN3_4B, (36, 0, None), 128, 4),
        (QWEN3_4B, (36, 0, None), 129, 5),
        (MISTRAL, (0, 4, 64), 1000, 2),  # a ring of 64 tokens
        (GEMMA2, (2, 2, 64), 128, 3),  # two layers of 4 pages and two of 2: 12 pages, 4 a block
        (AutoConfig.for_model("gemma2", layer_types=["full_attention"] * 26), (26, 0, None), 32, 1),
    ],
)
def test_sliding_layers_are_told_apart_and_bound_a_request(architecture, layers, num_tokens, num_blocks):
    layout = describe_cache_layout(architecture)
    assert (layout.num_full_layers, layout.num_sliding_layers, layout.sliding_window) == layers
    assert request_blocks_needed(layout, num_tokens, 32) == num_blocks


def test_cache_cost_counts_masks_only_for_masked_attention():
    """Per cached token: 147,456 bytes of keys and values, one layer's gathered heads, an index, a mask column."""
    masked = estimate_cache_cost(QWEN3_4B, torch.bfloat16, 1000, 32, is_masked=True)
    flash = estimate_cache_cost(QWEN3_4B, torch.bfloat16, 1000, 32, is_masked=False)
    assert flash.bytes_per_token == 147_456 + 2 * 8 * 128 * 2 + 8
    assert masked.bytes_per_token == 147_456 + (2 * 32 + 8) * 128 * 2 + 8 + 1000 * 2
    assert masked.fixed_bytes - flash.fixed_bytes == 1000 * ((2 * 32 + 8 - 2 * 8) * 128 * 2 + 1000 * 2)


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("counts", [(4, 0), (2, 2), (1, 3), (0, 4)], ids=str)
def test_automatic_sizes_pass_upstreams_own_check(counts, is_masked):
    """Transformers refuses a cache beyond 0.9 of the free memory by its formula; cbexp stays below 0.8 by default."""
    num_full, num_sliding = counts
    layer_types = ["full_attention"] * num_full + ["sliding_attention"] * num_sliding
    config = AutoConfig.for_model("gemma2", layer_types=layer_types, num_hidden_layers=4)
    config._attn_implementation = "paged|eager" if is_masked else "flash_attention_2"
    page_bytes = 2 * config.num_key_value_heads * config.head_dim * 2 * 256
    layer_counts = [count for count in counts if count]
    sector_layers = math.lcm(*layer_counts)
    batching = {"max_batch_tokens": 512, "max_requests_per_batch": 16, "max_memory_percent": 0.9}
    handler = PagedAttentionMemoryHandler(
        config=config,
        cb_config=ContinuousBatchingConfig(max_blocks_per_request=0, **batching),
        dtype=torch.bfloat16,
        bytes_per_sector=sector_layers * page_bytes,
        tokens_per_sector=256 * max(sector_layers // count for count in layer_counts),
        bytes_per_block=4 * page_bytes,
        attn_types=sorted(set(layer_types)),
        model_supports_logits_to_keep=True,
    )
    cost = estimate_cache_cost(config, torch.bfloat16, 512, 16, is_masked=is_masked)
    num_blocks = 120
    upstream_bytes = handler.compute_memory_footprint(512, num_blocks * 4 // sector_layers)
    assert 0.8 * upstream_bytes <= cost.total_bytes(num_blocks * 256) * 0.9
    assert cost.total_bytes(num_blocks * 256) < 1.1 * upstream_bytes


def test_free_memory_is_the_available_ram_or_on_a_gpu_also_what_pytorch_holds_unused(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 * GIB))
    assert free_memory_bytes(torch.device("cpu")) == 7 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    assert free_memory_bytes(torch.device("cuda", 0)) == 65 * GIB
