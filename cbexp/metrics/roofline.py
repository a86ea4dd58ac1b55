"""How near decoding is to the memory limit: bytes that must move / bandwidth / time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbexp.metrics.records import RequestRecord


@dataclass(frozen=True)
class RooflineInputs:
    """The bandwidth measured on this device in this process, in bytes a second, and what a decode step must read.

    `step_bytes(batch, context)` is the bytes of weights, keys and values that a step of `batch` rows reads when each
    attends to `context` tokens.
    """

    bandwidth_bytes_per_s: float
    step_bytes: Callable[[float, float], float]


def roofline_fraction(bytes_read: float, bandwidth_bytes_per_s: float, step_s: float) -> float:
    """Bytes that a step must read / bandwidth / step time: 1 means as fast as memory allows.

    Source: the memory roofline of Williams, Waterman and Patterson (2009), where decoding is bound by reads.
    """
    return bytes_read / bandwidth_bytes_per_s / step_s


def mean_decode_context(requests: Sequence[RequestRecord]) -> float | None:
    """Tokens before and at an average decoded token, itself included; None when nothing was decoded.

    The first of n tokens comes from the prefill; the step of token j = 1 … n - 1 reads prompt + j tokens, so a
    request reads (n - 1) * prompt + n * (n - 1) / 2 in n - 1 steps.
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
