"""Short names for runs: the words of their command lines that differ between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cbexp.cell_settings import SETTINGS_OUTSIDE_A_CELL
from cbexp.report.run import Run

# What changes nothing of the work or how it is done; a single run's folder or name says such things.
IDLE_KEYS = (*SETTINGS_OUTSIDE_A_CELL, "hydra", "artifacts")


def label_runs(runs: Sequence[Run]) -> dict[Path, str]:
    """A label for each run's folder, all different: `compile=eager`, then its folder where that is not enough.

    `defaults` is a run that sets nothing while others do.
    """
    labels = _differing_words(runs)
    counts = Counter(labels)
    places = _distinct_folders([run for run, label in zip(runs, labels, strict=True) if counts[label] > 1])
    return {
        run.folder: label if counts[label] == 1 else f"{label} ({places[run.folder]})"
        for run, label in zip(runs, labels, strict=True)
    }


def label_within(runs: Sequence[Run]) -> dict[Path, str]:
    """A label for each run's folder by what differs within its work, where that has several completed runs.

    Different within a work only; a run without a work, or alone in it, is called as `label_runs` has it.
    """
    labels, works = label_runs(runs), _group_by_work(runs)
    for some in works.values():
        if len(some) > 1:
            labels |= label_runs(some)
    return labels


def words_of_works(runs: Sequence[Run]) -> dict[str, str]:
    """`workload_hash` -> the words that all of its completed runs have, and not all `runs`."""
    everywhere = _common_words(runs)
    return {
        work: " ".join(word for word in _common_words(some) if word not in everywhere)
        for work, some in _group_by_work(runs).items()
        if len(some) > 1
    }


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Label -> the same for narrow places: settings without the groups that they are in, where that stays clear."""
    keys = {word.partition("=")[0] for label in labels for word in label.split(" ") if "=" in word}
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return {label: " ".join(_short_word(word, ends) for word in label.split(" ")) for label in labels}


def shorten(labels: Mapping[str, str]) -> dict[str, str]:
    """The values shortened together as `short_labels` has it, by the same keys."""
    short = short_labels(list(labels.values()))
    return {key: short[label] for key, label in labels.items()}


def key_of(override: str) -> str:
    """The setting that an override sets: `compile` of `compile=eager`, `+x` and `~x` without their signs."""
    return override.partition("=")[0].lstrip("+~")


def telling_overrides(run: Run) -> list[str]:
    """The overrides that say what ran, in the order of the command line."""
    return [word for word in run.overrides if key_of(word).split(".")[0] not in IDLE_KEYS]


def _short_word(word: str, ends: Mapping[str, int]) -> str:
    key, equals, value = word.partition("=")
    end = key.rpartition(".")[2]
    return f"{end}{equals}{value}" if equals and ends[end] == 1 else word


def _differing_words(runs: Sequence[Run]) -> list[str]:
    """For each run the words that not all of them have."""
    words, common = [telling_overrides(run) for run in runs], set(_common_words(runs))
    are_alike = all(own == words[0] for own in words)
    return [
        " ".join(word for word in own if word not in common) or (run.name if are_alike else "defaults")
        for run, own in zip(runs, words, strict=True)
    ]


def _common_words(runs: Sequence[Run]) -> list[str]:
    """The words that all of them have, in the order of the first one's command line."""
    words = [telling_overrides(run) for run in runs]
    common = set(words[0]).intersection(*words) if words else set()
    return [word for word in words[0] if word in common] if words else []


def _group_by_work(runs: Sequence[Run]) -> dict[str, list[Run]]:
    works: dict[str, list[Run]] = {}
    for run in runs:
        if run.is_completed and run.workload_hash is not None:
            works.setdefault(run.workload_hash, []).append(run)
    return works


def _distinct_folders(runs: Sequence[Run]) -> dict[Path, str]:
    """As much of the end of each run's path as tells it from those of the others."""
    parts = {run.folder: run.folder.resolve().parts for run in runs}
    found: dict[Path, str] = {}
    length = 0
    while len(found) < len(parts):
        length += 1
        ends = Counter(path[-length:] for path in parts.values())
        for folder, path in parts.items():
            if folder not in found and (ends[path[-length:]] == 1 or length >= len(path)):
                found[folder] = "/".join(path[-length:])
    return found
