"""Tables as plain text for a terminal or a file."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_TEXT_COLUMNS = 60
# Never the terminal's: a table of numbers that wraps cannot be read, and the text goes to files too.
WIDTH = 200


def format_columns(
    headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Collection[int]
) -> str:
    """A table. Columns at the indices `text_columns` are texts, the others numbers.

    Longer texts than `MAX_TEXT_COLUMNS` take several lines.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, header in enumerate(headers):
        if index in text_columns:
            table.add_column(header, overflow="fold", max_width=MAX_TEXT_COLUMNS)
        else:
            table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


def printable(text: str) -> str:
    """Replace control characters, which could steer a terminal, by `?`; line breaks stay."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)
