"""Lines about what will run: the plan, and the cache as a driver has built it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cbexp.display.units import format_bytes


def plan_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Label and text of each line about a plan's plain values."""
    weights = f"{plan['num_parameters']:,} parameters, {format_bytes(plan['weight_bytes'])} of weights"
    yield "model", f"{plan['model_type']}, {weights}, {plan['dtype']} on {plan['device']}"
    yield (
        "driver",
        f"{plan['driver']}, compile {plan['compile_mode']}, attention {plan['attn_implementation']}",
    )
    limits = f"at most {plan['max_new_tokens']:,} new tokens a request"
    limits += f", {plan['max_requests_per_batch']:,} requests a step"
    if "page_size" in plan:
        limits += f", {plan['max_batch_tokens']:,} tokens a step"
        limits += f"; block sharing {'on' if plan['block_sharing'] else 'off'}, scheduler {plan['scheduler']}"
    yield "batches", limits


def cache_rows(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The size of the KV cache from a driver's settings; nothing for a driver that has none of a fixed size."""
    if "num_blocks" in settings:
        num_blocks, page_size = settings["num_blocks"], settings["page_size"]
        yield "cache", f"{num_blocks * page_size:,} tokens: {num_blocks:,} blocks of {page_size:,}"
