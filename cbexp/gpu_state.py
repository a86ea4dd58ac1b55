"""The state of GPUs by nvidia-smi: clocks, power, memory in use, and processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cbexp.provenance import output_of

# Our key -> nvidia-smi's field. With a field that the driver does not know, the whole query fails.
STATE_FIELDS: Mapping[str, str] = {
    "uuid": "uuid",
    "sm_mhz": "clocks.sm",
    "max_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "max_memory_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "memory_used_mib": "memory.used",
}
PROCESS_FIELDS: Mapping[str, str] = {"uuid": "gpu_uuid", "pid": "pid", "memory_used_mib": "used_memory"}
UUID_PREFIX = "GPU-"  # PyTorch leaves it out


def find_gpu_states(uuids: Collection[str]) -> list[dict[str, Any]] | None:
    """State of each of these GPUs in MHz, W, degrees C and MiB. Unknown figures are None; None without nvidia-smi."""
    return _query("--query-gpu", STATE_FIELDS, uuids)


def find_gpu_processes(uuids: Collection[str]) -> list[dict[str, Any]] | None:
    """Processes that compute on these GPUs, including this one; None without nvidia-smi.

    Inside a container the pids may be those of the host, or the list may be empty.
    """
    return _query("--query-compute-apps", PROCESS_FIELDS, uuids)


def _query(query: str, fields: Mapping[str, str], uuids: Collection[str]) -> list[dict[str, Any]] | None:
    output = output_of("nvidia-smi", f"{query}={','.join(fields.values())}", "--format=csv,noheader,nounits")
    if output is None:
        return None
    rows = [dict(zip(fields, line.split(", "), strict=False)) for line in output.splitlines()]
    wanted = {uuid.removeprefix(UUID_PREFIX) for uuid in uuids}
    return [_with_numbers(row) for row in rows if row["uuid"].removeprefix(UUID_PREFIX) in wanted]


def _with_numbers(row: Mapping[str, str]) -> dict[str, Any]:
    return {key: value if key == "uuid" else _number(value) for key, value in row.items()}


def _number(value: str) -> float | None:
    """A figure; None for `[N/A]`, which stands for what a card does not report."""
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number
