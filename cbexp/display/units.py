"""Formats numbers with their units, with three digits, in ASCII."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def format_number(value: float) -> str:
    """A number with three digits, or with all of its integer part: 1.23, 12.3, 1,234."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def format_seconds(seconds: float) -> str:
    """Seconds as us, ms or s."""
    if seconds < 0.9995e-3:
        return f"{format_number(seconds * 1e6)} us"
    if seconds < 0.9995:
        return f"{format_number(seconds * 1e3)} ms"
    return f"{format_number(seconds)} s"


def format_share(share: float) -> str:
    """A share in [0, 1] as a percentage."""
    return f"{round(share * 100, 1) + 0.0:.1f} %"  # + 0.0: rounding noise below zero is no minus sign


def format_bytes(num_bytes: float) -> str:
    """Bytes as B, KiB, MiB or GiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes:.0f} B" if unit == "B" else f"{format_number(size)} {unit}"


def format_spread(spread: Mapping[str, Any]) -> str:
    """The range of a quantity over rounds, and half of that as a share of the median."""
    low, high = format_number(spread["min"]), format_number(spread["max"])
    return f"{low} to {high}, +/- {format_share(spread['relative_half_range'])}"


def format_path(path: Path) -> str:
    """A path, relative to the current folder if it lies inside."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
