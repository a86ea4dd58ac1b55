"""What `cbexp.engine.upstream` relies on in transformers' internals: names, signatures, behaviour.

Run on each version supported. A failure names the function that has to change.
"""

import dataclasses
import functools
import inspect
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api, initialization
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from cbexp.engine import CBSyncConfig, sizing, support
from cbexp.engine.requests import GroupLengths
from cbexp.engine.upstream import Batcher, build
from cbexp.engine.upstream.admission import AdmissionControl
from cbexp.engine.upstream.scoring import Scorer
from tests.engine.upstream.processors import new_group, run_step, settings_for, submit


def relied_on_by(*functions):
    """Name in a failure the functions that break with the test, and their places."""

    def place_of(function):
        line = inspect.getsourcelines(function)[1]
        return f"{function.__qualname__} ({Path(inspect.getsourcefile(function)).name}:{line})"

    def decorate(test):
        @functools.wraps(test)
        def run(*args, **kwargs):
            try:
                return test(*args, **kwargs)
            except Exception as error:
                error.add_note(f"Relied on by {', '.join(map(place_of, functions))}")
                raise

        return run

    return decorate


# Names and signatures


def parameters(function):
    return {name for name in inspect.signature(function).parameters if name != "self"}


@relied_on_by(build.build_processor, build._build_cache)
def test_processor_and_cache_are_built_from_these_parts():
    assert parameters(continuous_api.ContinuousBatchProcessor.__init__) == {
        *("cache", "config", "generation_config", "continuous_batching_config", "logit_processor"),
        *("input_queue", "cancel_queue", "output_router", "background_thread_status"),
        *("model_device", "model_dtype", "scheduler", "distributed_helper"),
    }
    assert parameters(PagedAttentionCache.__init__) == {
        *("config", "continuous_batching_config", "device", "distributed_helper", "dtype"),
        "model_supports_logits_to_keep",
    }
    assert set(SCHEDULER_MAPPING) == {"fifo", "prefill_first"}


@relied_on_by(build.PagedCache.__init__)
def test_a_cache_takes_another_tensor_and_has_none_of_its_own(make_processor):
    cache = make_processor("gemma3").cache
    for allocator in cache.cache_allocators.values():
        assert parameters(type(allocator).register_cache_tensor) == {
            *("bytes_per_sector", "non_trash_bytes", "cache_tensor", "pool"),
        }
        assert allocator.pool is cache.pool
    tensors = [
        value
        for owner in (cache, *cache.cache_allocators.values())
        for value in vars(owner).values()
        if isinstance(value, torch.Tensor)
    ]
    assert len(tensors) == 1 + 2 * len(cache.cache_allocators)
    assert {tensor.data_ptr() for tensor in tensors} == {cache.cache_tensor.data_ptr()}
    assert cache.device == torch.device("cpu")


@relied_on_by(build._resolve_config)
def test_no_setting_is_new():
    """A setting that upstream adds would be left to upstream's own choice: decide on it."""
    assert parameters(initialization.resolve_continuous_batching_config) == {
        *("config", "cb_config", "workload_hints", "has_logit_processors", "device"),
    }
    assert {field.name for field in dataclasses.fields(ContinuousBatchingConfig)} == {
        # Passed.
        *("page_size", "num_blocks", "max_batch_tokens", "max_memory_percent", "max_requests_per_batch"),
        *("max_blocks_per_request", "allow_block_sharing", "use_async_batching", "use_cuda_graph"),
        *("varlen_compile_config", "decode_compile_config", "default_compile_level", "scheduler_type"),
        *("return_logprobs", "auto_switch_to_flash", "cpu_offload_space", "per_request_processors"),
        # Without effect here: only for graphs, offloading, the manager's queue, tensor parallelism; or deprecated.
        *("q_padding_interval_size", "kv_padding_interval_size", "cpu_offload_space_safety_threshold"),
        *("max_queue_size", "disable_nccl_graph_mixing", "cpu_group_timeout", "safety_margin", "seed"),
        *("drop_unsupported_processors", "use_default_compile_configs", "max_cached_graphs", "block_size"),
    }


