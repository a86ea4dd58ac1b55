"""What the engine relies on in transformers' internals: names, signatures, behaviour. Run on each version supported."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api, initialization
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.utils.generic import is_flash_attention_requested

from cbexp.engine.cb_internals import (
    EngineSettings,
    _block_table_width,
    build_page_pools,
    build_processor,
    build_request_state,
    child_id,
    generated_ids,
    sector_slack_blocks,
)


def parameters(function):
    return {name for name in inspect.signature(function).parameters if name != "self"}


@pytest.fixture
def make_processor(shared_model):
    def make(family="qwen3", **changes):
        settings = {
            "page_size": 8,
            "num_blocks": 20,
            "max_batch_tokens": 64,
            "max_requests_per_batch": 8,
            "allow_block_sharing": False,
            "scheduler": "fifo",
            "attn_implementation": shared_model(family).config._attn_implementation,
        }
        return build_processor(shared_model(family), EngineSettings(**(settings | changes)))

    return make


def submit(processor, request_id, prompt_ids, max_new_tokens=4, num_children=0):
    state = build_request_state(request_id, prompt_ids, max_new_tokens, (), num_children)
    processor.scheduler.add_waiting_request(state)
    return state


@torch.no_grad()
def run_step(processor, model):
    if not processor.prepare_next_batch():
        return False
    processor._generation_step(model)
    processor.update_batch()
    return True


# Names and signatures


def test_the_processor_is_built_from_these_parts():
    assert parameters(continuous_api.ContinuousBatchProcessor.__init__) == {
        "cache",
        "config",
        "generation_config",
        "continuous_batching_config",
        "logit_processor",
        "input_queue",
        "cancel_queue",
        "output_router",
        "background_thread_status",
        "model_device",
        "model_dtype",
        "scheduler",
        "distributed_helper",
    }
    assert parameters(PagedAttentionCache.__init__) == {
        "config",
        "continuous_batching_config",
        "device",
        "distributed_helper",
        "dtype",
        "model_supports_logits_to_keep",
    }
    assert parameters(initialization.resolve_continuous_batching_config) == {
        "config",
        "cb_config",
        "workload_hints",
        "has_logit_processors",
        "device",
    }
    assert parameters(DistributedHelper.set_tp_seed) == {"seed", "model_device"}
    assert set(SCHEDULER_MAPPING) == {"fifo", "prefill_first"}


def test_no_setting_is_new():
    """A setting that upstream adds would be left to upstream's own choice: decide on it in `_resolve_config`."""
    assert {field.name for field in dataclasses.fields(ContinuousBatchingConfig)} == {
        # Passed by `_resolve_config`.
        "page_size",
        "num_blocks",
        "max_batch_tokens",
        "max_memory_percent",
        "max_requests_per_batch",
        "max_blocks_per_request",
        "allow_block_sharing",
        "use_async_batching",
        "use_cuda_graph",
        "varlen_compile_config",
        "decode_compile_config",
        "default_compile_level",
        "scheduler_type",
        "return_logprobs",
        "auto_switch_to_flash",
        "cpu_offload_space",
        "per_request_processors",
        # Without effect here: only for graphs, offloading, the manager's queue, tensor parallelism; or deprecated.
        "q_padding_interval_size",
        "kv_padding_interval_size",
        "cpu_offload_space_safety_threshold",
        "max_queue_size",
        "disable_nccl_graph_mixing",
        "cpu_group_timeout",
        "drop_unsupported_processors",
        "safety_margin",
        "seed",
        "use_default_compile_configs",
        "max_cached_graphs",
        "block_size",
    }


def test_what_model_support_asks_of_models_and_configs(shared_model):
    model = shared_model("qwen3")
    assert isinstance(model, PreTrainedModel)
    assert (model._is_stateful, model._supports_attention_backend, model.can_generate()) == (
        False,
        True,
        True,
    )
    assert model._supports_logits_to_keep() is True
    config = model.config
    assert (config.is_encoder_decoder, config.is_heterogeneous, dict(config.sub_configs)) == (
        False,
        False,
        {},
    )
    assert config.get_text_config() is config


def test_flash_versions_are_told_by_name():
    def is_2_or_3(name):
        config = Qwen3Config()
        config._attn_implementation = name
        return is_flash_attention_requested(config, version=[2, 3])

    assert [is_2_or_3(f"flash_attention_{version}") for version in (2, 3, 4)] == [True, True, False]
    assert not is_2_or_3("sdpa")


