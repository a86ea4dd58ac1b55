"""A run's decoding as a point in batch, context and throughput, and the memory roofline above it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cbexp.report.json_files import Reader, lookup, number, positive_number
from cbexp.report.run import Run


@dataclass(frozen=True)
class Ceiling:
    """The memory roofline of one model on one card: output tokens per second = batch x bandwidth / bytes of a step.

    A step reads `weight_bytes` once, and for each request the keys and values of its context. The share
    `sliding_share` of the layers reads at most the last `window` tokens of it.
    """

    bandwidth_bytes_per_s: float
    weight_bytes: float
    kv_bytes_per_token: float
    sliding_share: float
    window: float | None

    def tokens_per_s(self, batch: float, context: float) -> float:
        """The most output tokens per second that memory allows at this batch and context."""
        step_bytes = self.weight_bytes + batch * self.kv_bytes(context)
        return batch * self.bandwidth_bytes_per_s / step_bytes

    def kv_bytes(self, context: float) -> float:
        """Bytes of keys and values that a step reads for one request of `context` tokens."""
        seen = min(context, self.window) if self.window else context
        return self.kv_bytes_per_token * ((1 - self.sliding_share) * context + self.sliding_share * seen)


@dataclass(frozen=True)
class DecodePoint:
    """Mean batch and context of a run's decode steps, and the output tokens per second of decoding alone."""

    batch: float
    context: float | None
    tokens_per_s: float
    ceiling: Ceiling | None

    @property
    def ceiling_tokens_per_s(self) -> float | None:
        """What memory allows at this point."""
        if self.ceiling is None or self.context is None:
            return None
        return self.ceiling.tokens_per_s(self.batch, self.context)


def find_decode_point(run: Run) -> DecodePoint | None:
    """The point of a completed run; None where its driver records no steps.

    The bytes of a step follow from the run's own roofline fraction, for which the engine counted every weight.
    """
    step_s, batch = positive_number(run.summary, "decode_step_s", "mean"), _mean_decode_batch(run)
    if not run.is_completed or step_s is None or batch is None:
        return None
    context = _mean_context(run)
    return DecodePoint(batch, context, batch / step_s, _ceiling(run, batch, context, step_s))


def _ceiling(run: Run, batch: float, context: float | None, step_s: float) -> Ceiling | None:
    bandwidth = positive_number(run.summary, "bandwidth_bytes_per_s")
    fraction = positive_number(run.summary, "roofline_fraction")
    plan = lookup(run.engine, "plan")
    kv_bytes = positive_number(plan, "kv_bytes_per_token") if isinstance(plan, Mapping) else None
    if bandwidth is None or fraction is None or kv_bytes is None or context is None:
        return None
    window = positive_number(plan, "sliding_window")
    without_weights = Ceiling(bandwidth, 0.0, kv_bytes, _sliding_share(plan), window)
    step_bytes = fraction * bandwidth * step_s
    weight_bytes = step_bytes - batch * without_weights.kv_bytes(context)
    if weight_bytes <= 0:
        return None
    return Ceiling(bandwidth, weight_bytes, kv_bytes, without_weights.sliding_share, without_weights.window)


def _sliding_share(plan: Mapping[str, Any]) -> float:
    num_sliding = positive_number(plan, "num_sliding_layers") or 0.0
    num_full = positive_number(plan, "num_full_layers") or 0.0
    return num_sliding / (num_sliding + num_full) if num_sliding else 0.0


def _mean_decode_batch(run: Run) -> float | None:
    batches = [positive_number(timed.record, "steps", "mean_decode_batch") for timed in run.rounds]
    known = sorted(batch for batch in batches if batch is not None)
    return known[len(known) // 2] if known else positive_number(run.summary, "mean_batch")


def _mean_context(run: Run) -> float | None:
    """Mean number of tokens that a decode step reads for a row, as in `cbexp.metrics.mean_decode_context`.

    Older records lack it: there it is that of the requests, or for a fixed length prompt + new tokens / 2.
    """
    recorded = positive_number(run.summary, "mean_decode_context")
    if recorded is not None:
        return recorded
    num_decoded, num_read = 0.0, 0.0
    timed = {number(timed.record, "round_index") for timed in run.rounds}
    for row in Reader(run.folder).read_rows("requests.jsonl"):
        num_prompt, num_new = positive_number(row, "num_prompt_tokens"), positive_number(row, "num_tokens")
        if num_prompt is None or num_new is None or number(row, "round_index") not in timed:
            continue
        num_decoded += num_new - 1
        num_read += (num_new - 1) * num_prompt + num_new * (num_new - 1) / 2
    if num_decoded > 0:
        return num_read / num_decoded
    return _context_of_fixed_length(run)


def _context_of_fixed_length(run: Run) -> float | None:
    num_prompt_tokens = positive_number(run.summary, "num_prompt_tokens")
    num_requests = positive_number(run.summary, "num_requests")
    num_new = positive_number(run.summary, "max_new_tokens")
    is_known = run.fact("is_fixed_length") is True and not run.fact("has_limits_per_prompt")
    if not is_known or num_prompt_tokens is None or num_requests is None or num_new is None:
        return None
    return num_prompt_tokens / num_requests + num_new / 2
