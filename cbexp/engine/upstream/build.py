"""Builds transformers' processor, its cache and its scheduler, to be stepped by the caller; describes what it built."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import (
    resolve_continuous_batching_config,
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils.generic import is_flash_attention_requested

from cbexp.engine.attention import ATTENTION_NAME
from cbexp.engine.buffers import PagePool
from cbexp.engine.memory import allocate
from cbexp.engine.requests import PromptGroup
from cbexp.engine.settings import MAX_MEMORY_FRACTION
from cbexp.engine.sizing import MASKED_ATTENTIONS
from cbexp.engine.support import read_positions
from cbexp.engine.types import CacheMemoryError, CBSyncConfig, EngineError, UnsupportedModelError
from cbexp.engine.upstream.admission import AdmissionControl

# FlashAttention 2 reads a cache through a block table in pages of a multiple of this many tokens.
FLASH_2_PAGE_TOKENS = 256


class _Processor(ContinuousBatchProcessor):
    """Upstream's processor without its `__del__`, which prints a traceback when it runs at interpreter exit."""

    def __del__(self) -> None:
        """Nothing: `Batcher.close` gives the memory back."""


class PagedCache(PagedAttentionCache):
    """Upstream's cache, on `memory` that can be given up for a while; it holds zeros at first, and after `clear`."""

    def __init__(self, device: torch.device, **parts: Any) -> None:
        super().__init__(device="meta", **parts)  # where its tensor takes no memory
        self.device = device
        self.memory = allocate(self.cache_tensor.numel(), device)
        self.cache_tensor = self.memory.as_tensor()
        self.clear()
        for allocator in self.cache_allocators.values():
            allocator.register_cache_tensor(
                self.bytes_per_sector, self.num_sectors * self.bytes_per_sector, self.cache_tensor, self.pool
            )

    def clear(self) -> None:
        """Zero all of it, on the current stream: what padding reads is zero, and no block holds a NaN."""
        self.cache_tensor.zero_()


_CONTROLLED_SCHEDULERS = {
    name: type(f"Controlled{upstream.__name__}", (AdmissionControl, upstream), {})
    for name, upstream in SCHEDULER_MAPPING.items()
}


class _SeedlessDistributedHelper(DistributedHelper):
    """Upstream's helper without its reseeding of the caller's global generators: greedy decoding draws nothing."""

    def set_tp_seed(self, seed: int | None, model_device: torch.device) -> None:
        """Leave every generator alone."""


def check_attention(model_config: PreTrainedConfig, config: CBSyncConfig) -> None:
    """Raise unless a paged cache serves the model's layers with the attention that is asked for.

    Raises:
        UnsupportedModelError: a layer or the attention implementation is not served.
        EngineError: the implementation is not the one that the model was loaded with.
    """
    _group_layers(model_config)
    if config.has_engine_attention:
        return
    own = model_config._attn_implementation
    if config.attn_implementation != own:
        raise EngineError(
            f"attn_implementation={config.attn_implementation!r} is neither the engine's own ('cbexp') nor what the "
            f"model was loaded with ({own!r}): load the model with it."
        )
    require_paged_attention(model_config)


