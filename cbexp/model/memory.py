"""The memory that weights, caches and batches need, and that a device has. Loads no weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cbexp.errors import MemoryBudgetError
from cbexp.model.architecture import uses_remote_code

GIB = 1024**3
INDEX_BYTES = 8
LOGIT_BYTES = 4


@dataclass(frozen=True)
class WeightSize:
    """The size of a model's parameters. Tied weights count once, buffers do not count."""

    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a model: keys and values of `num_kv_heads` x `head_dim` in each layer.

    Sliding-window layers keep the last `sliding_window` tokens of a request. It is None without such layers.
    """

    num_full_layers: int
    num_sliding_layers: int
    sliding_window: int | None
    num_kv_heads: int
    head_dim: int

    @property
    def num_layers(self) -> int:
        """Layers of either kind."""
        return self.num_full_layers + self.num_sliding_layers


def describe_cache_layout(architecture: PreTrainedConfig) -> CacheLayout:
    """Return the cache layout. Without `layer_types` a sliding window holds for all layers, as in transformers."""
    num_layers = architecture.num_hidden_layers
    window = getattr(architecture, "sliding_window", None)
    layer_types = getattr(architecture, "layer_types", None)
    if layer_types is not None:
        num_sliding = layer_types.count("sliding_attention")
    else:
        num_sliding = num_layers if window is not None else 0
    num_heads = architecture.num_attention_heads
    return CacheLayout(
        num_full_layers=num_layers - num_sliding,
        num_sliding_layers=num_sliding,
        sliding_window=window if num_sliding else None,
        num_kv_heads=getattr(architecture, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(architecture, "head_dim", None) or architecture.hidden_size // num_heads,
    )


def measure_weights(architecture: PreTrainedConfig, dtype: torch.dtype) -> WeightSize:
    """Return the size of the model's weights in `dtype`, from a copy on the meta device."""
    auto_class: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(
            copy.deepcopy(architecture), dtype=dtype, trust_remote_code=uses_remote_code(architecture)
        )
    return sum_weights(model)


def sum_weights(model: torch.nn.Module) -> WeightSize:
    """Return the size of a model's parameters as they are."""
    parameters = list(model.parameters())
    return WeightSize(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    )


def kv_bytes_per_token(architecture: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values: 2 x layers x KV heads x head dimension x bytes of `dtype`."""
    layout = describe_cache_layout(architecture)
    return 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * dtype.itemsize


def cache_tokens_needed(full_lengths: Sequence[int], num_generations: int, page_size: int) -> int:
    """Return the size in tokens of a cache that holds all requests at full length at once.

    `full_lengths` has prompt and new tokens for each prompt. Requests take whole pages, and share none.
    """
    pages = sum(math.ceil(length / page_size) for length in full_lengths)
    return pages * num_generations * page_size


def request_blocks_needed(layout: CacheLayout, num_tokens: int, page_size: int) -> int:
    """Return the blocks (one page of every layer) that one request of `num_tokens` takes in an empty cache."""
    window = layout.sliding_window or num_tokens
    full_pages = math.ceil(num_tokens / page_size)
    sliding_pages = math.ceil(min(num_tokens, window) / page_size)
    pages = full_pages * layout.num_full_layers + sliding_pages * layout.num_sliding_layers
    return math.ceil(pages / layout.num_layers)


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device`; for a CPU, in RAM without swapping."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def total_memory_bytes(device: torch.device) -> int:
    """Return the bytes of `device`. Unlike `free_memory_bytes` this allocates nothing on a GPU."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True)
class CacheCost:
    """Bytes of a paged cache and of a step's buffers: `fixed_bytes` + tokens x `bytes_per_token`."""

    fixed_bytes: int
    bytes_per_token: int

    def total_bytes(self, num_tokens: int) -> int:
        """Bytes of a cache of `num_tokens`."""
        return self.fixed_bytes + num_tokens * self.bytes_per_token

    def tokens_within(self, budget_bytes: float) -> int:
        """Tokens of the largest cache within `budget_bytes`; 0 when there is none."""
        return max(0, int((budget_bytes - self.fixed_bytes) // self.bytes_per_token))


def estimate_cache_cost(
    architecture: PreTrainedConfig,
    dtype: torch.dtype,
    max_batch_tokens: int,
    max_requests_per_batch: int,
    *,
    is_masked: bool,
) -> CacheCost:
    """Return the cost of a paged cache, by transformers' own sizing (`PagedAttentionMemoryHandler`).

    A step gathers one layer's keys and values. With `is_masked` attention (sdpa, eager) it repeats them for each query
    head, and builds a mask of batch tokens x (cached + batch tokens) for each kind of layer. In a model with both kinds
    of layers, the memory would hold more tokens if it were only for the rarer kind.
    """
    layout = describe_cache_layout(architecture)
    num_heads, item = architecture.num_attention_heads, dtype.itemsize
    layer_counts = [count for count in (layout.num_full_layers, layout.num_sliding_layers) if count > 0]
    readable_per_token = layout.num_layers / min(layer_counts)
    num_masks = (2 if layout.num_sliding_layers else 1) if is_masked else 0
    gathered_heads = 2 * num_heads + layout.num_kv_heads if is_masked else 2 * layout.num_kv_heads
    head_bytes = layout.head_dim * item

    states_bytes = architecture.hidden_size * item
    states_bytes += (num_heads + 2 * layout.num_kv_heads + gathered_heads) * head_bytes
    mask_row_bytes = num_masks * max_batch_tokens * item
    logits_bytes = max_requests_per_batch * (
        architecture.hidden_size * item + architecture.vocab_size * LOGIT_BYTES
    )
    read_bytes = gathered_heads * head_bytes + len(layer_counts) * INDEX_BYTES + mask_row_bytes
    return CacheCost(
        fixed_bytes=max_batch_tokens * (states_bytes + mask_row_bytes) + logits_bytes,
        bytes_per_token=kv_bytes_per_token(architecture, dtype) + math.ceil(readable_per_token * read_bytes),
    )


def check_fits(
    weight_bytes: int, cache_bytes: int, free_bytes: int, device: torch.device, what_to_lower: str
) -> None:
    """Raise `MemoryBudgetError` if weights and cache do not fit; its message has the numbers and `what_to_lower`."""
    if weight_bytes + cache_bytes <= free_bytes:
        return
    raise MemoryBudgetError(
        f"{device} has {format_gib(free_bytes)} free, and {format_gib(weight_bytes + cache_bytes)} are asked for: "
        f"weights {format_gib(weight_bytes)}, KV cache with a step's buffers {format_gib(cache_bytes)}. "
        f"Lower {what_to_lower}."
    )


def format_gib(num_bytes: float) -> str:
    """Return `num_bytes` in GiB, or in MiB below one GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 1024**2:.1f} MiB"
