"""How near decoding is to the memory limit: bytes that must move / bandwidth / time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbexp.metrics.records import RequestRecord


@dataclass(frozen=True)
class RooflineInputs:
    """The bandwidth measured on this device in this process, in bytes a second, and what a decode step must read.

    `step_bytes(batch, context)` is the bytes of weights, keys and values that a step of `batch` rows reads when each
    attends to `context` tokens that no other row has. `num_generations` requests side by side have one prompt, of which
    `shared_tokens(prompt_tokens)` are stored once for all of them.
    """

    bandwidth_bytes_per_s: float
    step_bytes: Callable[[float, float], float]
    num_generations: int = 1
    shared_tokens: Callable[[int], int] = lambda _: 0


def roofline_fraction(bytes_read: float, bandwidth_bytes_per_s: float, step_s: float) -> float:
    """Bytes that a step must read / bandwidth / step time: 1 means as fast as memory allows.

    Source: the memory roofline of Williams, Waterman and Patterson (2009), where decoding is bound by reads.
    """
    return bytes_read / bandwidth_bytes_per_s / step_s


def mean_decode_context(requests: Sequence[RequestRecord], inputs: RooflineInputs) -> float | None:
    """Tokens before and at an average decoded token, itself included; None when nothing was decoded.

    The first of n tokens comes from the prefill; the step of token j = 1 … n - 1 reads prompt + j tokens, so a
    request reads (n - 1) * prompt + n * (n - 1) / 2 in n - 1 steps. What the generations of a prompt share is counted
    once in each step, of which a group has as many as its longest request.
    """
    num_steps = [max(request.num_tokens - 1, 0) for request in requests]
    if not any(num_steps):
        return None
    num_read = 0.0
    for start in range(0, len(requests), inputs.num_generations):
        of_group = num_steps[start : start + inputs.num_generations]
        num_prompt_tokens = requests[start].num_prompt_tokens
        num_read += sum(n * num_prompt_tokens + n * (n + 1) / 2 for n in of_group)
        num_read -= inputs.shared_tokens(num_prompt_tokens) * (sum(of_group) - max(of_group))
    return num_read / sum(num_steps)
