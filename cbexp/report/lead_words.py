"""The lead of each work as a sentence, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbexp.report.lead import Lead
from cbexp.report.numbers_of_rows import format_numbers
from cbexp.report.rows import Row
from cbexp.report.works import Work


def describe_leads(works: Sequence[Work], rows: Sequence[Row]) -> list[str]:
    """A line for each work of several runs, with their numbers in the table of `rows`."""
    numbers = {row["folder"]: number for number, row in enumerate(rows, start=1)}
    return [_describe(work.lead, work.rows[0], numbers) for work in works if work.lead is not None]


def _describe(lead: Lead, best: Row, numbers: Mapping[str, int]) -> str:
    sentence = f"#{numbers[best['folder']]} {_compare(lead, numbers)}"
    if lead.same:
        sentence += f"; {format_numbers([numbers[row['folder']] for row in lead.same])}: the same in effect"
    if lead.more_right is not None:
        right = lead.more_right
        sentence += (
            f"; its answers are wrong more often than those of #{numbers[right['folder']]}, beyond chance"
        )
    return sentence


def _compare(lead: Lead, numbers: Mapping[str, int]) -> str:
    rival, ratio = lead.rival, lead.ratio
    if rival is None or ratio is None:
        return "has no other configuration beside it"
    name = f"#{numbers[rival['folder']]}"
    if lead.verdict == "shared":
        return f"makes {ratio.value:.2f}x what {name} does, but the same configuration also came out slower than it"
    if ratio.interval is None:
        return f"makes {ratio.value:.2f}x what {name} does; too few rounds to tell how sure that is"
    span = f"{ratio.value:.2f}x ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})"
    if lead.verdict == "ahead":
        return f"is ahead of {name} beyond the noise: {span}"
    return f"is not clearly ahead of {name}: {span}"
