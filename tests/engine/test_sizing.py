"""The one rule of cache sizes, with worked numbers; and drivers that take no more than it says."""

from __future__ import annotations

import dataclasses
import math
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import (
    PagedAttentionMemoryHandler,
    group_layers_by_attn_type,
)

from cbexp.engine import CacheMemoryError, CBSyncConfig
from cbexp.engine.requests import GroupLengths
from cbexp.engine.sizing import (
    count_blocks,
    describe_cache_layout,
    estimate_cache_cost,
    free_memory_bytes,
    measure_need,
    size_cache,
)
from tests.engine.driving import drive

SHAPE = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
QWEN3_4B = AutoConfig.for_model("qwen3", **SHAPE)
GEMMA2 = AutoConfig.for_model("gemma2", num_hidden_layers=4, sliding_window=64)
MISTRAL = AutoConfig.for_model("mistral", num_hidden_layers=4, sliding_window=64)
ALL_FULL = AutoConfig.for_model("gemma2", layer_types=["full_attention"] * 26)
TWO_FULL = AutoConfig.for_model(
    "gemma3_text",
    sliding_window=64,
    num_hidden_layers=5,
    layer_types=["sliding_attention"] * 3 + ["full_attention"] * 2,
)
GIB = 2**30


@pytest.mark.parametrize(
    ("architecture", "layers", "num_tokens", "num_blocks"),
    [
        (QWEN3_4B, (36, 0, None), 128, 4),
        (QWEN3_4B, (36, 0, None), 129, 5),
        (MISTRAL, (0, 4, 64), 1000, 2),  # a ring of 64 tokens
        (GEMMA2, (2, 2, 64), 128, 3),  # two layers of 4 pages and two of 2: 12 pages, 4 a block
        (TWO_FULL, (2, 3, 64), 32, 3),  # two pages and three, each in a sector of 6: 12 pages, 5 a block
        (ALL_FULL, (26, 0, None), 32, 1),
    ],
)
def test_layers_of_each_kind_and_the_blocks_of_a_request(architecture, layers, num_tokens, num_blocks):
    layout = describe_cache_layout(architecture)
    assert (layout.num_full_layers, layout.num_sliding_layers, layout.sliding_window) == layers
    by_kind = {kind: len(indices) for kind, indices in group_layers_by_attn_type(architecture).items()}
    assert by_kind.get("full_attention", 0) == layout.num_full_layers
    assert by_kind.get("sliding_attention", 0) == layout.num_sliding_layers
    request = GroupLengths(num_tokens, 1, 1)
    assert count_blocks([request], layout, 32, shares_blocks=True) == num_blocks


@pytest.mark.parametrize(
    ("groups", "shares", "max_rows", "num_blocks"),
    [
        # 9 + 8 - 1 = 16 stored tokens are two pages of 8, times three generations; 1 + 1 - 1 = 1 token is one page.
        ([(9, 8, 3), (1, 1, 1)], False, None, 3 * 2 + 1),
        # One of the two pages is the prompt's, but for its last token.
        ([(9, 8, 3), (1, 1, 1)], True, None, 1 + 3 + 1),
        ([(8, 9, 3)], True, None, 3 * 2),
        # Five rows at once: the longest group and a part of the next.
        ([(1, 8, 4), (1, 24, 4), (1, 16, 4)], False, 5, 4 * 3 + 2),
        ([(17, 8, 4)] * 9, True, 8, 2 * (2 + 4)),
    ],
)
def test_blocks_of_a_round_by_hand(groups, shares, max_rows, num_blocks):
    listed, layout = [GroupLengths(*group) for group in groups], describe_cache_layout(QWEN3_4B)
    assert count_blocks(listed, layout, 8, shares_blocks=shares, max_rows=max_rows) == num_blocks


def test_a_model_with_rings_shares_nothing():
    group, layout = GroupLengths(9, 8, 3), describe_cache_layout(GEMMA2)
    assert count_blocks([group], layout, 8, shares_blocks=True) == 3 * 2


