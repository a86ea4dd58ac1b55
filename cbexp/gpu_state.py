"""How the GPUs stand, as nvidia-smi tells: clocks, power, memory in use, and the processes on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cbexp.provenance import output_of

# Record's key -> nvidia-smi's field. One that a driver does not know makes it refuse the whole query.
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
    """State of each GPU of these ids: MHz, W, degrees C, MiB; None for a figure or a tool that is not there."""
    return _query("--query-gpu", STATE_FIELDS, uuids)


def find_gpu_processes(uuids: Collection[str]) -> list[dict[str, Any]] | None:
    """Processes that compute on the GPUs of these ids, this one among them; None without nvidia-smi.

    Inside a container the numbers may be those of the host, or nothing may be told.
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
    """nvidia-smi writes `[N/A]` for what a card does not tell."""
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number
