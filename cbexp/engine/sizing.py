"""How large the paged cache is: what a round needs of it, what that costs, and what of the free memory it may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from transformers import PreTrainedConfig

from cbexp.engine.requests import GroupLengths
from cbexp.engine.settings import MAX_MEMORY_FRACTION
from cbexp.engine.types import CacheMemoryError, CBSyncConfig

GIB = 2**30
INDEX_BYTES = 8
LOGIT_BYTES = 4
# Attentions that build masks of batch tokens x cache.
MASKED_ATTENTIONS = ("eager", "sdpa")

# Of one row over two blocks, and one to spare.
MIN_BLOCKS_FOR_CHECK = 3

# Free share below which no further prompt is admitted, so that running requests can grow. Upstream's figure for FIFO:
# with uneven lengths and 0.6 of the blocks needed it halves the tokens read again, at 1 % more steps than 0.
CROWDED_SAFETY_MARGIN = 0.15

# Where the memory bounds a cache, one that is so much larger is worth compiling and capturing anew.
WORTH_A_REBUILD = 1.25

# Requests that decode at once when nobody says how many: a decode step of a larger batch hardly makes more tokens a
# second, since attention reads as many keys for each of them, and every request more takes its share of the cache.
DEFAULT_MAX_REQUESTS = 256


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


@dataclass(frozen=True)
class CacheNeed:
    """What a round asks of the cache, in blocks: one page of every layer each.

    `num_blocks` hold all requests that run at once, `longest_blocks` one request of the longest. `batch_tokens`: tokens
    that a step may read.
    """

    num_blocks: int
    longest_blocks: int
    batch_tokens: int


@dataclass(frozen=True)
class CacheSize:
    """A cache as it is built, and the tokens and requests of the largest step."""

    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int

    def suits(self, need: CacheNeed) -> bool:
        """Whether a round runs on this cache as on one that was made for it."""
        return self.num_blocks >= need.num_blocks and self.max_batch_tokens >= need.batch_tokens

    def holds_longest(self, need: CacheNeed) -> bool:
        """Whether a round can run on this cache at all, one request after the other if need be."""
        return self.num_blocks >= need.longest_blocks

    def gives_way_to(self, other: CacheSize, need: CacheNeed) -> bool:
        """Whether a round that this one does not suit is better off, by more than a rebuild costs, with `other`."""
        is_too_small = not self.holds_longest(need) or self.max_batch_tokens < other.max_batch_tokens
        return is_too_small or other.suits(need) or other.num_blocks >= WORTH_A_REBUILD * self.num_blocks


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


def kv_bytes_per_token(architecture: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values: 2 x layers x KV heads x head dimension x bytes of `dtype`."""
    layout = describe_cache_layout(architecture)
    return 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * dtype.itemsize


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device`; for a CPU, in RAM without swapping."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def count_shared_tokens(prompt_tokens: int, page_size: int) -> int:
    """Tokens of a prompt that its generations store once where blocks are shared: its whole pages.

    The last token of a prompt is each generation's own.
    """
    return (prompt_tokens - 1) // page_size * page_size


def count_blocks(
    groups: Sequence[GroupLengths],
    layout: CacheLayout,
    page_size: int,
    *,
    shares_blocks: bool,
    max_rows: int | None = None,
) -> int:
    """Return the blocks that hold `max_rows` of the requests (None: all) at full length at once.

    The requests that take most are counted, since any may run beside any other. Where the generations of a prompt share
    blocks, its whole pages are there once. Layers with a sliding window keep a ring, and share none. In a model with
    both kinds of layers, each kind takes whole sectors.
    """
    pages = [_count_pages(group, layout, page_size, shares_blocks) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: pages[i].per_row(groups[i], layout), reverse=True)
    num_left = math.inf if max_rows is None else max_rows
    num_full = num_ring = 0
    for index in order:
        num_rows = int(min(groups[index].num_generations, num_left))
        num_left -= num_rows
        num_full += num_rows * pages[index].own + (pages[index].shared if num_rows else 0)
        num_ring += num_rows * pages[index].ring
    return _blocks_in_sectors(num_full, num_ring, layout)


@dataclass(frozen=True)
class _Pages:
    """Pages of a group in one layer: a full one has `shared` once and `own` for each row, a sliding one a `ring`."""

    shared: int
    own: int
    ring: int

    def per_row(self, group: GroupLengths, layout: CacheLayout) -> float:
        """Pages in all layers that a row of the whole group takes."""
        num_full = self.own + self.shared / group.num_generations
        return num_full * layout.num_full_layers + self.ring * layout.num_sliding_layers


def _count_pages(group: GroupLengths, layout: CacheLayout, page_size: int, shares_blocks: bool) -> _Pages:
    is_shared = shares_blocks and not layout.num_sliding_layers
    shared = count_shared_tokens(group.prompt_tokens, page_size) // page_size if is_shared else 0
    window = layout.sliding_window or 0
    return _Pages(
        shared=shared,
        own=math.ceil(group.num_stored_tokens / page_size) - shared,
        ring=math.ceil(min(group.num_stored_tokens, window) / page_size),
    )


def _blocks_in_sectors(num_full: int, num_ring: int, layout: CacheLayout) -> int:
    """Blocks of so many pages in each full and each sliding layer.

    A sector has as many pages as the least common multiple of both kinds' numbers of layers.
    """
    by_kind = [(layout.num_full_layers, num_full), (layout.num_sliding_layers, num_ring)]
    sector_pages = math.lcm(*(num_layers for num_layers, _ in by_kind if num_layers))
    num_sectors = sum(math.ceil(num_layers * count / sector_pages) for num_layers, count in by_kind)
    return math.ceil(num_sectors * sector_pages / layout.num_layers)


def choose_safety_margin(blocks_needed: int, num_blocks: int) -> float:
    """0 when all that runs at once fits, so that a cache of its size admits it; else `CROWDED_SAFETY_MARGIN`."""
    return 0.0 if blocks_needed <= num_blocks else CROWDED_SAFETY_MARGIN


def resolve_max_requests(settings: CBSyncConfig) -> int:
    """Most requests of one batch; in an ordinary step each of them has a token."""
    largest = DEFAULT_MAX_REQUESTS if settings.buckets is None else settings.buckets[-1]
    return min(settings.max_requests_per_batch or largest, settings.max_batch_tokens)


def measure_need(
    groups: Sequence[GroupLengths], architecture: PreTrainedConfig, settings: CBSyncConfig
) -> CacheNeed:
    """Return what a round of at least one group needs, with the few blocks more that a self-check takes."""
    count = partial(
        count_blocks,
        layout=describe_cache_layout(architecture),
        page_size=settings.page_size,
        shares_blocks=settings.allow_block_sharing,
    )
    # A prompt is admitted with all its generations.
    max_rows = max(resolve_max_requests(settings), *(group.num_generations for group in groups))
    num_blocks = count(groups, max_rows=max_rows)
    has_check = settings.has_engine_attention and settings.self_check
    return CacheNeed(
        num_blocks=max(num_blocks, MIN_BLOCKS_FOR_CHECK) if has_check else num_blocks,
        longest_blocks=count([group._replace(num_generations=1) for group in groups], max_rows=1),
        batch_tokens=_count_batch_tokens(groups, settings),
    )


def size_cache(
    need: CacheNeed,
    architecture: PreTrainedConfig,
    dtype: torch.dtype,
    settings: CBSyncConfig,
    free_bytes: int,
) -> CacheSize:
    """Return the cache for a round: `settings.num_blocks`, else what it needs and `free_bytes` allow.

    Raises `CacheMemoryError` when not even the longest request fits in `settings.max_memory_fraction` of them.
    """
    max_requests = resolve_max_requests(settings)
    num_blocks = settings.num_blocks or need.num_blocks
    if settings.num_blocks is None:
        cost = estimate_cache_cost(architecture, dtype, settings, need.batch_tokens, max_requests)
        budget_bytes = free_bytes * settings.max_memory_fraction
        blocks_that_fit = cost.tokens_within(budget_bytes) // settings.page_size
        if blocks_that_fit < need.longest_blocks:
            least_bytes = cost.total_bytes(need.longest_blocks * settings.page_size)
            share = math.ceil(100 * least_bytes / free_bytes) / 100
            raised = f"raise it to {share:g}, " if share <= MAX_MEMORY_FRACTION else ""
            raise CacheMemoryError(
                f"max_memory_fraction={settings.max_memory_fraction:g} of the free memory ({format_gib(free_bytes)}) "
                f"is {format_gib(budget_bytes)}, and the longest request of the round takes {format_gib(least_bytes)} "
                f"of cache with a step's buffers: {raised}lower max_new_tokens or max_batch_tokens, or shorten the "
                "prompts."
            )
        num_blocks = min(num_blocks, blocks_that_fit)
    return CacheSize(
        num_blocks=num_blocks,
        max_batch_tokens=need.batch_tokens,
        # Each request has a block of its own.
        max_requests_per_batch=min(max_requests, num_blocks),
    )


def describe_shortage(need: CacheNeed, size: CacheSize, settings: CBSyncConfig) -> str | None:
    """One line for users where the memory bounds a cache; None where it does not."""
    if settings.num_blocks is not None or size.num_blocks >= need.num_blocks:
        return None
    needed, taken = (blocks * settings.page_size for blocks in (need.num_blocks, size.num_blocks))
    return (
        f"max_memory_fraction={settings.max_memory_fraction:g} of the free memory has room for a cache of {taken:,} "
        f"tokens, and the requests that run at once need {needed:,}: requests wait for each other."
    )


def _count_batch_tokens(groups: Sequence[GroupLengths], settings: CBSyncConfig) -> int:
    """Tokens that a step may read: as set, but for a mask's sake no more than the prompts have.

    In powers of two, so that rounds which differ little have the same.
    """
    if settings.attn_implementation not in MASKED_ATTENTIONS:
        return settings.max_batch_tokens
    num_tokens = sum(group.prompt_tokens * group.num_generations for group in groups)
    num_tokens = max(num_tokens, resolve_max_requests(settings))
    return min(settings.max_batch_tokens, 1 << (num_tokens - 1).bit_length())


def estimate_cache_cost(
    architecture: PreTrainedConfig,
    dtype: torch.dtype,
    settings: CBSyncConfig,
    max_batch_tokens: int,
    max_requests_per_batch: int,
) -> CacheCost:
    """Return the cost of a paged cache, by transformers' own sizing (`PagedAttentionMemoryHandler`).

    A step gathers one layer's keys and values. Masked attention repeats them for each query head, and builds a mask of
    batch tokens x (cached + batch tokens) for each kind of layer. In a model with both kinds of layers, the memory
    would hold more tokens if it were only for the rarer kind.
    """
    layout = describe_cache_layout(architecture)
    is_masked = settings.attn_implementation in MASKED_ATTENTIONS
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


def format_gib(num_bytes: float) -> str:
    """Return `num_bytes` in GiB, or in MiB below one GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 1024**2:.1f} MiB"