NAMES = [
    (Batcher.__init__, "processor", ("scheduler", "output_router.output_queue", "cache.max_tokens_read")),
    (Batcher.run_batch, "processor", ("prepare_next_batch", "update_batch")),
    (Batcher._run_forward, "inputs", ("num_q_tokens", "num_request_in_batch", "logits_indices")),
    (Batcher._run_forward, "inputs", ("get_model_kwargs", "output_ids", "retrieve_device_outputs")),
    (Batcher.partial_completions, "inputs", ("requests_in_batch",)),
    (build.max_request_tokens, "cache", ("num_blocks", "read_cache_limit")),
    (Batcher.on_stream, "inputs", ("compute_stream",)),
    (Batcher._reserve_room, "cache", ("pool.try_to_free_sectors", "evict_cached_blocks")),
    (Batcher._fits, "cache", ("count_storable_requests",)),
    (Batcher._fits, "allocator", ("needs_new_blocks",)),
    (Batcher._account_for_tokens, "cache", ("count_new_complete_blocks", "mark_complete_blocks")),
    (Batcher._account_for_tokens, "scheduler", ("finish_request", "block_new_requests")),
    (Batcher._account_for_tokens, "request", ("_eos_token_ids", "_new_tokens_limit", "position_offset")),
    (Batcher._start_decoding_last_tokens, "request", ("remaining_prefill_tokens", "tokens_to_process")),
    (Batcher.cache_used_fraction.fget, "cache", ("num_sectors", "bytes_per_sector", "compute_free_capacity")),
    (Batcher.cache_used_fraction.fget, "allocator", ("bytes_per_block", "ledger.cached_blocks")),
    (Batcher._make_room_for_forks, "processor", ("scheduler._requests_to_fork", "cache.evict_cached_blocks")),
    (Batcher.reset, "processor", ("offloading_manager.reset", "scheduler.reset", "cache.pool.reset")),
    (Batcher.reset, "allocator", ("block_table.clear", "ledger.reset")),
    (Scorer.run, "processor", ("cache.use_prefix_sharing", "scheduler.has_pending_requests")),
    (Scorer._add_completions, "scheduler", ("active_requests", "waiting_requests")),
    (Scorer._add_completions, "request", ("num_children", "initial_tokens", "remaining_prefill_tokens")),
    (Scorer._score_batch, "inputs", ("num_q_tokens", "device", "config.vocab_size", "requests_in_batch")),
    (build._page_pool, "allocator", ("cache_tensor", "tokens_per_page", "block_physical_stride")),
    (build._page_pool, "allocator", ("blocks_per_sector", "layer_indices", "layer_type", "head_dim")),
    (build.describe_processor, "processor", ("cb_config.cuda_graph_booleans", "cache.use_prefix_sharing")),
    (support.require_supported_model, "model", ("can_generate",)),
    (support.find_architecture_problem, "model", ("_is_stateful", "_supports_attention_backend")),
    (support.find_architecture_problem, "config", ("is_encoder_decoder", "is_heterogeneous")),
    (support.find_architecture_problem, "config", ("sub_configs", "get_text_config")),
    (build._build_cache, "model", ("_supports_logits_to_keep",)),
    (AdmissionControl.schedule_batch, "scheduler", ("starved_requests", "_try_to_meet_safety_margin")),
    (AdmissionControl._get_waiting_candidates, "scheduler", ("_get_waiting_candidates",)),
]


@pytest.mark.parametrize(("user", "owner", "names"), NAMES)
def test_the_names_that_are_read(make_processor, shared_model, user, owner, names):
    processor, model = make_processor(), shared_model("qwen3")
    owners = {
        "model": model,
        "config": model.config,
        "processor": processor,
        "cache": processor.cache,
        "scheduler": processor.scheduler,
    }
    owners |= {"inputs": processor.inputs_and_outputs, "request": RequestState("r", [1, 2])}
    owners["allocator"] = processor.cache.cache_allocators["full_attention"]
    relied_on_by(user)(attrgetter(*names))(owners[owner])


@relied_on_by(build._block_table_width)
def test_the_block_table_holds_the_longest_request():
    for attention, device, changes, width in (
        # 4096 positions in pages of 256, or what a smaller cache holds.
        ("flash_attention_3", "cuda", {}, 16),
        ("flash_attention_3", "cuda", {"num_blocks": 5}, 5),
        # FlashAttention 2 wants pages of a multiple of 256.
        ("flash_attention_2", "cuda", {}, 16),
        ("flash_attention_2", "cuda", {"page_size": 128}, 0),
        ("sdpa", "cuda", {}, 0),
        ("flash_attention_3", "cpu", {}, 0),
    ):
        settings = CBSyncConfig(**({"page_size": 256, "num_blocks": 100} | changes))
        config = Qwen3Config(max_position_embeddings=4096)
        windowed = Qwen3Config(layer_types=["sliding_attention"] * 32, sliding_window=64)
        windowed._attn_implementation = config._attn_implementation = attention
        assert build._block_table_width(config, settings, torch.device(device)) == width
        assert build._block_table_width(windowed, settings, torch.device(device)) == 0


# The cache


@pytest.mark.parametrize("num_sliding", [1, 2, 4])
@relied_on_by(sizing.count_blocks)
def test_blocks_that_are_counted_cover_what_sectors_round_away(new_model, num_sliding):
    kinds = ["sliding_attention"] * num_sliding + ["full_attention"] * (5 - num_sliding)
    model = new_model("gemma3", layer_types=kinds)
    layout = sizing.describe_cache_layout(model.config)
    for num_requests in range(1, 12):
        num_blocks = sizing.count_blocks([GroupLengths(8, 1, num_requests)], layout, 8, shares_blocks=True)
        cache = build.build_processor(model, settings_for(model, num_blocks=num_blocks)).cache
        for index in range(num_requests):
            assert cache.can_store_request_tokens(RequestState(str(index), []), 8)


