"""The environments of runs: what they share, where they differ, and the notes about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbexp.report.doubts import find_doubts
from cbexp.report.json_files import lookup, number, text
from cbexp.report.run import Run
from cbexp.report.text_table import printable

UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Difference:
    """A fact that differs between runs: its values, and the runs that have each."""

    fact: str
    values: Mapping[str, Sequence[Run]]


def shared_facts(runs: Sequence[Run]) -> dict[str, str]:
    """The facts that are the same for all runs."""
    return {fact: next(iter(values)) for fact, values in _by_fact(runs).items() if len(values) == 1}


def find_differences(runs: Sequence[Run]) -> list[Difference]:
    """The facts that differ between runs; runs without a recorded environment do not count."""
    return [Difference(fact, values) for fact, values in _by_fact(runs).items() if len(values) > 1]


def format_notes(runs: Sequence[Run], describe: Callable[[Sequence[Run]], str]) -> str:
    """Doubts and differences, a line each. `describe` names the runs concerned. Empty when there are none."""
    lines = [f"note: {doubt} ({describe(concerned)})" for doubt, concerned in find_doubts(runs).items()]
    for difference in find_differences(runs):
        values = [f"{value} ({describe(having)})" for value, having in difference.values.items()]
        lines.append(f"differs: {difference.fact}: {', '.join(values)}")
    return "".join(f"{printable(line)}\n" for line in lines)


def _by_fact(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    found: dict[str, dict[str, list[Run]]] = {}
    described = [(run, describe_environment(run)) for run in runs if run.environment]
    for fact in dict.fromkeys(fact for _, facts in described for fact in facts):
        for run, facts in described:
            found.setdefault(fact, {}).setdefault(facts.get(fact, UNKNOWN), []).append(run)
    return found


def describe_environment(run: Run) -> dict[str, str]:
    """The facts of one run's environment, in the order to show them."""
    environment = run.environment
    facts = {fact: describe(environment) for fact, describe in _FACTS.items()}
    facts |= {"GPU clocks and power": _clocks(run), "host": text(run.status_record, "host")}
    versions = lookup(environment, "versions")
    for name, version in versions.items() if isinstance(versions, Mapping) else ():
        facts[str(name)] = str(version) if version is not None else "not installed"
    variables = lookup(environment, "variables")
    for name, value in variables.items() if isinstance(variables, Mapping) else ():
        facts[f"${name}"] = str(value)
    return {fact: value for fact, value in facts.items() if value is not None}


def _commit(environment: Mapping[str, Any]) -> str | None:
    commit = text(environment, "source", "commit")
    return commit[:12] if commit else None


def _changes(environment: Mapping[str, Any]) -> str | None:
    is_dirty = lookup(environment, "source", "is_dirty")
    return {True: "yes", False: "no"}.get(is_dirty) if isinstance(is_dirty, bool) else None


def _cpu(environment: Mapping[str, Any]) -> str | None:
    model, num_cores = text(environment, "cpu", "model"), number(environment, "cpu", "num_usable_cores")
    if model is None and num_cores is None:
        return None
    cores = "unknown" if num_cores is None else f"{num_cores:.0f}"
    return f"{model or 'unknown'}, {cores} usable cores"


def _threads(environment: Mapping[str, Any]) -> str | None:
    num_threads = number(environment, "cpu", "num_threads")
    return None if num_threads is None else f"{num_threads:.0f}"


def _gpus(environment: Mapping[str, Any]) -> str | None:
    devices = lookup(environment, "cuda", "devices")
    names = (
        [text(device, "name") for device in devices if isinstance(device, dict)]
        if isinstance(devices, list)
        else []
    )
    return ", ".join(name or "unknown" for name in names) or None


def _clocks(run: Run) -> str | None:
    """Limits only: the clocks of a moment differ from run to run."""
    limits = [
        f"at most {gpu.get('max_sm_mhz')} MHz, memory {gpu.get('max_memory_mhz')} MHz, {gpu.get('power_limit_w')} W"
        for gpu in run.gpu_states
    ]
    return "; ".join(limits) or None


_FACTS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "GPU": _gpus,
    "GPU driver": lambda environment: text(environment, "cuda", "driver"),
    "CUDA": lambda environment: text(environment, "cuda", "runtime"),
    "commit": _commit,
    "uncommitted changes": _changes,
    "CPU": _cpu,
    "CPU threads": _threads,
    "platform": lambda environment: text(environment, "platform"),
    "Python": lambda environment: text(environment, "python"),
}
