"""Rows of the table by their numbers."""

from __future__ import annotations

from collections.abc import Sequence


def format_numbers(numbers: Sequence[int]) -> str:
    """Rows of the table, neighbours taken together: `#1, #3-5`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"#{low}" if low == high else f"#{low}-{high}" for low, high in spans)
