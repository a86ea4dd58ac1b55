"""What ran, as resolved, and the identity of the workload."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbexp.metrics.records import Record


@dataclass(frozen=True, kw_only=True)
class RunDescription(Record):
    """What ran, as resolved. `is_fixed_length`: nothing ends a request but its limit, as much as it may generate.

    `sampling` has what differs from greedy decoding, `Sampling.in_effect`, and `logprobs` where completions have them.

    `max_new_tokens` is the largest limit of a request; with `has_limits_per_prompt`, others are smaller. `fusion` and
    `batch_shape` are the engine's own decode steps', None where there are none.
    """

    name: str
    model: str
    dataset: str
    backend: str
    device: str
    dtype: str
    compile_mode: str
    fusion: str | None
    batch_shape: str | None
    attn_impl: str
    lora_adapter: str | None
    num_prompts: int
    num_generations: int
    max_new_tokens: int
    has_limits_per_prompt: bool
    is_fixed_length: bool
    do_sample: bool
    sampling: dict[str, Any]
    workload_hash: str


def workload_hash(
    prompt_ids: Sequence[Sequence[int]], limits: int | Sequence[int], sampling: Mapping[str, Any]
) -> str:
    """SHA-256 (hex) of the workload: runs compare only when it is equal.

    `limits` are the new tokens of every request, or one limit a prompt; `sampling` holds plain JSON values.
    """
    workload = {"prompt_ids": [list(ids) for ids in prompt_ids], "limits": limits, "sampling": dict(sampling)}
    return hashlib.sha256(json.dumps(workload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
