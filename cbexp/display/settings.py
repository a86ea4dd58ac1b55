"""Lines about the plan, the cache that a driver built, and what compiling took."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cbexp.display.units import format_bytes, format_path, format_seconds


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
    if "batch_shape" in plan:
        yield "decoding", _describe_decoding(plan)


def cache_rows(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """From a driver's settings: its KV cache, if it has a fixed one, and what of the model's own does not apply."""
    if "num_blocks" in settings:
        num_blocks, page_size = settings["num_blocks"], settings["page_size"]
        yield "cache", f"{num_blocks * page_size:,} tokens: {num_blocks:,} blocks of {page_size:,}"
    if "fusion" in settings:
        buckets = ", ".join(map(str, settings["buckets"])) or "of any size"
        yield "resolved", f"fusion {settings['fusion']}, batches {buckets}"
    unused = settings.get("unused_model_defaults")
    if unused:
        shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in unused.items())
        yield "defaults", f"the model's own {shown} do not apply"


def set_up_rows(
    compile_stats: Mapping[str, Any], compile_cache: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    """What compiling and capturing took, if there was any, and the size of the compile cache in use."""
    if has_compiled(compile_stats):
        yield "compiled", describe_compilation(compile_stats)
    if compile_cache is not None:
        folders = ", ".join(format_path(Path(folder)) for folder in compile_cache["folders"])
        yield (
            "compiler",
            f"cache of {format_bytes(compile_cache['num_bytes'])} in {folders or 'no folder yet'}",
        )


def has_compiled(stats: Mapping[str, Any]) -> bool:
    """Whether a driver reports that it compiled or captured anything."""
    return bool(stats.get("compile_s") or stats.get("capture_s"))


def describe_compilation(stats: Mapping[str, Any]) -> str:
    """Seconds of compiling and capturing, the number of graphs, and counts of what should not happen."""
    parts = [f"in {format_seconds(stats['compile_s'])}"] if stats["compile_s"] else []
    if stats["graphs"]:
        parts.append(f"{stats['graphs']:,} graphs captured in {format_seconds(stats['capture_s'])}")
    troubles = [
        f"{stats[key]:,} {key.replace('_', ' ')}"
        for key in ("recompiles", "graph_breaks", "skipped_cudagraphs")
        if stats[key]
    ]
    return "; ".join([", ".join(parts), *troubles])


def _describe_decoding(plan: Mapping[str, Any]) -> str:
    buckets = plan["buckets"]
    shape = {
        "natural": "batches of natural size",
        "full": "always the largest batch",
        "buckets": f"buckets {', '.join(map(str, buckets))}" if buckets else "buckets of powers of two",
    }[plan["batch_shape"]]
    check = "" if plan["self_check"] else ", no self-check"
    return f"{shape}, bursts of up to {plan['max_burst']:,} steps, fusion {plan['fusion']}{check}"
