"""Prints lines that wrap between words only, so that paths stay whole."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

MAX_COLUMNS = 100
LABEL_COLUMNS = 13


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text within the console's width. A word that is longer is not broken."""
    for line in text.splitlines():
        for part in _wrap(line, console.width) or [""]:
            _print_raw(console, Text(part, style))


def print_row(console: Console, label: str, text: str, style: str = "") -> None:
    """Print a label, and beside it a text of one or more lines."""
    lines = [part for line in text.splitlines() for part in _wrap(line, console.width - LABEL_COLUMNS)] or [
        ""
    ]
    for index, line in enumerate(lines):
        shown = f"{label} " if index == 0 else ""
        _print_raw(console, Text.assemble((f"{shown:<{LABEL_COLUMNS}}", "bold"), (line, style)))


def _wrap(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


def _print_raw(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False)
