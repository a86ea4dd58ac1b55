"""The records that go to disk, and what they are made from; times in seconds, memory in GiB, shares in [0, 1]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cbexp.metrics.quantiles import Quantiles

LOST = "lost"
FINISHED_REASONS = ("eos", "stop", "length")
FINISH_REASONS = (*FINISHED_REASONS, "failed", LOST)


def flatten_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a nested record, and nothing else, by names with a slash between levels: `ttft_s/p50`."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= flatten_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{name}"] = value
    return numbers


class Record:
    """A dataclass that goes to disk as one JSON object."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, nested records as nested objects."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class MemoryUse(Record):
    """Memory in GiB. Device figures are None without a GPU; `peak_host_gib` is the process's peak since it started."""

    allocated_gib: float | None
    reserved_gib: float | None
    peak_allocated_gib: float | None
    peak_reserved_gib: float | None
    peak_host_gib: float


@dataclass(frozen=True)
class RequestRecord(Record):
    """One request of one round. Every submitted id has a record: what no completion came back for is `lost`.

    `max_new_tokens` is its limit. `finish_reason` is eos, stop, length, failed or lost. `queue_s` = scheduled -
    submitted; `ttft_s` = first token - submitted; `latency_s` = finished - submitted; `tpot_s` = (latency - ttft) /
    (tokens - 1). `verdict` None: not judged.
    """

    round_index: int
    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    max_new_tokens: int
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    verdict: bool | None
    completion_digest: str
    error: str | None

    @property
    def is_finished(self) -> bool:
        """Whether the completion is whole: ended by EOS, a stop token or string, or its limit."""
        return self.finish_reason in FINISHED_REASONS


@dataclass(frozen=True)
class StepSummary(Record):
    """The steps of a round taken together.

    The four time shares are parts of the round's wall time and add up to 1; `outside_steps_share` is what passed in
    no step. Batch sizes are requests a step, each decode step of a burst counted with the rows that were still active.
    `occupancy` = mean batch / peak batch: below 1 when requests end at different times. `padding_share` = padding /
    (tokens + padding). `num_bursts` counts what the host sees of decoding: bursts, and decode steps on their own;
    `steps_per_burst` and `tokens_per_burst` are means over them. `mean_cache_used` weighs by time.
    """

    num_steps: int
    prefill_share: float
    mixed_share: float
    decode_share: float
    outside_steps_share: float
    decode_step_s: Quantiles | None
    mean_decode_batch: float | None
    mean_batch: float
    peak_batch: int
    occupancy: float
    padding_share: float
    num_bursts: int
    steps_per_burst: float | None
    tokens_per_burst: float | None
    mean_cache_used: float
    peak_cache_used: float


@dataclass(frozen=True)
class RoundRecord(Record):
    """One round. Warmup rounds are recorded and never counted; indices run on from them to the timed rounds.

    Tokens are counted from finished completions, prompts once a request; what failed requests generated is in
    `num_discarded_tokens` and in no throughput. `accuracy` = correct / judged, None when nothing was judged. `steps`
    is None for a driver that cannot see its steps. `completions_digest` is equal for rounds with the same completions
    in order.
    """

    round_index: int
    is_warmup: bool
    wall_s: float
    num_requests: int
    num_finished: int
    num_failed: int
    num_lost: int
    finish_reasons: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_discarded_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    num_judged: int
    num_correct: int
    accuracy: float | None
    queue_s: Quantiles | None
    ttft_s: Quantiles | None
    tpot_s: Quantiles | None
    latency_s: Quantiles | None
    steps: StepSummary | None
    memory: MemoryUse | None
    completions_digest: str
