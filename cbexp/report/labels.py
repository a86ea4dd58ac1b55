"""Short names for runs, made of the overrides that differ between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cbexp.cell_settings import SETTINGS_OUTSIDE_A_CELL
from cbexp.report.run import Run

# Settings that change neither the workload nor how it runs.
IDLE_KEYS = (*SETTINGS_OUTSIDE_A_CELL, "hydra", "artifacts", "rescore")


def label_runs(runs: Sequence[Run]) -> dict[Path, str]:
    """A distinct label for each run's folder: its differing overrides, with the folder where they are not enough.

    `defaults` is the label of a run without overrides of its own.
    """
    labels = _differing_overrides(runs)
    counts = Counter(labels)
    places = _distinct_folders([run for run, label in zip(runs, labels, strict=True) if counts[label] > 1])
    return {
        run.folder: label if counts[label] == 1 else f"{label} ({places[run.folder]})"
        for run, label in zip(runs, labels, strict=True)
    }


def label_within(runs: Sequence[Run]) -> dict[Path, str]:
    """A label for each run's folder by what differs within its workload.

    These labels are distinct within a workload only. A run that is alone in its workload, or has none, has its label
    of `label_runs`.
    """
    labels = label_runs(runs)
    for some in _group_by_workload(runs).values():
        if len(some) > 1:
            labels |= label_runs(some)
    return labels


def overrides_shared_in_workloads(runs: Sequence[Run]) -> dict[str, str]:
    """Overrides that all completed runs of a `workload_hash` have, and not all `runs`; for those with several."""
    everywhere = _common_overrides(runs)
    return {
        workload_hash: " ".join(word for word in _common_overrides(some) if word not in everywhere)
        for workload_hash, some in _group_by_workload(runs).items()
        if len(some) > 1
    }


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Each label with a shorter form: settings without their group, where that is unambiguous."""
    keys = {word.partition("=")[0] for label in labels for word in label.split(" ") if "=" in word}
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return {label: " ".join(_short_word(word, ends) for word in label.split(" ")) for label in labels}


def shorten(labels: Mapping[str, str]) -> dict[str, str]:
    """The same mapping with its labels shortened together by `short_labels`."""
    short = short_labels(list(labels.values()))
    return {key: short[label] for key, label in labels.items()}


def key_of(override: str) -> str:
    """The setting that an override sets: `compile` of `compile=eager`, `+x` and `~x` without their signs."""
    return override.partition("=")[0].lstrip("+~")


def relevant_overrides(run: Run) -> list[str]:
    """The overrides that change what runs, in the order of the command line."""
    return [word for word in run.overrides if key_of(word).split(".")[0] not in IDLE_KEYS]


def _short_word(word: str, ends: Mapping[str, int]) -> str:
    key, equals, value = word.partition("=")
    end = key.rpartition(".")[2]
    return f"{end}{equals}{value}" if equals and ends[end] == 1 else word


def _differing_overrides(runs: Sequence[Run]) -> list[str]:
    """The label of each run: the overrides that not all runs have."""
    words, common = [relevant_overrides(run) for run in runs], set(_common_overrides(runs))
    are_alike = all(own == words[0] for own in words)
    return [
        " ".join(word for word in own if word not in common) or (run.name if are_alike else "defaults")
        for run, own in zip(runs, words, strict=True)
    ]


def _common_overrides(runs: Sequence[Run]) -> list[str]:
    """The overrides that all runs have, in the order of the first one's command line."""
    words = [relevant_overrides(run) for run in runs]
    common = set(words[0]).intersection(*words) if words else set()
    return [word for word in words[0] if word in common] if words else []


def _group_by_workload(runs: Sequence[Run]) -> dict[str, list[Run]]:
    workloads: dict[str, list[Run]] = {}
    for run in runs:
        if run.is_completed and run.workload_hash is not None:
            workloads.setdefault(run.workload_hash, []).append(run)
    return workloads


def _distinct_folders(runs: Sequence[Run]) -> dict[Path, str]:
    """The shortest end of each run's path that no other run's path has."""
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
