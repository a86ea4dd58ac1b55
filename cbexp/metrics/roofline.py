"""How near decoding comes to the memory limit: bytes that must move / bandwidth / time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbexp.metrics.records import RequestRecord


@dataclass(frozen=True)
class RooflineInputs:
    """Weights read in a decode step and keys and values of a token, in bytes; measured bandwidth in bytes a second."""

    weight_bytes: int
    kv_bytes_per_token: int
    bandwidth_bytes_per_s: float


def roofline_fraction(
    weight_bytes: float, kv_bytes_read: float, bandwidth_bytes_per_s: float, step_s: float
) -> float:
    """(weight bytes + KV bytes read in a step) / bandwidth / step time: 1 means as fast as memory allows.

    Source: the memory roofline of Williams, Waterman and Patterson (2009), where decoding is bound by reads.
    """
    return (weight_bytes + kv_bytes_read) / bandwidth_bytes_per_s / step_s


def mean_decode_context(requests: Sequence[RequestRecord]) -> float | None:
    """Tokens that an average decoded token attends to, itself included; None when nothing was decoded.

    The first of n tokens comes from the prefill; the step of token j = 1 … n - 1 reads prompt + j tokens, so a
    request reads (n - 1) * prompt + n * (n - 1) / 2 in n - 1 steps. Holds for full attention; a sliding window reads
    less.
    """
    num_decoded = sum(max(request.num_tokens - 1, 0) for request in requests)
    if not num_decoded:
        return None
    num_read = sum(
        _context_tokens_read(request.num_prompt_tokens, request.num_tokens) for request in requests
    )
    return num_read / num_decoded


def _context_tokens_read(num_prompt_tokens: int, num_tokens: int) -> float:
    if num_tokens < 2:
        return 0
    return (num_tokens - 1) * num_prompt_tokens + num_tokens * (num_tokens - 1) / 2
