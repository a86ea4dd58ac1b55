"""What ran, as resolved, and the identity of the work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbexp.metrics.records import Record


@dataclass(frozen=True, kw_only=True)
class RunFacts(Record):
    """What ran, as resolved. `is_fixed_length`: EOS ignored, so that every request generates `max_new_tokens`."""

    name: str
    model: str
    dataset: str
    backend: str
    device: str
    dtype: str
    compile_mode: str
    attn_impl: str
    lora_adapter: str | None
    num_prompts: int
    num_generations: int
    max_new_tokens: int
    is_fixed_length: bool
    workload_hash: str


def workload_hash(
    prompt_ids: Sequence[Sequence[int]], limits: int | Sequence[int], sampling: Mapping[str, Any]
) -> str:
    """SHA-256 (hex) of the work: runs compare only when it is equal.

    `limits` are the new tokens of every request, or one limit a prompt; `sampling` holds plain JSON values.
    """
    work = {"prompt_ids": [list(ids) for ids in prompt_ids], "limits": limits, "sampling": dict(sampling)}
    return hashlib.sha256(json.dumps(work, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
