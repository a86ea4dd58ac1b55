"""All knowledge of transformers' continuous batching: gives rows to decode, takes their tokens."""

from cbexp.engine.upstream.batcher import Batcher
from cbexp.engine.upstream.build import (
    attention_name,
    can_share_blocks,
    check_attention,
    child_id,
    max_request_tokens,
    reads_paged_cache,
    require_paged_attention,
)

__all__ = [
    "Batcher",
    "attention_name",
    "can_share_blocks",
    "check_attention",
    "child_id",
    "max_request_tokens",
    "reads_paged_cache",
    "require_paged_attention",
]
