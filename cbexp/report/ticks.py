"""Labels beside the rows of a chart. Where one must be cut, the part that differs from the others stays."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

CUT = "…"
KEPT = 8  # characters before the first difference, so that one sees what differs


def cut_labels(labels: Sequence[str], columns: int, num_lines: int) -> list[list[str]]:
    """The lines of each label. Overrides that many labels share are cut first, then shared beginnings."""
    # Words that are no settings, such as a workload's letter, stay in front.
    counts = Counter(word for label in labels for word in set(label.split()) if "=" in word)
    ordered = [
        label if _fits(label, columns, num_lines) else " ".join(sorted(label.split(), key=counts.__getitem__))
        for label in labels
    ]
    return [_wrap(label, columns, num_lines) for label in _tell_apart(ordered, columns, num_lines)]


def _tell_apart(labels: Sequence[str], columns: int, num_lines: int) -> list[str]:
    """The labels, but only the differing ends of those that would be alike once cut."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, label in enumerate(labels):
        alike.setdefault(tuple(_wrap(label, columns, num_lines)), []).append(index)
    found = list(labels)
    for places in alike.values():
        num_shared = _count_shared([labels[place] for place in places])
        if len({labels[place] for place in places}) == 1 or num_shared <= KEPT + len(CUT):
            continue
        ends = [CUT + labels[place][num_shared - KEPT :] for place in places]
        for place, end in zip(places, _tell_apart(ends, columns, num_lines), strict=True):
            found[place] = end
    return found


def _count_shared(texts: Sequence[str]) -> int:
    """The length of the beginning that all texts share."""
    first, last = min(texts), max(texts)  # of those between, each begins as both do
    pairs = enumerate(zip(first, last, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(first))


def _fits(label: str, columns: int, num_lines: int) -> bool:
    return len(textwrap.wrap(label, columns)) <= num_lines


def _wrap(label: str, columns: int, num_lines: int) -> list[str]:
    """At most `num_lines` lines, the last one cut. Unlike `textwrap`'s own cut it keeps part of a long word."""
    lines = textwrap.wrap(label, columns)
    if len(lines) <= num_lines:
        return lines
    last = f"{lines[num_lines - 1][: columns - len(CUT) - 1]} {CUT}"
    return [*lines[: num_lines - 1], last]
