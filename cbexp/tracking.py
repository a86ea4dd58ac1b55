"""Weights & Biases, and the only importer of wandb: one run a job, and no failure of it ever ends the job."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from cbexp.config import TrackingConfig
from cbexp.errors import ConfigError
from cbexp.metrics import RoundRecord, flatten_numbers

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]

# What wandb is told by WANDB_MODE or its settings files, where that is not to go online.
OWN_MODES: dict[str, Mode] = {"offline": "offline", "dryrun": "offline", "disabled": "disabled"}

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0
FLUSH_INTERVAL_S = 0.5  # what a killed process can lose of an offline run
MAX_NAME_LENGTH = 128  # W&B's own limit
COMPLETION_COLUMNS = ("round_index", "request_id", "finish_reason", "verdict", "text")


class Tracker:
    """One W&B run, or none when tracking is disabled. Use as a context manager: leaving it always finishes the run.

    `description` says in one line which mode it is, where the data lies and how to upload it. Whatever goes wrong
    inside wandb is in `warnings` and nowhere else.
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
        self.finish(exit_code=0 if kind is None else 1)

    @property
    def warnings(self) -> list[str]:
        """What went wrong so far, each once with how often it did."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._problems.items()]

    def attach(self, run: wandb.Run, mode: Mode, reason: str) -> None:
        """Log to `run` from now on."""
        self._run = run
        place = run.url if mode == "online" else f"upload with: {_sync_command(run)}"
        self.description = f"W&B {mode} ({reason}); {place}"

    def warn(self, text: str) -> None:
        """Add to `warnings`."""
        self._problems[text] += 1

    def log_round(self, record: RoundRecord) -> None:
        """Log the numbers of a round against `round`; those of a warmup round have names that begin with `warmup/`."""
        prefix = "warmup/" if record.is_warmup else ""
        numbers = {f"{prefix}{name}": value for name, value in flatten_numbers(record.to_dict()).items()}
        self._attempt("logging a round", lambda run: run.log({"round": record.round_index, **numbers}))

    def log_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log completion rows as a table, as many as the configuration lets out: none, unless it says so."""
        if not self._config.log_completions:
            return
        data = [
            [row[column] for column in COMPLETION_COLUMNS]
            for row in rows[: self._config.max_logged_completions]
        ]
        self._attempt("logging completions", lambda run: run.log({"completions": _table(data)}))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Make `summary` the run's summary."""
        self._attempt("logging the summary", lambda run: run.summary.update(dict(summary)))

    def finish(self, exit_code: int) -> None:
        """Close the run, as failed unless `exit_code` is 0; waits for the upload a bounded time. Safe to call twice."""
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

    def _attempt(self, what: str, action: Callable[[wandb.Run], object]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except TimeoutError:
            self.warn(f"W&B: {what} took too long; the data is kept: {_sync_command(self._run)}")
        except Exception as error:  # noqa: BLE001 - wandb raises of every kind, and a run must outlive them all
            self.warn(f"W&B: {what} failed ({type(error).__name__}: {error})")


def start_tracking(
    config: TrackingConfig,
    run_name: str,
    group: str | None,
    resolved_config: Mapping[str, Any],
    run_dir: Path,
) -> Tracker:
    """Start the job's W&B run inside `run_dir`; offline when W&B cannot be reached, with a warning.

    Mode `auto` is wandb's own (WANDB_MODE), else online with credentials, else offline. `disabled` does not import it.

    Raises:
        ConfigError: `online` without credentials, or a project, tag or the like that W&B would refuse.
    """
    if config.mode == "disabled":
        return Tracker(config, "W&B disabled")
    choice = _choose_mode(config, _own_settings())
    if choice.mode == "disabled":
        return Tracker(config, f"W&B disabled ({choice.reason})")
    settings = _build_settings(config, run_name, group)
    return _start(config, settings, dict(resolved_config), run_dir, choice)


@dataclass(frozen=True)
class Choice:
    """The mode of a run, and why."""

    mode: Mode
    reason: str


def _own_settings() -> wandb.Settings:
    """What wandb takes from its environment variables and settings files; from here on it prints nothing."""
    import wandb

    with _refusals():
        return wandb.setup(wandb.Settings(silent=True)).settings


def _choose_mode(config: TrackingConfig, settings: wandb.Settings) -> Choice:
    if config.mode == "offline":
        return Choice("offline", "as configured")
    own_mode = OWN_MODES.get(settings.mode)
    if own_mode is not None and config.mode == "online":
        raise ConfigError(f"tracking=online, but wandb's own mode is {settings.mode} (WANDB_MODE): unset it.")
    if own_mode is not None:
        return Choice(own_mode, f"wandb's own mode is {settings.mode}")
    problem = _find_login_problem(settings)
    if problem is None:
        return Choice("online", "as configured" if config.mode == "online" else "credentials found")
    if config.mode == "online":
        raise ConfigError(
            f"tracking=online, but {problem}: run `wandb login`, set WANDB_API_KEY, or use tracking=offline."
        )
    return Choice("offline", problem)


def _find_login_problem(settings: wandb.Settings) -> str | None:
    """Why wandb has no credentials to go online with; None when it has some. Asks neither the user nor the server."""
    import wandb

    try:
        has_credentials = wandb.login(verify=False, prompt=False)
    except wandb.Error as error:
        return f"the credentials cannot be used ({_first_line(error)})"
    return None if has_credentials else f"there are no credentials for {settings.base_url}"


def _build_settings(config: TrackingConfig, run_name: str, group: str | None) -> wandb.Settings:
    import wandb

    with _refusals():
        return wandb.Settings(
            project=config.project,
            entity=config.entity,
            run_name=_shorten(run_name),
            run_group=None if group is None else _shorten(group),
            run_tags=tuple(config.tags),
            reinit="create_new",  # a run of the caller's own is neither ended nor joined
            silent=True,
            console="off",
            disable_git=True,  # environment.json has the commit
            disable_code=True,
            init_timeout=_timeout_s("WANDB_INIT_TIMEOUT", INIT_TIMEOUT_S),
            finish_timeout=_timeout_s("WANDB_FINISH_TIMEOUT", FINISH_TIMEOUT_S),
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=FLUSH_INTERVAL_S,
        )


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what wandb says about bad settings into an error for users."""
    import wandb
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"tracking: W&B does not accept {reasons}.") from error
    except wandb.Error as error:
        raise ConfigError(f"tracking: W&B does not accept its settings: {error}") from error


def _start(
    config: TrackingConfig,
    settings: wandb.Settings,
    run_config: dict[str, Any],
    run_dir: Path,
    choice: Choice,
) -> Tracker:
    """Start the run; what was to be online goes offline when that fails, and without W&B when that fails too."""
    tracker = Tracker(config)
    modes: list[Mode] = [choice.mode] if choice.mode == "offline" else ["online", "offline"]
    for mode in modes:
        try:
            run = _init_run(settings, run_config, run_dir, mode)
        except Exception as error:  # noqa: BLE001 - wandb raises of every kind, and a job must start without it
            tracker.warn(f"W&B could not start {mode}: {_first_line(error)}")
            continue
        tracker.attach(run, mode, choice.reason if mode == choice.mode else "online failed")
        return tracker
    return tracker


def _init_run(settings: wandb.Settings, run_config: dict[str, Any], run_dir: Path, mode: Mode) -> wandb.Run:
    import wandb

    run = wandb.init(mode=mode, dir=run_dir, config=run_config, settings=settings)
    run.define_metric("round")
    run.define_metric("*", step_metric="round", summary="none")  # no last values beside log_summary's
    return run


def _sync_command(run: wandb.Run) -> str:
    folder, here = Path(run.settings.sync_dir), Path.cwd()
    return f"wandb sync {folder.relative_to(here) if folder.is_relative_to(here) else folder}"


def _table(rows: list[list[Any]]) -> Any:
    import wandb

    return wandb.Table(columns=list(COMPLETION_COLUMNS), data=rows)


def _timeout_s(variable: str, default_s: float) -> float:
    """Seconds to wait, from wandb's own variable where it is set."""
    return float(os.environ.get(variable, default_s))  # wandb has checked its variables by now


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