@pytest.mark.parametrize(
    ("attention", "device", "changes", "width"),
    [
        # 4096 positions in pages of 256, or what a smaller cache holds.
        ("flash_attention_3", "cuda", {}, 16),
        ("flash_attention_3", "cuda", {"num_blocks": 5}, 5),
        ("flash_attention_3", "cuda", {"page_size": 100}, 41),
        ("flash_attention_2", "cuda", {}, 16),
        # FlashAttention 2 wants pages of a multiple of 256.
        ("flash_attention_2", "cuda", {"page_size": 128}, 0),
        ("flash_attention_4", "cuda", {}, 0),
        ("sdpa", "cuda", {}, 0),
        ("flash_attention_3", "cpu", {}, 0),
    ],
)
def test_the_block_table_holds_the_longest_request(attention, device, changes, width):
    config = Qwen3Config(max_position_embeddings=4096)
    config._attn_implementation = attention
    settings = {"page_size": 256, "num_blocks": 100, "max_batch_tokens": 64, "max_requests_per_batch": 8}
    settings |= {
        "allow_block_sharing": False,
        "scheduler": "fifo",
        "attn_implementation": attention,
    } | changes
    assert _block_table_width(config, EngineSettings(**settings), torch.device(device)) == width
    windowed = Qwen3Config(layer_types=["sliding_attention"] * 32, sliding_window=64)
    windowed._attn_implementation = attention
    assert _block_table_width(windowed, EngineSettings(**settings), torch.device(device)) == 0


# The cache


def test_one_kind_of_layer_gives_exactly_the_blocks_asked_for(make_processor):
    cache = make_processor(num_blocks=20).cache
    assert (cache.num_blocks, cache.num_sectors) == (20, 20)
    assert infer_max_single_request_tokens(cache) == 20 * 8
    # Two trash sectors come first, and no request gets a block of theirs.
    assert cache.cache_tensor.numel() == (20 + 2) * cache.bytes_per_sector
    assert cache.can_store_request_tokens(RequestState("all", []), 160)
    (allocator,) = cache.cache_allocators.values()
    assert sorted(allocator.block_table["all"]) == list(range(2, 22))
    assert (allocator.read_trash_index, cache.compute_free_capacity()) == (0, 0)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_the_slack_covers_what_sectors_round_away(make_processor, shared_model, family):
    """Requests that need n blocks of each kind fit in n plus the slack, whatever n."""
    slack = sector_slack_blocks(shared_model(family).config)
    for num_requests in range(1, 12):
        cache = make_processor(family, num_blocks=num_requests + slack).cache
        for index in range(num_requests):
            assert cache.can_store_request_tokens(RequestState(str(index), []), 8)