def test_large_rounds_of_groups_take_what_runs_at_once():
    """Keys and values of Qwen3-4B are 147,456 bytes a token."""
    long = [GroupLengths(2000 + 62 * i, 512, 8) for i in range(33)][:32]
    shared = CBSyncConfig(page_size=32, allow_block_sharing=True)
    need = measure_need(long, QWEN3_4B, shared)
    once = sum(group.prompt_tokens for group in long) + 256 * 512
    assert once <= need.num_blocks * 32 <= once + 256 * 32 + 32 * 32
    one = measure_need(long[:1], QWEN3_4B, dataclasses.replace(shared, max_requests_per_batch=2))
    assert one == measure_need(long[:1], QWEN3_4B, shared)  # a prompt is admitted with all its generations
    many = [GroupLengths(496, 512, 8)] * 512
    need = measure_need(many, QWEN3_4B, CBSyncConfig())
    assert need.num_blocks * 256 == 256 * 1024
    size = size_cache(need, QWEN3_4B, torch.bfloat16, CBSyncConfig(), free_bytes=120 * GIB)
    assert (size.num_blocks, size.max_requests_per_batch) == (1024, 256)


def test_a_cache_stays_within_its_share_of_the_free_memory():
    settings = CBSyncConfig(page_size=16, max_memory_fraction=0.25)
    need = measure_need([GroupLengths(1000, 100, 1)] * 20, QWEN3_4B, settings)
    cost = estimate_cache_cost(QWEN3_4B, torch.bfloat16, settings, need.batch_tokens, 256)
    for num_blocks in (need.num_blocks - 1, need.longest_blocks):
        free_bytes = 4 * cost.total_bytes(num_blocks * 16)
        size = size_cache(need, QWEN3_4B, torch.bfloat16, settings, free_bytes)
        assert size.num_blocks == num_blocks
    message = (
        r"max_memory_fraction=0\.25 of the free memory .* the longest request of the round takes .* raise it"
    )
    with pytest.raises(CacheMemoryError, match=message):
        size_cache(need, QWEN3_4B, torch.bfloat16, settings, free_bytes - 4 * 16 * cost.bytes_per_token)


def test_a_mask_is_no_larger_than_the_prompts_ask_for():
    short = [GroupLengths(20, 10, 1)] * 2
    masked, plain = CBSyncConfig(attn_implementation="sdpa", max_requests_per_batch=2), CBSyncConfig()
    assert measure_need(short, QWEN3_4B, plain).batch_tokens == CBSyncConfig.max_batch_tokens
    assert measure_need(short, QWEN3_4B, masked).batch_tokens == 64
    assert measure_need([GroupLengths(9000, 10, 2)], QWEN3_4B, masked).batch_tokens == 16_384


def test_cache_cost_counts_masks_only_for_masked_attention():
    """Per cached token: 147,456 bytes of keys and values, one layer's gathered heads, an index, a mask column."""
    masked, flash = (
        estimate_cache_cost(QWEN3_4B, torch.bfloat16, CBSyncConfig(attn_implementation=name), 1000, 32)
        for name in ("sdpa", "flash_attention_2")
    )
    assert flash.bytes_per_token == 147_456 + 2 * 8 * 128 * 2 + 8
    assert masked.bytes_per_token == 147_456 + (2 * 32 + 8) * 128 * 2 + 8 + 1000 * 2
    assert masked.fixed_bytes - flash.fixed_bytes == 1000 * ((2 * 32 + 8 - 2 * 8) * 128 * 2 + 1000 * 2)


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
@pytest.mark.parametrize("counts", [(4, 0), (2, 2), (1, 3), (0, 4)], ids=str)
def test_the_cost_is_near_upstreams_own(counts, attention):
    """Transformers refuses a cache beyond 0.9 of the free memory by its formula."""
    num_full, num_sliding = counts
    layer_types = ["full_attention"] * num_full + ["sliding_attention"] * num_sliding
    config = AutoConfig.for_model("gemma2", layer_types=layer_types, num_hidden_layers=4)
    config._attn_implementation = "paged|eager" if attention == "eager" else attention
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
    settings = CBSyncConfig(attn_implementation=attention)
    cost = estimate_cache_cost(config, torch.bfloat16, settings, 512, 16)
    num_blocks = 120
    upstream_bytes = handler.compute_memory_footprint(512, num_blocks * 4 // sector_layers)
    assert 0.9 * upstream_bytes < cost.total_bytes(num_blocks * 256) < 1.1 * upstream_bytes


def test_free_memory_is_the_available_ram_or_on_a_gpu_also_what_pytorch_holds_unused(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 * GIB))
    assert free_memory_bytes(torch.device("cpu")) == 7 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    assert free_memory_bytes(torch.device("cuda", 0)) == 65 * GIB


