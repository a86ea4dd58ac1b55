"""The engine's attention, for models' own code and for fused layers."""

from cbexp.engine.attention.attention import (
    ATTENTION_NAME,
    attend_packed,
    describe_attention_path,
    packed_lengths,
    paged_decode_attention,
)
from cbexp.engine.attention.reference import attend_plainly, paged_decode_reference, read_spans

__all__ = [
    "ATTENTION_NAME",
    "attend_packed",
    "attend_plainly",
    "describe_attention_path",
    "packed_lengths",
    "paged_decode_attention",
    "paged_decode_reference",
    "read_spans",
]
