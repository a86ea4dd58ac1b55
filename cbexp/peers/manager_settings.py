"""Translates a peer's settings into transformers' own `ContinuousBatchingConfig`, with nothing left open.

What each compile mode means here (level: upstream's `default_compile_level`):

| compile mode               | upstream's settings                                                          |
|----------------------------|------------------------------------------------------------------------------|
| auto                       | cuda_graph with flash attention on CUDA, else eager: upstream's own advice   |
| eager                      | nothing compiled or captured                                                 |
| default                    | level 1: mode "default", dynamic shapes                                      |
| max_autotune_no_cudagraphs | level 2: mode "max-autotune-no-cudagraphs", dynamic shapes                   |
| reduce_overhead            | a `CompileConfig` of that mode; upstream warns that it works badly           |
| max_autotune               | a `CompileConfig` of that mode; upstream warns that it works badly           |
| cuda_graph                 | upstream's own captures                                                      |
| compiled_cuda_graph        | level 1 and upstream's own captures                                          |

Asynchronous batching goes with captures where no attention mask is needed (flash attention), as upstream
recommends; the decode fast path goes with FlashAttention 2 or 3 on CUDA in every mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import CompileConfig, ContinuousBatchingConfig
from transformers.utils.generic import is_flash_attention_requested

from cbexp.engine.types import EngineError
from cbexp.peers.base import PeerConfig

# Upstream's own bound on the requests of a batch when nothing is known of the workload.
MAX_REQUESTS_PER_BATCH = 1024
# Share of the free memory that cache and buffers may take: upstream's own figure without logits processors.
MAX_MEMORY_FRACTION = 0.9


@dataclass(frozen=True)
class _CompileChoice:
    level: int = 0
    torch_mode: str | None = None
    cuda_graph: bool = False

    @property
    def needs_cuda(self) -> bool:
        return self.cuda_graph or self.torch_mode is not None


_COMPILE_CHOICES = {
    "eager": _CompileChoice(),
    "default": _CompileChoice(level=1),
    "reduce_overhead": _CompileChoice(torch_mode="reduce-overhead"),
    "max_autotune": _CompileChoice(torch_mode="max-autotune"),
    "max_autotune_no_cudagraphs": _CompileChoice(level=2),
    "cuda_graph": _CompileChoice(cuda_graph=True),
    "compiled_cuda_graph": _CompileChoice(level=1, cuda_graph=True),
}
SUPPORTED_COMPILE_MODES = ("auto", *_COMPILE_CHOICES)


def resolve_compile_mode(mode: str, attn_implementation: str, device: torch.device) -> str:
    """What `auto` is for the manager, any other mode itself; `EngineError` when `device` cannot run it."""
    if mode == "auto":
        is_flash = is_flash_attention_requested(requested_attention_implementation=attn_implementation)
        return "cuda_graph" if is_flash and device.type == "cuda" else "eager"
    if _COMPILE_CHOICES[mode].needs_cuda and device.type != "cuda":
        raise EngineError(
            f"compile mode {mode} captures CUDA graphs and the model is on {device}: "
            "use a CUDA device, or eager, default or max_autotune_no_cudagraphs."
        )
    return mode


def build_batching_config(
    config: PeerConfig, model_config: PreTrainedConfig, device: torch.device
) -> ContinuousBatchingConfig:
    """Upstream's settings for a model with `model_config` on `device`; raises as `resolve_compile_mode`."""
    mode = resolve_compile_mode(config.compile_mode, model_config._attn_implementation, device)
    choice = _COMPILE_CHOICES[mode]
    block_table_width = _block_table_width(config, model_config, device)
    compile_config = CompileConfig(mode=choice.torch_mode) if choice.torch_mode is not None else None
    return ContinuousBatchingConfig(
        page_size=config.page_size,
        num_blocks=config.num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_memory_percent=MAX_MEMORY_FRACTION,
        max_requests_per_batch=_max_requests_per_batch(config),
        max_blocks_per_request=block_table_width,
        allow_block_sharing=config.allow_block_sharing,
        use_async_batching=choice.cuda_graph and is_flash_attention_requested(model_config),
        use_cuda_graph=choice.cuda_graph,
        varlen_compile_config=compile_config,
        decode_compile_config=compile_config if block_table_width else None,
        default_compile_level=choice.level,
        scheduler_type=config.scheduler,
        safety_margin=0.0,
        return_logprobs=False,
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


def _max_requests_per_batch(config: PeerConfig) -> int:
    """A decoding request has a page of its own, so no more of them than blocks are ever active."""
    if config.max_requests_per_batch is not None:
        return config.max_requests_per_batch
    return min(config.num_blocks, config.max_batch_tokens, MAX_REQUESTS_PER_BATCH)


def _block_table_width(config: PeerConfig, model_config: PreTrainedConfig, device: torch.device) -> int:
    """Blocks of the longest request, rounded as upstream rounds its hints; 0: no decode fast path.

    The path takes FlashAttention 2 or 3 on CUDA and no sliding window. A wider table than needed slows it
    down: the kernel plans its splits for the table's full width.
    """
    has_kernel = device.type == "cuda" and is_flash_attention_requested(model_config, version=[2, 3])
    if not has_kernel or _has_sliding_window(model_config):
        return 0
    cache_tokens = config.num_blocks * config.page_size
    max_positions = getattr(model_config, "max_position_embeddings", None)
    longest = config.max_request_tokens or max_positions or cache_tokens
    width = math.ceil(min(longest, cache_tokens) / config.page_size) + 1
    return width + width % 2


def _has_sliding_window(model_config: PreTrainedConfig) -> bool:
    layer_types = getattr(model_config, "layer_types", None)
    if layer_types is not None:
        return "sliding_attention" in layer_types
    return getattr(model_config, "sliding_window", None) is not None
