"""Translates our settings into transformers' own `ContinuousBatchingConfig`, with nothing left open.

A mode that compiles without graphs is one of upstream's compile levels. One in which torch.compile records graphs is a
`CompileConfig` of that mode; upstream warns that it works badly. In the others with graphs, upstream captures them
itself. Asynchronous batching goes with captures where no attention mask is needed (flash attention), as upstream
recommends; the decode fast path goes with FlashAttention 2 or 3 on CUDA in every mode.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import CompileConfig, ContinuousBatchingConfig
from transformers.utils.generic import is_flash_attention_requested

from cbexp.engine.settings import MAX_MEMORY_FRACTION, check_device
from cbexp.engine.sizing import resolve_max_requests
from cbexp.engine.support import read_positions
from cbexp.engine.types import COMPILE_MODES, CBSyncConfig, EngineError

# torch.compile's name of a mode -> upstream's `default_compile_level`, with dynamic shapes.
LEVELS = {"default": 1, "max-autotune-no-cudagraphs": 2}


def build_batching_config(
    config: CBSyncConfig,
    model_config: PreTrainedConfig,
    device: torch.device,
    max_request_tokens: int | None = None,
) -> ContinuousBatchingConfig:
    """Upstream's settings for a model with `model_config` on `device`.

    `max_request_tokens`: prompt and new tokens of the longest request to come, which sizes the block table (None: the
    longest that cache and model admit).

    Raises:
        EngineError: the compile mode needs CUDA, and `device` is another; or the cache has no size.
    """
    check_device(config, device.type)
    if config.num_blocks is None:
        raise EngineError("num_blocks is not set: the cache of transformers' manager has a fixed size.")
    mode = COMPILE_MODES[config.compile_mode]
    captures = mode.graphs == "engine"
    width = _block_table_width(config.num_blocks, config.page_size, max_request_tokens, model_config, device)
    compile_config = CompileConfig(mode=str(mode.torch_mode)) if mode.graphs == "torch" else None
    return ContinuousBatchingConfig(
        page_size=config.page_size,
        num_blocks=config.num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_memory_percent=MAX_MEMORY_FRACTION,
        max_requests_per_batch=min(config.num_blocks, resolve_max_requests(config)),
        max_blocks_per_request=width,
        allow_block_sharing=config.allow_block_sharing,
        use_async_batching=captures and is_flash_attention_requested(model_config),
        use_cuda_graph=captures,
        varlen_compile_config=compile_config,
        decode_compile_config=compile_config if width else None,
        default_compile_level=LEVELS.get(mode.torch_mode or "", 0),
        scheduler_type=config.scheduler,
        safety_margin=0.0,
        return_logprobs=config.logprobs,
        seed=0,
        auto_switch_to_flash=False,
        cpu_offload_space=0.0,
        per_request_processors=False,
    )


def describe_batching_config(config: ContinuousBatchingConfig) -> dict[str, Any]:
    """The settings as upstream has resolved them, as plain JSON values."""
    varlen_graph, decode_graph = config.cuda_graph_booleans
    return {
        "page_size": config.page_size,
        "num_blocks": config.num_blocks,
        "max_batch_tokens": config.max_batch_tokens,
        "max_requests_per_batch": config.max_requests_per_batch,
        "max_blocks_per_request": config.max_blocks_per_request,
        "decode_fast_path": bool(config.max_blocks_per_request),
        "block_sharing": config.allow_block_sharing,
        "scheduler": config.scheduler_type,
        "async_batching": config.use_async_batching,
        "cuda_graph": varlen_graph or decode_graph,
        "cuda_graph_varlen": varlen_graph,
        "cuda_graph_decode": decode_graph,
        "q_padding_interval_size": config.q_padding_interval_size,
        "kv_padding_interval_size": config.kv_padding_interval_size,
        "default_compile_level": config.default_compile_level,
        "varlen_compile": _describe_compile(config.varlen_compile_config),
        "decode_compile": _describe_compile(config.decode_compile_config),
        "auto_switch_to_flash": config.auto_switch_to_flash,
        "cpu_offload_gib": config.cpu_offload_space,
        "max_memory_fraction": config.max_memory_percent,
    }


def _describe_compile(config: CompileConfig | None) -> dict[str, Any] | None:
    if config is None:
        return None
    return {"mode": config.mode, "dynamic": config.dynamic, "fullgraph": config.fullgraph}


def _block_table_width(
    num_blocks: int,
    page_size: int,
    max_request_tokens: int | None,
    model_config: PreTrainedConfig,
    device: torch.device,
) -> int:
    """Blocks of the longest request, rounded as upstream rounds its hints; 0: no decode fast path.

    The path takes FlashAttention 2 or 3 on CUDA and no sliding window. A wider table than needed slows it down: the
    kernel plans its splits for the table's full width.
    """
    has_kernel = device.type == "cuda" and is_flash_attention_requested(model_config, version=[2, 3])
    if not has_kernel or _has_sliding_window(model_config):
        return 0
    cache_tokens = num_blocks * page_size
    longest = max_request_tokens or read_positions(model_config).count or cache_tokens
    width = math.ceil(min(longest, cache_tokens) / page_size) + 1
    return width + width % 2


def _has_sliding_window(model_config: PreTrainedConfig) -> bool:
    layer_types = getattr(model_config, "layer_types", None)
    if layer_types is not None:
        return "sliding_attention" in layer_types
    return getattr(model_config, "sliding_window", None) is not None
