"""What went wrong in vLLM, from its log and its last words, as an error that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from cbexp.engine.types import EngineError
from cbexp.errors import CbexpError, ConfigError, MemoryBudgetError, NotApplicableError

TAIL_BYTES = 2**18
NUM_TAIL_LINES = 3
MAX_LINE_LENGTH = 400
# Phrases of vLLM's and PyTorch's own.
OUT_OF_MEMORY = (
    "out of memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache",
    "Free memory on device",
    "Available memory on node",
)
NO_DEVICE = ("Failed to infer device type", "No CUDA GPUs are available", "Found no NVIDIA driver")
# The error of the process that waits for the engine; why the engine failed is in the log before it.
NOT_A_CAUSE = ("Engine core initialization failed", "EngineCore encountered an issue")
# Dotted keys of the worker's answers that are read here. A program that answers in its place has other things to say.
ANSWERS: dict[str, dict[str, type | UnionType]] = {
    "not_installed": {"python": str},
    "imported": {
        "versions.vllm": str | None,
        "import_s": float,
        "device_type": str | None,
        "device_name": str | None,
    },
    "ready": {"engine_s": float, "settings.num_blocks": int | None, "settings.page_size": int | None},
    "round": {"start_s": float, "end_s": float, "outputs": list},
    "error": {"message": str},
}
_ABSENT = object()
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "(EngineCore pid=12) ERROR 07-31 12:00:00 [core.py:1] " before the text of a line.
_PREFIX = re.compile(r"^(\(\w+[^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\]\s*)?")
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception)\b.*")


def describe_not_installed(python: str) -> ConfigError:
    """The error of an interpreter that has no vLLM."""
    return ConfigError(
        f"driver=vllm: {python} cannot import vllm. It pins versions of torch and transformers of its own, so give it "
        "an environment of its own: python -m venv ~/vllm && ~/vllm/bin/pip install vllm, then "
        "driver.python=$HOME/vllm/bin/python. Or name a folder that holds it: driver.pythonpath=FOLDER."
    )


def require_event(answer: Mapping[str, Any], event: str, doing: str, log_path: Path) -> Mapping[str, Any]:
    """Return the worker's answer when it is the one expected and whole; its error, or any other answer, is raised."""
    found = answer["event"]
    faults = [
        key for key, kind in ANSWERS.get(found, {}).items() if not isinstance(_look_up(answer, key), kind)
    ]
    if faults:
        said = f"it answered {found!r} without a proper {', '.join(faults)}"
        raise describe_strange_answer(doing, said, log_path)
    if found == event:
        return answer
    said = answer["message"] if found == "error" else f"it answered {found!r}"
    raise describe_failure(doing, said, log_path)


def _look_up(answer: Any, dotted_key: str) -> Any:
    for name in dotted_key.split("."):
        answer = answer.get(name, _ABSENT) if isinstance(answer, Mapping) else _ABSENT
    return answer


def describe_strange_answer(doing: str, said: str, log_path: Path) -> EngineError:
    """The error of a process that answers what the worker never would, while `doing` something."""
    return EngineError(
        f"vLLM failed while {doing}: {said}. driver.python must be a Python interpreter, or a wrapper that starts one "
        f"and prints nothing on stdout itself. Its log: {log_path}"
    )


def describe_failure(doing: str, reason: str, log_path: Path) -> CbexpError | EngineError:
    """The error of a worker that failed while `doing` something; `reason` is its own word for it."""
    cause = _find_cause(reason, log_path)
    said = f"{reason} ({cause})" if cause and cause not in reason else reason
    text = f"vLLM failed while {doing}: {said.rstrip('.')}."
    log = f" Its log: {log_path}"
    if any(phrase in said for phrase in OUT_OF_MEMORY):
        advice = (
            "cache.max_memory_fraction (or what else uses the device), sampling.max_new_tokens or the model"
        )
        return MemoryBudgetError(f"{text} Lower {advice}.{log}")
    if any(phrase in said for phrase in NO_DEVICE):
        return NotApplicableError(f"{text} It needs a device that its build supports.{log}")
    return EngineError(text + log)


def read_last_line(log_path: Path) -> str:
    """The last line that a log has, without colours; empty when there is none."""
    return next(reversed(list(_read_lines(log_path))), "")


def _find_cause(reason: str, log_path: Path) -> str:
    """The last error in the log that says more than `reason`; without one, the log's last lines."""
    lines = list(_read_lines(log_path))
    causes = [line for line in lines if _ERROR_LINE.match(line) and not any(p in line for p in NOT_A_CAUSE)]
    said_already = [p for p in NOT_A_CAUSE if p in reason]
    if causes:
        return causes[-1]
    return "" if "Error" in reason and not said_already else " | ".join(lines[-NUM_TAIL_LINES:])


def _read_lines(log_path: Path) -> Iterator[str]:
    """Lines of the log's end that have text; a progress bar's states count as lines."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return
    for line in re.split(r"[\r\n]+", _ANSI.sub("", text)):
        words = _PREFIX.sub("", line).strip()
        if words:
            yield words[:MAX_LINE_LENGTH]
