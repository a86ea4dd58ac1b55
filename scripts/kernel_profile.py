"""Tables of a profiler's kernels: each kernel's time, the sequence in a layer, and the memory floor of each part."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Part of a decoder layer -> what its parameters' names contain; the first that matches counts.
PARTS = {
    "routed experts": r"\.experts\.",
    "q, k, v projections": r"\.(q|k|v|qkv)_proj\.",
    "output projection": r"\.o_proj\.",
    "gate and up projections": r"\.(gate|up|gate_up)_proj\.",
    "down projection": r"\.down_proj\.",
    "head and embedding": r"(lm_head|embed_tokens)\.",
    "norms": r"norm\.",
}
OTHER_PART = "other weights"
ATTENTION_PART = "keys and values"
ANCHOR = re.compile("attention|attn|paged", re.IGNORECASE)
MAX_NAME_LENGTH = 70


class KernelEvent(NamedTuple):
    """One launch as it ran on the device, in microseconds."""

    name: str
    start_us: float
    duration_us: float


def summarize_kernels(events: Sequence[KernelEvent], num_steps: int, num_layers: int) -> list[dict[str, Any]]:
    """A row for each kernel of a step, the longest first. Kernels that run less than once a step are left out.

    `us_per_layer` is there for kernels that run in every layer equally often.
    """
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event.name].append(event.duration_us)
    rows = []
    for name, values in durations.items():
        calls = len(values) / num_steps
        if calls < 1:
            continue
        in_layers = round(calls) % num_layers == 0
        rows.append(
            {
                "kernel": name,
                "calls_per_step": calls,
                "us_per_call": statistics.median(values),
                "us_per_step": sum(values) / num_steps,
                "us_per_layer": sum(values) / num_steps / num_layers if in_layers else None,
            }
        )
    return sorted(rows, key=lambda row: -row["us_per_step"])


def summarize_layer(events: Sequence[KernelEvent], num_steps: int, num_layers: int) -> list[dict[str, Any]]:
    """The kernels from one layer's attention to the next one's, in order: the median of all layers.

    This separates kernels of one name, such as the products of different projections. Empty when no kernel runs once a
    layer, or layers differ too much to be laid over each other.
    """
    ordered = sorted(events, key=lambda event: event.start_us)
    anchor = _find_anchor(ordered, num_steps * num_layers)
    if anchor is None:
        return []
    places = [index for index, event in enumerate(ordered) if event.name == anchor]
    spans = [ordered[first - 1 : last] for first, last in itertools.pairwise(places) if first > 0]
    if not spans:
        return []
    # The span across two steps has the head in it, and is rare.
    common, _ = Counter(tuple(event.name for event in span[1:]) for span in spans).most_common(1)[0]
    alike = [span for span in spans if tuple(event.name for event in span[1:]) == common]
    return [_summarize_slot([(span[i], span[i + 1]) for span in alike]) for i in range(len(common))]


def part_floors(
    bytes_by_parameter: Mapping[str, float],
    kv_bytes: float,
    bandwidth_bytes_per_s: float | None,
    num_layers: int,
) -> list[dict[str, Any]]:
    """A row for each part of the model with the bytes that a step reads of it, and their time at the memory limit."""
    by_part = dict.fromkeys([ATTENTION_PART, *PARTS, OTHER_PART], 0.0)
    by_part[ATTENTION_PART] = kv_bytes
    for name, num_bytes in bytes_by_parameter.items():
        part = next((part for part, pattern in PARTS.items() if re.search(pattern, name)), OTHER_PART)
        by_part[part] += num_bytes
    rows = []
    for part, num_bytes in by_part.items():
        floor_us = None if bandwidth_bytes_per_s is None else 1e6 * num_bytes / bandwidth_bytes_per_s
        per_layer = None if floor_us is None or part == "head and embedding" else floor_us / num_layers
        if num_bytes:
            rows.append(
                {"part": part, "bytes": num_bytes, "us_per_step": floor_us, "us_per_layer": per_layer}
            )
    return rows


def format_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows with the same keys."""
    if not rows:
        return f"{title}: none\n"
    keys = list(rows[0])
    lines = [" | ".join(keys), " | ".join("---" for _ in keys)]
    lines += [" | ".join(_format_value(row[key]) for key in keys) for row in rows]
    return f"{title}\n\n" + "".join(f"| {line} |\n" for line in lines)


def _find_anchor(ordered: Sequence[KernelEvent], num_calls: int) -> str | None:
    """A kernel that runs once a layer, attention's if there is one."""
    counts = Counter(event.name for event in ordered)
    names = [name for name, count in counts.items() if count == num_calls]
    return next((name for name in names if ANCHOR.search(name)), names[0] if names else None)


def _summarize_slot(pairs: Sequence[tuple[KernelEvent, KernelEvent]]) -> dict[str, Any]:
    """One place in a layer over all layers; `pairs` holds the kernel before and the kernel."""
    gaps = [event.start_us - before.start_us - before.duration_us for before, event in pairs]
    return {
        "kernel": pairs[0][1].name,
        "us": statistics.median(event.duration_us for _, event in pairs),
        "gap_before_us": statistics.median(gaps),
    }


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 1e6 or isinstance(value, int) else f"{value:,.2f}"
    return str(value)[:MAX_NAME_LENGTH].replace("|", "/")