def test_layers_are_grouped_by_kind_and_unknown_kinds_refused(shared_model):
    assert group_layers_by_attn_type(shared_model("gemma3").config) == {
        "sliding_attention": [0, 1, 2, 3],
        "full_attention": [4],
    }
    config = Qwen3Config()
    config.layer_types = ["linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        group_layers_by_attn_type(config)


def test_a_cache_without_a_length_limit_is_told_by_its_read_limit(make_processor):
    assert make_processor("mistral").cache.read_cache_limit == 12
    assert make_processor("gemma2").cache.read_cache_limit is None


def test_masks_are_built_for_sdpa_and_eager(make_processor):
    """The eager model keeps its own attention function, whose masks upstream builds for another name."""
    for family in ("qwen3", "llama", "gemma2"):
        assert make_processor(family).inputs_and_outputs.attention_mask is not None


def test_leftovers_in_the_input_buffers_do_no_harm(make_processor, shared_model):
    """Each batch clears what it uses, so an interrupted one leaves nothing to clean."""

    def tokens(processor):
        state = submit(processor, "r", [5, 6, 7])
        while run_step(processor, shared_model("qwen3")):
            pass
        return state.generated_tokens

    clean, soiled = make_processor(), make_processor()
    inputs = soiled.inputs_and_outputs
    for buffer in (inputs._bulk_input_tensor, inputs.read_index_storage, inputs.write_index_storage):
        buffer.fill_(3)
    inputs.attention_mask["full_attention"].fill_(1)
    assert tokens(soiled) == tokens(clean)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral"])
def test_pages_are_where_transformers_writes(make_processor, family):
    """Each token's key and value by page, table entry and offset, against transformers' own views and indices."""
    cache = make_processor(family).cache
    assert cache.can_store_request_tokens(RequestState("r", []), 20)
    cache.cache_tensor.copy_(torch.arange(cache.cache_tensor.numel()) % 251)
    for name, pool in build_page_pools(cache, max_positions=30).items():
        allocator = cache.cache_allocators[name]
        assert (
            pool.table_width == {0: 4, 12: 2, 16: 2}[pool.window]
        )  # pages for 30 positions, or for the window
        window = pool.window or 20
        written = allocator.get_write_indices("r", 0, 20)[-window:]
        entries = [block * pool.pages_per_block for block in allocator.block_table["r"]]
        for rank, layer_index in enumerate(pool.layer_indices):
            keys, values = allocator._kv_token_views[layer_index]
            for position, index in zip(range(20 - window, 20), written, strict=False):
                page, offset = divmod(position % window, 8)
                assert torch.equal(pool.pages[entries[page] + 2 * rank, offset], keys[index])
                assert torch.equal(pool.pages[entries[page] + 2 * rank + 1, offset], values[index])
        trash = allocator.write_trash_index
        assert torch.equal(
            pool.pages[pool.trash_page, 0], allocator._kv_token_views[pool.layer_indices[0]][0][trash]
        )


# Steps and requests


def test_a_step_tells_its_batch(make_processor, shared_model):
    processor = make_processor(max_batch_tokens=8)
    assert processor.prepare_next_batch() is False
    submit(processor, "long", list(range(10)), max_new_tokens=2)
    inputs, rows = processor.inputs_and_outputs, []
    while processor.prepare_next_batch():
        (future,) = inputs.requests_in_batch
        rows.append((inputs.num_q_tokens, future.has_new_token, len(future.state.generated_tokens)))
        processor._generation_step(shared_model("qwen3"))
        processor.update_batch()
    assert rows == [(8, False, 0), (2, True, 0), (1, True, 1)]
    output = processor.output_router.output_queue.get_nowait()
    assert (output.request_id, len(output.generated_tokens), output.error) == ("long", 2, None)
    assert processor.cache.compute_free_capacity() == 1


def test_forks_are_named_and_join_after_the_prompt(make_processor, shared_model):
    processor = make_processor()
    submit(processor, "p", [1, 2, 3], num_children=2)
    run_step(processor, shared_model("qwen3"))
    assert list(processor.scheduler.active_requests) == ["p", child_id("p", 0), child_id("p", 1)]


def test_an_evicted_request_is_its_prompt_and_tokens_again():
    state = build_request_state("r", [1, 2], 5, (9,), 0)
    state.status = RequestStatus.DECODING
    for token in (3, 4):
        state.update_and_check_completion(token, None)
    again = state.create_equivalent_initial_request()
    assert (again.request_id, again.initial_tokens, again.generated_tokens) == ("r", [1, 2, 3, 4], [])
    assert (again.max_new_tokens, again.eos_token_id) == (3, [9])
    assert generated_ids(state) == generated_ids(again) == (3, 4)


@pytest.mark.parametrize(("eos_token_ids", "is_finished"), [((), False), ((7,), True), ((6, 7), True)])
def test_eos_ids_are_a_sequence(eos_token_ids, is_finished):
    state = build_request_state("r", [1], 5, eos_token_ids, 0)
    state.status = RequestStatus.DECODING
    assert state.update_and_check_completion(7, None) is is_finished


def test_a_reset_scheduler_and_pool_are_new(make_processor, shared_model):
    processor = make_processor()
    for request_id in "abc":
        submit(processor, request_id, [1, 2, 3])
    run_step(processor, shared_model("qwen3"))
    processor.scheduler.block_new_requests = True
    processor.scheduler.reset()
    processor.cache.pool.reset()
    assert not processor.has_pending_requests()
    assert not processor.scheduler.block_new_requests
    assert processor.cache.compute_free_capacity() == 1


def test_the_safety_margin_is_read_at_each_batch(make_processor, shared_model):
    """It can be set for each round: at 1 a second prompt waits until the cache is free again."""
    processor = make_processor()
    processor.scheduler.safety_margin = 1.0
    submit(processor, "a", [1, 2, 3])
    run_step(processor, shared_model("qwen3"))
    submit(processor, "b", [1, 2, 3])
    run_step(processor, shared_model("qwen3"))
    assert list(processor.scheduler.waiting_requests) == ["b"]


# What the engine's own subclasses leave out


def test_upstream_reseeds_and_the_engine_does_not(make_processor):
    before = torch.get_rng_state()
    helper = make_processor().distributed_helper
    assert torch.equal(torch.get_rng_state(), before)
    DistributedHelper.set_tp_seed(helper, None, torch.device("cpu"))
    assert not torch.equal(torch.get_rng_state(), before)


def test_upstreams_finalizer_is_replaced(make_processor):
    assert "__del__" in vars(continuous_api.ContinuousBatchProcessor)
    assert type(make_processor()).__del__ is not continuous_api.ContinuousBatchProcessor.__del__
