"""Starts W&B runs: their settings, the fallback from online to offline, and their metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbexp.config import SweepInfo, TrackingConfig
from cbexp.tracking.identity import find_cell_run_id, is_under_agent, make_run_id, refuse_sweep_under_agent
from cbexp.tracking.modes import Choice, Mode, choose_mode, first_line, refusing_bad_settings
from cbexp.tracking.tracker import Tracker

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0
FLUSH_INTERVAL_S = 0.5  # what a killed process can lose of an offline run
SYSTEM_METRICS_INTERVAL_S = 5.0  # wandb's own 15 s miss most of a short job
MAX_NAME_LENGTH = 128  # W&B's own limit


def start_tracking(
    config: TrackingConfig,
    run_name: str,
    sweep: SweepInfo | None,
    resolved_config: Mapping[str, Any],
    run_dir: Path,
) -> Tracker:
    """Start the job's W&B run inside `run_dir`; offline when W&B cannot be reached, with a warning.

    Mode `auto` is wandb's own (WANDB_MODE), else online with credentials, else offline. `disabled` does not import it.
    A cell of a resumed sweep continues the run of its earlier attempt; a job of `wandb agent` joins the agent's run.

    Raises:
        ConfigError: `online` without credentials, a project, tag or the like that W&B would refuse, or a multirun
            under `wandb agent`.
    """
    if config.mode == "disabled":
        return Tracker(config, "W&B disabled")
    refuse_sweep_under_agent(sweep)
    if sweep is not None and not config.per_cell:
        return Tracker(config, "W&B: one run for the whole sweep, at its end")
    group = config.group or (None if sweep is None else sweep.group)
    run_id = _choose_run_id(sweep, run_dir)
    tracker = start_run(config, run_name, group, run_id, resolved_config, run_dir)
    if sweep is None and not config.per_cell:
        tracker.warn("tracking.per_cell=false has no effect on a single run: remove it.")
    return tracker


def start_run(
    config: TrackingConfig,
    run_name: str,
    group: str | None,
    run_id: str | None,
    run_config: Mapping[str, Any],
    folder: Path,
) -> Tracker:
    """Start a run whose files lie in `folder`; `run_id` None leaves it to wandb. Raises as `start_tracking` does."""
    choice = choose_mode(config)
    if choice.mode == "disabled":
        return Tracker(config, f"W&B disabled ({choice.reason})")
    settings = _build_settings(config, run_name, group, run_id)
    # Absolute: an artifact of an offline run remembers where its files lie, and is uploaded from anywhere.
    tracker = _start(config, settings, dict(run_config), folder.absolute(), choice)
    for idle in _find_idle_variables(config, run_name, group):
        tracker.warn(idle)
    return tracker


def _choose_run_id(sweep: SweepInfo | None, run_dir: Path) -> str | None:
    """A cell's own id, since WANDB_RUN_ID would make one run of all cells; None for a single run, which may use it."""
    if sweep is None:
        return None
    return find_cell_run_id(run_dir) or make_run_id()


def _build_settings(
    config: TrackingConfig, run_name: str, group: str | None, run_id: str | None
) -> wandb.Settings:
    import wandb

    with refusing_bad_settings():
        settings = wandb.Settings(
            run_name=_shorten(run_name),
            run_group=None if group is None else _shorten(group),
            reinit="create_new",  # a run of the caller's own is neither ended nor joined
            silent=True,
            console="off",
            disable_git=True,  # environment.json has the commit
            disable_code=True,
            init_timeout=_timeout_s("WANDB_INIT_TIMEOUT", INIT_TIMEOUT_S),
            finish_timeout=_timeout_s("WANDB_FINISH_TIMEOUT", FINISH_TIMEOUT_S),
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=FLUSH_INTERVAL_S,
            x_stats_sampling_interval=SYSTEM_METRICS_INTERVAL_S,
            x_stats_track_process_tree=True,  # a driver may run in a process of its own
        )
        if config.tags:
            settings.run_tags = tuple(config.tags)
        if not is_under_agent():
            settings.project, settings.entity = config.project, config.entity
        if run_id is not None:
            settings.run_id, settings.resume = run_id, "allow"
        return settings


def _find_idle_variables(config: TrackingConfig, run_name: str, group: str | None) -> list[str]:
    """A warning for each wandb variable that is set and has no effect. Those that an agent sets are left out."""
    set_by_agent = ("WANDB_PROJECT", "WANDB_ENTITY")
    return [
        f"{variable}={os.environ[variable]} has no effect: {setting}={used} goes before it."
        for variable, setting, used in _overriding_settings(config, run_name, group)
        if used
        and os.environ.get(variable, used) not in ("", used)
        and not (is_under_agent() and variable in set_by_agent)
    ]


def _overriding_settings(
    config: TrackingConfig, run_name: str, group: str | None
) -> Iterator[tuple[str, str, str | None]]:
    """Yield each variable, the setting that overrides it, and that setting's value."""
    yield "WANDB_PROJECT", "tracking.project", config.project
    yield "WANDB_ENTITY", "tracking.entity", config.entity
    yield "WANDB_TAGS", "tracking.tags", ",".join(config.tags)
    yield "WANDB_RUN_GROUP", "the group", group
    yield "WANDB_NAME", "the run's name", run_name


def _start(
    config: TrackingConfig,
    settings: wandb.Settings,
    run_config: dict[str, Any],
    folder: Path,
    choice: Choice,
) -> Tracker:
    """Start the run. If online fails it goes offline, and without W&B if that fails too."""
    tracker = Tracker(config)
    failures: list[str] = []
    modes: list[Mode] = [choice.mode] if choice.mode == "offline" else ["online", "offline"]
    for mode in modes:
        try:
            if failures:
                _forget_failed_run()
            run = _init_run(settings, run_config, folder, mode)
        except Exception as error:  # noqa: BLE001 - wandb raises of every kind, and a job must start without it
            failures.append(f"W&B could not start {mode}: {first_line(error)}")
            continue
        tracker.attach(run, mode, choice.reason if mode == choice.mode else "online failed")
        break
    for failure in failures:
        tracker.warn_of_fallback(failure)
    return tracker


def _forget_failed_run() -> None:
    """End wandb's own process, unless another run uses it. It would refuse the failed run's id to a second attempt."""
    import wandb

    if wandb.setup().most_recent_active_run is None:
        wandb.teardown()
        wandb.setup(wandb.Settings(silent=True))


def _init_run(settings: wandb.Settings, run_config: dict[str, Any], folder: Path, mode: Mode) -> wandb.Run:
    import wandb

    run = wandb.init(mode=mode, dir=folder, config=run_config, settings=settings)
    run.define_metric("round")
    run.define_metric("*", step_metric="round", summary="none")  # no last values beside log_summary's
    return run


def _timeout_s(variable: str, default_s: float) -> float:
    """Seconds to wait, from wandb's own `variable` where it is set."""
    return float(os.environ.get(variable, default_s))  # wandb has checked its variables by now


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"
