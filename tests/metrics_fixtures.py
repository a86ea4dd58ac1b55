"""What the tests of records share: what ran."""

from __future__ import annotations

from typing import Any

from cbexp.metrics import RunDescription


def describe_run(**changes: Any) -> RunDescription:
    values: dict[str, Any] = {
        "name": "default",
        "model": "tiny",
        "dataset": "arithmetic",
        "backend": "sync",
        "device": "cpu",
        "dtype": "float32",
        "compile_mode": "eager",
        "fusion": "none",
        "batch_shape": "buckets",
        "attn_impl": "paged|sdpa",
        "lora_adapter": None,
        "num_prompts": 2,
        "num_generations": 1,
        "max_new_tokens": 5,
        "has_limits_per_prompt": False,
        "is_fixed_length": False,
        "do_sample": False,
        "sampling": {},
        "workload_hash": "abc",
    }
    return RunDescription(**values | changes)
