"""One W&B run, logged round by round. Errors inside wandb become warnings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from cbexp.config import TrackingConfig
from cbexp.engine.types import StepInfo
from cbexp.errors import NotApplicableError
from cbexp.metrics import RoundRecord, flatten_numbers
from cbexp.tracking.modes import Mode
from cbexp.tracking.objective import OBJECTIVE, REJECTED, compute_objective

if TYPE_CHECKING:
    import wandb

STEP_KINDS = ("prefill", "mixed", "decode")
NUM_HISTOGRAM_BINS = 64
COMPLETION_COLUMNS = ("round_index", "request_id", "finish_reason", "verdict", "text")
RECORD_PREFIX = "run-"  # inside the run directory, a file summary.json would look like another run
EXIT_INTERRUPTED = 255  # wandb's own for Ctrl-C


class Tracker:
    """One W&B run, or none when tracking is disabled. As a context manager it always finishes the run.

    `description` says in one line the mode, where the data is and how to upload it. `warnings` has all that went wrong
    inside wandb.
    """

    def __init__(self, config: TrackingConfig, description: str = "W&B off") -> None:
        self.description = description
        self._config = config
        self._run: wandb.Run | None = None
        self._problems: Counter[str] = Counter()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._log_bad_end(error)
        self.finish(_choose_exit_code(error))

    @property
    def warnings(self) -> list[str]:
        """What went wrong so far, each message once, with its count."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._problems.items()]

    def attach(self, run: wandb.Run, mode: Mode, reason: str) -> None:
        """Log to `run` from now on."""
        self._run = run
        place = run.url if mode == "online" else f"upload with: {_sync_command(run)}"
        self.description = f"W&B {mode} ({reason}); {place}"

    def warn(self, text: str) -> None:
        """Add to `warnings`."""
        self._problems[text] += 1

    def warn_of_fallback(self, text: str) -> None:
        """Add to `warnings` why the run is not online, and how to upload what is kept instead."""
        self.warn(text if self._run is None else f"{text}; the data is kept: {_sync_command(self._run)}")

    def log_resolved(self, settings: Mapping[str, Any]) -> None:
        """Add the resolved settings to the run's configuration, as `resolved`."""
        self._attempt("logging the plan", lambda run: run.config.update({"resolved": dict(settings)}))

    def log_round(self, record: RoundRecord, steps: Sequence[StepInfo]) -> None:
        """Log a round's numbers and histograms against `round`; names of a warmup round begin with `warmup/`."""
        prefix = "warmup/" if record.is_warmup else ""

        def log(run: wandb.Run) -> None:
            values = flatten_numbers(record.to_dict()) | _build_step_histograms(steps)
            named = {f"{prefix}{name}": value for name, value in values.items()}
            run.log({"round": record.round_index, **named})

        self._attempt("logging a round", log)

    def log_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log completion rows as a table, at most `max_logged_completions`, if `log_completions` is set."""
        if not self._config.log_completions:
            return
        data = [
            [row[column] for column in COMPLETION_COLUMNS]
            for row in rows[: self._config.max_logged_completions]
        ]
        self._attempt("logging completions", lambda run: run.log({"completions": _table(data)}))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log the run's summary and objective, and an artifact with summary and configuration."""
        objective = compute_objective(summary, self._config.max_memory_gib)
        self._attempt("logging the objective", lambda run: _log_objective(run, objective))
        self._attempt("logging the summary", lambda run: run.summary.update(dict(summary)))
        self._attempt("logging the records", lambda run: _log_records(run, summary))

    def log_values(self, build_values: Callable[[], Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
        """Log the tables and charts that `build_values` makes, and the run's summary."""
        self._attempt("logging values", lambda run: run.log(dict(build_values())))
        self._attempt("logging the summary", lambda run: run.summary.update(dict(summary)))

    def finish(self, exit_code: int) -> None:
        """Close the run, as failed unless `exit_code` is 0. Waits for the upload a bounded time. Idempotent."""
        run = self._run
        if run is None:
            return
        try:
            self._attempt("finishing the run", lambda run: run.finish(exit_code=exit_code))
        except KeyboardInterrupt:
            self.warn(f"W&B: the upload was interrupted; the data is kept: {_sync_command(run)}")
            raise
        finally:
            self._run = None

    def _log_bad_end(self, error: BaseException) -> None:
        """Log the error, and the worst objective for a search unless the job was only interrupted."""
        reason = {"error_class": type(error).__name__, "message": str(error)}
        if not isinstance(error, KeyboardInterrupt):
            self._attempt("logging the objective", lambda run: _log_objective(run, REJECTED))
        self._attempt("logging the error", lambda run: run.summary.update(reason))

    def _attempt(self, what: str, action: Callable[[wandb.Run], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except TimeoutError:
            self.warn(f"W&B: {what} took too long; the data is kept: {_sync_command(self._run)}")
        except Exception as error:  # noqa: BLE001 - wandb raises of every kind, and a run must outlive them all
            self.warn(f"W&B: {what} failed ({type(error).__name__}: {error})")


def _build_step_histograms(steps: Sequence[StepInfo]) -> dict[str, Any]:
    """Return a `wandb.Histogram` of seconds a step for each kind that occurred: `histograms/decode_step_s` and so on.

    The decode steps of a burst count one by one, each with an equal share of its time.
    """
    by_kind = {kind: [step for step in steps if step.kind == kind] for kind in STEP_KINDS}
    return {
        f"histograms/{kind}_step_s": _build_histogram(chosen) for kind, chosen in by_kind.items() if chosen
    }


def _build_histogram(steps: Sequence[StepInfo]) -> Any:
    import wandb

    seconds = [step.duration_s / step.num_steps for step in steps]
    return wandb.Histogram(
        np_histogram=np.histogram(
            seconds, bins=NUM_HISTOGRAM_BINS, weights=[step.num_steps for step in steps]
        )
    )


def _choose_exit_code(error: BaseException | None) -> int:
    """The run's exit code; a configuration that this machine cannot run is no failure."""
    if error is None or isinstance(error, NotApplicableError):
        return 0
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _log_objective(run: wandb.Run, objective: float) -> None:
    """Log the objective in the history, where sweeps look for it, and in the summary, where people do."""
    run.log({OBJECTIVE: objective})
    run.summary.update({OBJECTIVE: objective})


def _log_records(run: wandb.Run, summary: Mapping[str, Any]) -> None:
    """Log summary and configuration as an artifact, or as files of the run if the server does not answer.

    The files lie in the run's own folder and are read from there on upload: a staging copy could be gone by then.
    """
    import wandb

    paths = _write_records(run, summary)
    artifact = wandb.Artifact(f"records-{run.id}", type="records")
    for path in paths:
        artifact.add_file(str(path), name=path.name.removeprefix(RECORD_PREFIX), policy="immutable")
    try:
        run.log_artifact(artifact)
    except Exception:
        for path in paths:
            run.save(path, base_path=path.parents[1], policy="now")
        raise


def _write_records(run: wandb.Run, summary: Mapping[str, Any]) -> list[Path]:
    folder = Path(run.settings.sync_dir) / "records"
    folder.mkdir()
    contents = {"summary.json": dict(summary), "config.json": dict(run.config)}
    paths = {folder / f"{RECORD_PREFIX}{name}": values for name, values in contents.items()}
    for path, values in paths.items():
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return list(paths)


def _sync_command(run: wandb.Run) -> str:
    folder, here = Path(run.settings.sync_dir), Path.cwd()
    path = folder.relative_to(here) if folder.is_relative_to(here) else folder
    # Without the flag, wandb leaves out what was begun online.
    return f"wandb sync {path}" if run.offline else f"wandb sync --include-online {path}"


def _table(rows: list[list[Any]]) -> Any:
    import wandb

    return wandb.Table(columns=list(COMPLETION_COLUMNS), data=rows)