# Drivers


@pytest.mark.parametrize("attention", ["cbexp", "sdpa"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"allow_block_sharing": True, "max_requests_per_batch": 8}),
        ("gemma3", {"max_requests_per_batch": 5}),
        ("mistral", {}),
    ],
)
def test_a_cache_that_sizes_itself_holds_all_that_runs_at_once(
    check_drive, make_prompts, family, settings, attention
):
    """No request goes back into the queue, and little of the cache is left over."""
    prompts = make_prompts((30, 33, 9, 16, 40, 40), seed=5)
    asked = {"limits": 20, "num_generations": 4, "attn_implementation": attention}
    driver = check_drive(family, prompts, **asked, **settings)
    assert driver.resolved["safety_margin"] == 0
    num_waiting = [step.num_waiting for step in driver.steps]
    assert num_waiting == sorted(num_waiting, reverse=True)
    assert max(step.cache_used_fraction for step in driver.steps) > (0.6 if attention == "cbexp" else 0.5)


def test_forks_find_room_beside_blocks_that_are_kept_for_prefix_matches(check_drive, make_prompts):
    settings = {"page_size": 4, "allow_block_sharing": True, "max_requests_per_batch": 4}
    prompts = make_prompts((5, 10, 9, 13))
    driver = check_drive("qwen3", prompts, limits=[5, 1, 4, 3], num_generations=4, **settings)
    num_waiting = [step.num_waiting for step in driver.steps]
    assert num_waiting == sorted(num_waiting, reverse=True)


def test_a_driver_takes_its_share_says_so_and_lets_the_rest_wait(
    shared_model, make_driver, make_prompts, references, monkeypatch
):
    model, prompts = shared_model("qwen3"), make_prompts((30,) * 8, seed=2)
    driver = make_driver(model, max_batch_tokens=64)
    need = measure_need([GroupLengths(30, 12, 1)] * 8, model.config, driver._config)
    cost = estimate_cache_cost(model.config, model.dtype, driver._config, 64, 64)
    free = SimpleNamespace(num_bytes=2 * cost.total_bytes(12 * 8))
    monkeypatch.setattr("cbexp.engine.driver.free_memory_bytes", lambda device: free.num_bytes)
    with pytest.warns(
        UserWarning, match=rf"cache of 96 tokens, and .* need {need.num_blocks * 8}: requests wait"
    ):
        assert drive(driver, prompts) == references("qwen3", prompts)
    assert max(step.num_requests for step in driver.steps) < len(prompts)
    assert driver.resolved["safety_margin"] == 0.15
    free.num_bytes -= driver.resolved["cache_bytes"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for more_bytes in (0, cost.bytes_per_token * 8):  # too little for it to be worth a rebuild
            free.num_bytes += more_bytes
            assert drive(driver, prompts) == references("qwen3", prompts)
    assert driver.resolved["num_blocks"] == 12
    twice = [*prompts, *prompts]
    with pytest.warns(UserWarning, match=rf"need {2 * need.num_blocks * 8}: requests wait"):
        assert drive(driver, twice) == references("qwen3", twice)
    long = make_prompts((100,), seed=3)
    with pytest.raises(CacheMemoryError, match=r"max_memory_fraction=0\.5 of the free memory"):
        drive(driver, long)
    free.num_bytes = 2**30
    for asked in (long, twice):
        assert drive(driver, asked) == references("qwen3", asked)
    assert driver.resolved["num_blocks"] == 2 * need.num_blocks
