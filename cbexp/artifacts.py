"""The run directory: records appended round by round, the job's status, and a summary written last."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cbexp.config import ArtifactsConfig
from cbexp.errors import ResultsError
from cbexp.files import append_bytes, check_writable, describe_failure, read_jsonl, replace_text
from cbexp.metrics import RequestRecord, RoundRecord
from cbexp.run_status import (
    STATUS,
    SUMMARY,
    Status,
    begin_status,
    find_live_owner,
    now,
    read_json_object,
    write_status,
)

__all__ = ["RunDirectory", "Status", "check_writable", "read_jsonl"]

TRACEBACK = "traceback.txt"
ROUNDS, REQUESTS, STEPS, COMPLETIONS = "rounds.jsonl", "requests.jsonl", "steps.jsonl", "completions.jsonl"
WITH_TRACEBACK = ("failed", "out_of_memory")


class RunDirectory:
    """The files of one job. A write is on disk when the call returns. A failed one raises `ResultsError`."""

    def __init__(self, path: Path, max_completions: int | None) -> None:
        self.path = path
        self._max_completions = max_completions
        self._num_rounds = 0
        self._status = begin_status()

    @classmethod
    def create(cls, path: Path, config: ArtifactsConfig) -> RunDirectory:
        """Make `path` a run directory with status `running`. An existing folder must hold no records.

        Raises:
            ResultsError: the folder holds records of another run, or cannot be written.
        """
        directory = cls(path, _max_completions(config.completions))
        try:
            path.mkdir(parents=True, exist_ok=True)
            _refuse_used(path)
            with (path / STATUS).open(
                "x", encoding="utf-8"
            ) as file:  # of two runs at once, one gets the folder
                file.write(_to_json(directory._status))
        except OSError as error:
            raise ResultsError(
                f"{describe_failure(path, error)} Choose another folder with hydra.run.dir=FOLDER."
            ) from error
        return directory

    def write_environment(self, values: Mapping[str, Any]) -> None:
        """Write environment.json: commit, versions, hardware."""
        self._write_json("environment.json", values)

    def write_engine(self, values: Mapping[str, Any]) -> None:
        """Write engine.json: batching, attention and compile settings as resolved."""
        self._write_json("engine.json", values)

    def write_rescoring(self, values: Mapping[str, Any]) -> None:
        """Write rescoring.json: what the model's own forward makes of a sample of the completions."""
        self._write_json("rescoring.json", values)

    def append_round(
        self,
        record: RoundRecord,
        requests: Sequence[RequestRecord],
        steps: Sequence[Mapping[str, Any]],
        completions: Sequence[Mapping[str, Any]],
    ) -> None:
        """Append a round's records. Of `completions` as many rows are kept as `artifacts.completions` says.

        The round's own line comes last: if it is there, the others are complete.
        """
        self._append(STEPS, steps)
        self.append_interrupted_round(requests, completions)
        self._append(ROUNDS, [record.to_dict()])
        self._num_rounds += 1

    def append_interrupted_round(
        self, requests: Sequence[RequestRecord], completions: Sequence[Mapping[str, Any]]
    ) -> None:
        """Append the records of an interrupted round. It gets no line in rounds.jsonl."""
        self._append(COMPLETIONS, completions[: self._max_completions])
        self._append(REQUESTS, [request.to_dict() for request in requests])

    def write_summary(self, summary: Mapping[str, Any], stats_path: Path | None) -> None:
        """End the job as completed: write the copy at `stats_path`, the status, and summary.json last."""
        if stats_path is not None:
            check_writable(stats_path)
            self._replace(stats_path, _to_json(summary))
        self.mark("completed")
        self._write_json(SUMMARY, summary)

    def mark(self, status: Status, error: BaseException | None = None) -> None:
        """Set the status, with an error's class and message, and for a failure a file with its traceback.

        Raises:
            ResultsError: status.json can neither be replaced nor overwritten.
        """
        self._status |= {"status": status, "ended_at": now()}
        if error is not None:
            self._status |= {"error_class": type(error).__name__, "message": str(error)}
        if error is not None and status in WITH_TRACEBACK:
            self._status["traceback_file"] = self._write_traceback(error)
        try:
            write_status(self.path, self._status)
        except OSError as lost:
            raise self._loss(self.path / STATUS, lost) from lost

    def size_bytes(self) -> int:
        """Bytes of all files in the directory."""
        return sum(
            os.lstat(os.path.join(folder, name)).st_size
            for folder, _, names in os.walk(self.path)
            for name in names
        )

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        self._replace(self.path / name, _to_json(values))

    def _replace(self, path: Path, text: str) -> None:
        try:
            replace_text(path, text)
        except OSError as error:
            raise self._loss(path, error) from error

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        try:
            append_bytes(self.path / name, lines.encode())
        except OSError as error:
            raise self._loss(self.path / name, error) from error

    def _write_traceback(self, error: BaseException) -> str | None:
        """Write the traceback and return its file's name; None if it cannot be written: the status comes first."""
        try:
            replace_text(self.path / TRACEBACK, "".join(traceback.format_exception(error)))
        except OSError:
            return None
        return TRACEBACK

    def _loss(self, path: Path, error: OSError) -> ResultsError:
        kept = f"Kept: {self._num_rounds} whole round(s) in {self.path}."
        return ResultsError(f"{describe_failure(path, error)} {kept}")


def _max_completions(choice: str) -> int | None:
    """Rows kept a round; None keeps all."""
    return {"all": None, "none": 0}[choice] if choice in ("all", "none") else int(choice)


def _refuse_used(path: Path) -> None:
    if (path / SUMMARY).exists():
        raise ResultsError(
            f"{path} holds a completed run: results are never overwritten, choose another folder."
        )
    used = [name for name in (STATUS, ROUNDS, REQUESTS, STEPS, COMPLETIONS) if (path / name).exists()]
    if not used:
        return
    owner = find_live_owner(read_json_object(path / STATUS))
    if owner:
        raise ResultsError(f"{path} belongs to a run that is going on ({owner}): choose another folder.")
    raise ResultsError(
        f"{path} holds the records of a run that did not complete ({', '.join(used)}): "
        "choose another folder, or move it away."
    )


def _to_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, allow_nan=False) + "\n"
