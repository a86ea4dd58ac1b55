"""What of a group of settings differs from its defaults."""

from __future__ import annotations

import dataclasses
from typing import Any


def list_changed_fields(settings: Any) -> list[str]:
    """Return the names of a settings dataclass's fields that differ from their default, in the order of the schema."""
    return [
        item.name for item in dataclasses.fields(settings) if getattr(settings, item.name) != default_of(item)
    ]


def default_of(item: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field."""
    return item.default_factory() if callable(item.default_factory) else item.default