def require_paged_attention(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` unless the model's own attention implementation works on a paged cache."""
    if not reads_paged_cache(config):
        raise UnsupportedModelError(
            f"{config.model_type} cannot be driven with attn_implementation={config._attn_implementation!r}: "
            "load it with sdpa, eager or a flash implementation."
        )


def reads_paged_cache(config: PreTrainedConfig) -> bool:
    """Whether the model's own attention implementation works on a paged cache."""
    return config._attn_implementation in MASKED_ATTENTIONS or is_flash_attention_requested(config)


def attention_name(config: CBSyncConfig) -> str:
    """The attention that runs, by the name that transformers knows."""
    return ATTENTION_NAME if config.has_engine_attention else config.attn_implementation


def build_processor(model: PreTrainedModel, settings: CBSyncConfig) -> ContinuousBatchProcessor:
    """Build a processor with its cache and scheduler, without upstream's manager and its thread.

    `settings` leave neither `num_blocks` nor `max_requests_per_batch` open. Nothing of the model is changed. Raises
    `CacheMemoryError` when cache and buffers do not fit in the free memory.
    """
    config = _config_for_upstream(model.config, attention_name(settings))
    helper = _SeedlessDistributedHelper(device_mesh=None, cpu_group_timeout=None)
    with on_cpu_by_default(), _on_device(model.device):
        cb_config = _resolve_config(config, settings, model.device)
        cache = _build_cache(model, config, cb_config, helper)
        update_cb_config_after_cache_creation(cb_config, cache.num_blocks, cache.max_batch_tokens)
        return _Processor(
            cache=cache,
            config=config,
            # The processor reads nothing but `do_sample` here: requests carry their own limits and EOS.
            generation_config=GenerationConfig(do_sample=False),
            continuous_batching_config=cb_config,
            logit_processor=ContinuousBatchingLogitsProcessorList(LogitsProcessorList()),
            input_queue=None,
            cancel_queue=None,
            output_router=OutputRouter(),
            background_thread_status=BackgroundThreadStatus(),
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=cast(Any, _CONTROLLED_SCHEDULERS[settings.scheduler])(
                cache, safety_margin=0.0, max_requests_per_batch=settings.max_requests_per_batch
            ),
            distributed_helper=helper,
        )


def can_share_blocks(config: PreTrainedConfig) -> bool:
    """Whether upstream lets requests share blocks: no layer's cache is the ring of a sliding window."""
    return SLIDING_ATTENTION not in _group_layers(config)


def max_request_tokens(cache: PagedAttentionCache) -> int | None:
    """Most tokens of one request that the cache, while empty, can store; None when there is no such limit.

    A model with sliding layers alone needs no more than its window, however long the request.
    """
    longest = infer_max_single_request_tokens(cache)
    window: int | None = cache.read_cache_limit
    return None if window is not None and longest >= window else longest


def build_page_pools(cache: PagedAttentionCache, max_positions: int) -> dict[str, PagePool]:
    """Attention type -> where its keys and values live; tables as wide as the longest request that can be stored."""
    longest = min(infer_max_single_request_tokens(cache), max_positions)
    views: dict[tuple[int, ...], Tensor] = {}
    return {name: _page_pool(allocator, longest, views) for name, allocator in cache.cache_allocators.items()}


def _page_pool(allocator: Any, longest: int, views: dict[tuple[int, ...], Tensor]) -> PagePool:
    page_size = allocator.tokens_per_page
    pages = allocator.cache_tensor.view(-1, page_size, allocator.num_key_value_heads, allocator.head_dim)
    # The types share one allocation: two tensors of it would be aliases, whose changes no compiler follows.
    pages = views.setdefault((pages.data_ptr(), *pages.shape), pages)
    pages_per_block = allocator.block_physical_stride // page_size
    window = allocator.sliding_window if allocator.layer_type == SLIDING_ATTENTION else 0
    num_stored = min(longest, window) if window else longest
    return PagePool(
        layer_indices=tuple(allocator.layer_indices),
        pages=pages,
        pages_per_block=pages_per_block,
        # The second sector: upstream's write trash. The first is its read trash, which stays zero.
        trash_page=allocator.blocks_per_sector * pages_per_block,
        table_width=math.ceil(num_stored / page_size),
        window=window,
    )


def build_request_state(group: PromptGroup) -> RequestState:
    """Upstream's request; its forks are made once all of the prompt but its last token is cached."""
    return RequestState(
        request_id=group.request_ids[0],
        initial_tokens=list(group.prompt_ids),
        max_new_tokens=group.max_new_tokens,
        eos_token_id=[*group.eos_token_ids, *group.sampling.stop_token_ids],
        num_children=len(group.numbers) - 1,
    )


def generated_ids(state: RequestState) -> tuple[int, ...]:
    """All tokens of a request so far; upstream makes those from before an eviction part of its prompt."""
    output = state.to_generation_output()
    return tuple(output.generated_tokens)


def child_id(parent_id: str, index: int) -> str:
    """Upstream's id for a fork (made in `ContinuousBatchProcessor.update_batch`)."""
    return f"{parent_id}__child#{index}"


def describe_processor(processor: ContinuousBatchProcessor) -> dict[str, Any]:
    """Settings as they run, as plain JSON values."""
    cache, cb_config = processor.cache, processor.cb_config
    table_width = cb_config.max_blocks_per_request or 0
    return {
        "page_size": cb_config.page_size,
        "num_blocks": int(cache.num_blocks),
        "cache_tokens": int(cache.num_blocks) * cb_config.page_size,
        "cache_bytes": cache.cache_tensor.numel(),
        "max_batch_tokens": cb_config.max_batch_tokens,
        "max_requests_per_batch": cb_config.max_requests_per_batch,
        "max_blocks_per_request": table_width,
        "decode_fast_path": table_width > 0,
        "block_sharing": cache.use_prefix_sharing,
        "scheduler": cb_config.scheduler_type,
        "async_batching": cb_config.use_async_batching,
        "cuda_graph": any(cb_config.cuda_graph_booleans),
        "compile_mode": None,
        "cpu_offload_gib": cb_config.cpu_offload_space,
    }


def _group_layers(config: PreTrainedConfig) -> dict[str, list[int]]:
    try:
        return group_layers_by_attn_type(config)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be driven: a paged cache serves full and sliding attention only ({error})."
        ) from error


def on_cpu_by_default() -> AbstractContextManager[object]:
    """New tensors for which no device is named are on the CPU in the body, as the engine and model code expect.

    A caller may have set another default. Where none is set nothing happens: torch would call Python at every operator.
    """
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu


@contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    """Make `device` current: upstream measures the free memory of the current one."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


def _config_for_upstream(config: PreTrainedConfig, attn_implementation: str) -> PreTrainedConfig:
    """A copy with the attention that will run, where "eager" reads "paged|eager": for that name upstream builds masks.

    The model itself stays "eager" and runs its own attention function on those masks; upstream's paged one drops the
    soft cap. The copy has no `compile_config` either, which upstream would take up by itself.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "paged|eager" if attn_implementation == "eager" else attn_implementation
    config.compile_config = None
    return config


def _resolve_config(
    config: PreTrainedConfig, settings: CBSyncConfig, device: torch.device
) -> ContinuousBatchingConfig:
    """Upstream's settings, with nothing left for it to choose."""
    asked = ContinuousBatchingConfig(
        page_size=settings.page_size,
        num_blocks=settings.num_blocks,
        max_batch_tokens=settings.max_batch_tokens,
        max_memory_percent=MAX_MEMORY_FRACTION,
        max_requests_per_batch=settings.max_requests_per_batch,
        max_blocks_per_request=_block_table_width(config, settings, device),
        allow_block_sharing=settings.allow_block_sharing,
        use_async_batching=False,
        use_cuda_graph=False,
        varlen_compile_config=None,
        decode_compile_config=None,
        default_compile_level=0,
        scheduler_type=settings.scheduler,
        return_logprobs=False,
        auto_switch_to_flash=False,
        cpu_offload_space=0.0,
        per_request_processors=False,
    )
    return resolve_continuous_batching_config(
        config=config, cb_config=asked, workload_hints=None, has_logit_processors=False, device=device
    )


def _block_table_width(config: PreTrainedConfig, settings: CBSyncConfig, device: torch.device) -> int:
    """Blocks of the longest request that model and cache admit, where decode can read the cache through a block table.

    That takes CUDA, no sliding window, and FlashAttention 3, or 2 with pages that suit it; elsewhere 0 turns it off.
    """
    has_kernel = device.type == "cuda" and (
        is_flash_attention_requested(config, version=3)
        or (is_flash_attention_requested(config, version=2) and settings.page_size % FLASH_2_PAGE_TOKENS == 0)
    )
    if not has_kernel or SLIDING_ATTENTION in _group_layers(config):
        return 0
    assert settings.num_blocks is not None
    cache_tokens = settings.num_blocks * settings.page_size
    longest = min(cache_tokens, read_positions(config).count or cache_tokens)
    return math.ceil(longest / settings.page_size)


def _build_cache(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    cb_config: ContinuousBatchingConfig,
    helper: DistributedHelper,
) -> PagedCache:
    try:
        return PagedCache(
            model.device,
            config=config,
            continuous_batching_config=cb_config,
            distributed_helper=helper,
            dtype=model.dtype,
            model_supports_logits_to_keep=cast(Any, model)._supports_logits_to_keep(),
        )
    except MemoryError as error:
        raise CacheMemoryError(
            f"A KV cache of {cb_config.num_blocks} blocks of {cb_config.page_size} tokens, with buffers for "
            f"{cb_config.max_batch_tokens} batch tokens, does not fit in {MAX_MEMORY_FRACTION:.0%} of the free memory: "
            f"lower num_blocks, max_batch_tokens or max_requests_per_batch ({error})."
        ) from error