@relied_on_by(build._group_layers, build.max_request_tokens, build._config_for_upstream)
def test_layers_are_grouped_by_kind_and_masked_for_sdpa_and_eager(shared_model, make_processor):
    assert group_layers_by_attn_type(shared_model("gemma3").config) == {
        "sliding_attention": [0, 1, 2, 3],
        "full_attention": [4],
    }
    config = Qwen3Config()
    config.layer_types = ["linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        group_layers_by_attn_type(config)
    # A cache without a length limit has a read limit.
    for family, limit in {"qwen3": None, "llama": None, "gemma2": None, "mistral": 12}.items():
        processor = make_processor(family)
        assert family == "qwen3" or processor.cache.read_cache_limit == limit
        # The eager model keeps its own attention function, whose masks upstream builds for another name.
        assert processor.inputs_and_outputs.attention_mask is not None


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral"])
@relied_on_by(build._page_pool)
def test_pages_are_where_transformers_writes(make_processor, family):
    """Each token's key and value by page, table entry and offset, against transformers' own views and indices."""
    cache = make_processor(family).cache
    assert cache.can_store_request_tokens(RequestState("r", []), 20)
    cache.cache_tensor.copy_(torch.arange(cache.cache_tensor.numel()) % 251)
    for name, pool in build.build_page_pools(cache, max_positions=30).items():
        allocator = cache.cache_allocators[name]
        # Pages for 30 positions, or for the window.
        assert pool.table_width == {0: 4, 12: 2, 16: 2}[pool.window]
        window = pool.window or 20
        written = allocator.get_write_indices("r", 0, 20)[-window:]
        entries = [block * pool.pages_per_block for block in allocator.block_table["r"]]
        for rank, layer_index in enumerate(pool.layer_indices):
            keys, values = allocator._kv_token_views[layer_index]
            for position, index in zip(range(20 - window, 20), written, strict=False):
                page, offset = divmod(position % window, 8)
                assert torch.equal(pool.pages[entries[page] + 2 * rank, offset], keys[index])
                assert torch.equal(pool.pages[entries[page] + 2 * rank + 1, offset], values[index])
        first_keys, _ = allocator._kv_token_views[pool.layer_indices[0]]
        assert torch.equal(pool.pages[pool.trash_page, 0], first_keys[allocator.write_trash_index])


# Steps and requests


@relied_on_by(build.generated_ids, Batcher.partial_completions)
def test_an_evicted_request_is_its_prompt_and_tokens_again():
    state = build.build_request_state(new_group(7, [1, 2], 5, (9,)))
    state.status = RequestStatus.DECODING
    for token in (3, 4):
        state.update_and_check_completion(token, None)
    again = state.create_equivalent_initial_request()
    assert (again.request_id, again.initial_tokens, again.generated_tokens) == ("req_7", [1, 2, 3, 4], [])
    assert (again.max_new_tokens, again.eos_token_id) == (3, [9])
    assert build.generated_ids(state) == build.generated_ids(again) == (3, 4)


@relied_on_by(build.child_id, Batcher.submit, Batcher.reset)
def test_forks_join_after_the_prompt_and_a_reset_scheduler_and_pool_are_new(make_processor, shared_model):
    processor = make_processor()
    submit(processor, "p", [1, 2, 3], num_children=2)
    run_step(processor, shared_model("qwen3"))
    forks = ["p", build.child_id("p", 0), build.child_id("p", 1)]
    assert list(processor.scheduler.active_requests) == forks
    processor.scheduler.block_new_requests = True
    processor.scheduler.reset()
    processor.cache.pool.reset()
    assert not processor.has_pending_requests()
    assert not processor.scheduler.block_new_requests
    assert processor.cache.compute_free_capacity() == 1


# What the engine's own subclasses leave out


@relied_on_by(build._SeedlessDistributedHelper.set_tp_seed, build._Processor.__del__)
def test_upstream_reseeds_and_has_a_finalizer_and_the_engine_does_not(make_processor):
    before = torch.get_rng_state()
    processor = make_processor()
    assert torch.equal(torch.get_rng_state(), before)
    DistributedHelper.set_tp_seed(processor.distributed_helper, None, torch.device("cpu"))
    assert not torch.equal(torch.get_rng_state(), before)
    assert "__del__" in vars(continuous_api.ContinuousBatchProcessor)
    assert type(processor).__del__ is not continuous_api.ContinuousBatchProcessor.__del__
