"""How far the fastest run of a workload leads. A run with the same settings in effect is no rival."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cbexp.report.answers import find_most_accurate, is_less_accurate
from cbexp.report.baseline import Ratio, ratio_between
from cbexp.report.environments import describe_environment
from cbexp.report.json_files import Reader, strings
from cbexp.report.labels import IDLE_KEYS, relevant_overrides
from cbexp.report.rows import Row
from cbexp.report.run import Run

# Records from before `settings_without_effect` have this warning in its place.
OLD_WARNING = re.compile(r"([\w.]+)=.* has no effect with ")
# Names of choices that are nothing but names, and what changes how long is measured, not what.
NAMES = ("cache.name", "sampling.name", "num_rounds")
# Facts that differ between the cells of one sweep, from slot to slot.
PLACES = ("host", "GPU clocks and power", "$CUDA_VISIBLE_DEVICES")
MAX_COMPARED = 100
# A smaller lead is written as 1.00, whatever the noise.
MIN_RATIO_AHEAD = 1.005

# alone: there is no rival. few_rounds: no interval is known. ahead, unclear: beyond the noise, or not.
# shared: another run of the fastest one's configuration is slower than the rival.
Verdict = Literal["alone", "few_rounds", "ahead", "unclear", "shared"]


@dataclass(frozen=True)
class Lead:
    """The fastest run of a workload against the others.

    `same` are runs with the same settings in effect. `idle` has a sentence for each setting without effect of these
    runs and the fastest one. `rival` is the fastest of the others, and `ratio` is the fastest run's throughput to it.
    `more_accurate` is the most accurate run of the workload, where the fastest one answers correctly less often than
    it, beyond chance.
    """

    same: Sequence[Row]
    idle: Sequence[str]
    rival: Row | None
    ratio: Ratio | None
    more_accurate: Row | None

    @property
    def verdict(self) -> Verdict:
        """Whether the fastest run's configuration is ahead of the rival's, as far as is known."""
        if self.rival is None or self.ratio is None:
            return "alone"
        if any(row["output_tokens_per_s"] < self.rival["output_tokens_per_s"] for row in self.same):
            return "shared"
        if self.ratio.interval is None:
            return "few_rounds"
        is_ahead = self.ratio.interval.low > 1 and self.ratio.value >= MIN_RATIO_AHEAD
        return "ahead" if is_ahead else "unclear"


def find_lead(rows: Sequence[Row], run_of: Mapping[str, Run]) -> Lead:
    """The lead of the first of a workload's rows, sorted by throughput. `run_of` has the runs by folder."""
    best, *others = (run_of[row["folder"]] for row in rows)
    same = [
        row
        for row, run in zip(rows[1:], others[:MAX_COMPARED], strict=False)
        if are_same_in_effect(best, run)
    ]
    rival = next((row for row in rows[1:] if row not in same), None)
    ratio = None if rival is None else ratio_between(best, run_of[rival["folder"]])
    idle = dict.fromkeys(
        sentence
        for run in (best, *(run_of[row["folder"]] for row in same))
        for sentence in _idle_settings(run).values()
    )
    return Lead(same, list(idle), rival, ratio, _find_more_accurate(rows, run_of))


def _find_more_accurate(rows: Sequence[Row], run_of: Mapping[str, Run]) -> Row | None:
    most_accurate = find_most_accurate(run_of[row["folder"]] for row in rows)
    if most_accurate is None or not is_less_accurate(run_of[rows[0]["folder"]], most_accurate):
        return None
    return next(row for row in rows if run_of[row["folder"]] is most_accurate)


def are_same_in_effect(one: Run, other: Run) -> bool:
    """Whether two runs of one workload, on one code and machine, differ only in settings without effect.

    False where the records do not say.
    """
    idle = _idle_settings(one).keys() | _idle_settings(other).keys()
    if not idle and set(relevant_overrides(one)) != set(relevant_overrides(other)):
        return False
    if _circumstances(one) != _circumstances(other):
        return False
    settings, others = _settings(one), _settings(other)
    if not settings or settings.keys() != others.keys():
        return False
    return all(key in idle or value == others[key] for key, value in settings.items())


def _idle_settings(run: Run) -> dict[str, str]:
    """Settings without effect, each with a sentence about it. Older records only have a warning."""
    recorded = run.fact("settings_without_effect")
    if not isinstance(recorded, list):
        matches = ((OLD_WARNING.match(warning), warning) for warning in strings(run.summary, "warnings"))
        return {match[1]: warning for match, warning in matches if match}
    return {
        name: f"{name}={item.get('value')} has no effect with {item.get('reason')}."
        for item in recorded
        if isinstance(item, Mapping) and isinstance(name := item.get("setting"), str)
    }


def _circumstances(run: Run) -> dict[str, str]:
    return {fact: value for fact, value in describe_environment(run).items() if fact not in PLACES}


def _settings(run: Run) -> dict[str, Any]:
    """The resolved settings that change what runs, by their dotted names."""
    config = Reader(run.folder).read_yaml("config.yaml")
    return {
        key: value
        for key, value in _flatten(config)
        if key not in NAMES and key.split(".")[0] not in IDLE_KEYS
    }


def _flatten(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for group, settings in config.items():
        if isinstance(settings, Mapping):
            yield from ((f"{group}.{key}", value) for key, value in settings.items())
        else:
            yield str(group), settings
