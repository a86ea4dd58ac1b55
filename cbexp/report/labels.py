"""Short names for runs: the words of their command lines that differ between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from cbexp.report.run import Run

# What changes nothing of the work or how it is done; a single run's folder or name says such things.
IDLE_KEYS = (
    "hydra",
    "tracking",
    "artifacts",
    "resume",
    "resume_force",
    "isolation",
    "cell_timeout_s",
    "name",
)


def label_runs(runs: Sequence[Run]) -> dict[Path, str]:
    """A label for each run's folder, all different: `compile=eager`, then its folder where that is not enough.

    `defaults` is a run that sets nothing while others do.
    """
    labels = [_differing_words(run, runs) for run in runs]
    counts = Counter(labels)
    return {
        run.folder: label if counts[label] == 1 else f"{label} ({_distinct_folder(run, runs)})"
        for run, label in zip(runs, labels, strict=True)
    }


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Label -> the same for narrow places: settings without the groups that they are in, where that stays clear."""
    keys = {word.partition("=")[0] for label in labels for word in label.split(" ") if "=" in word}
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return {label: " ".join(_short_word(word, ends) for word in label.split(" ")) for label in labels}


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


def _differing_words(run: Run, runs: Sequence[Run]) -> str:
    words = telling_overrides(run)
    common = set.intersection(*(set(telling_overrides(other)) for other in runs))
    differing = [word for word in words if word not in common]
    if differing:
        return " ".join(differing)
    return "defaults" if any(telling_overrides(other) != words for other in runs) else run.name


def _distinct_folder(run: Run, runs: Sequence[Run]) -> str:
    """As much of the end of its path as tells its folder from the others'."""
    parts = run.folder.resolve().parts
    others = [other.folder.resolve().parts for other in runs if other.folder != run.folder]
    for length in range(1, len(parts) + 1):
        if all(other[-length:] != parts[-length:] for other in others):
            return "/".join(parts[-length:])
    return str(run.folder)
