"""Reads records that may be missing, torn or foreign. Faults become remarks, not exceptions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

SMALLEST, LARGEST = 1e-100, 1e100  # what lies beyond is no measurement, and products of it would overflow
MAX_FILE_BYTES = 512 * 2**20  # steps.jsonl of a long run is some tens of MiB; no record of ours is larger


@dataclass
class Reader:
    """Reads the records of one folder and keeps remarks on what could not be read."""

    folder: Path
    remarks: list[str] = field(default_factory=list)

    def read_object(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file; None if the file is missing, or, with a remark, if it holds none."""
        text = self._read_text(name)
        if text is None:
            return None
        value = _parse(text)
        if not isinstance(value, dict):
            self.remarks.append(f"{name} is torn or no JSON object")
            return None
        return value

    def read_rows(self, name: str) -> list[dict[str, Any]]:
        """The JSON objects in a file of JSON lines. A torn last line, as a crash leaves it, is skipped silently."""
        text = self._read_text(name)
        if text is None:
            return []
        *lines, _rest = text.split("\n")
        values = [_parse(line) for line in lines]
        rows = [value for value in values if isinstance(value, dict)]
        if len(rows) < len(values):
            self.remarks.append(f"{name}: {len(values) - len(rows)} damaged line(s) left out")
        return rows

    def read_list(self, name: str) -> list[str]:
        """The strings of a YAML list as Hydra writes it, one `- item` a line; empty when there is no such file."""
        text = self._read_text(name)
        return [] if text is None else list(_list_items(text))

    def read_yaml(self, name: str) -> dict[str, Any]:
        """The mapping in a YAML file; empty when the file is missing or holds none."""
        text = self._read_text(name)
        try:
            value = None if text is None else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def read_tail(self, name: str, max_lines: int) -> str:
        """The last lines of a text file; empty when there is no such file."""
        text = self._read_text(name)
        return "" if text is None else "\n".join(text.splitlines()[-max_lines:])

    def _read_text(self, name: str) -> str | None:
        path = self.folder / name
        try:
            if not path.is_file():
                return None
            if path.stat().st_size > MAX_FILE_BYTES:
                self.remarks.append(f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB and was not read")
                return None
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self.remarks.append(f"{name} cannot be read: {error.strerror}")
            return None


def lookup(values: Mapping[str, Any], *names: str) -> Any:
    """A value inside nested mappings; None where a level is missing or is no mapping."""
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def number(values: Mapping[str, Any], *names: str) -> float | None:
    """A number inside nested mappings; None for anything else, and for NaN, infinity or extreme sizes."""
    value = lookup(values, *names)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value == 0 or SMALLEST <= abs(value) <= LARGEST else None


def positive_number(values: Mapping[str, Any], *names: str) -> float | None:
    """A number above zero inside nested mappings; None for anything else."""
    value = number(values, *names)
    return value if value is not None and value > 0 else None


def text(values: Mapping[str, Any], *names: str) -> str | None:
    """A string inside nested mappings; None for anything else."""
    value = lookup(values, *names)
    return value if isinstance(value, str) else None


def strings(values: Mapping[str, Any], *names: str) -> list[str]:
    """The strings of a list inside nested mappings; empty when there is no list."""
    value = lookup(values, *names)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _list_items(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("- "):
            item = line[2:].strip()
            is_quoted = len(item) > 1 and item[0] == item[-1] == "'"
            yield item[1:-1].replace("''", "'") if is_quoted else item
