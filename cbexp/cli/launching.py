"""Hydra's side of a sweep: its frame around each cell (folder, config, environment), and its launchers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from cbexp.cli.composer import Composer

Result = TypeVar("Result")
TaskFunction = Callable[[Any], Any]


class CellLauncher:
    """Runs functions as Hydra's jobs of one sweep, in the folders of its cells."""

    def __init__(self, composer: Composer, overrides: Sequence[str], sweep_dir: Path) -> None:
        self._composer = composer
        self._sweep_dir = sweep_dir
        self._common = composer.compose_common([*overrides, f"hydra.sweep.dir={quote(str(sweep_dir))}"])
        self._context = HydraContext(composer.config_loader, Callbacks(self._common))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Tell Hydra's callbacks of the sweep's beginning and end."""
        name = self._common.hydra.job.config_name
        self._context.callbacks.on_multirun_start(config=self._common, config_name=name)
        yield
        self._context.callbacks.on_multirun_end(config=self._common, config_name=name)

    def run_here(
        self, index: int, overrides: Sequence[str], folder: Path, function: Callable[[], Result]
    ) -> Result:
        """Return what `function` returns, run inside the frame of job `index`; what it raises is raised."""
        config = self._compose_job(index, [*overrides, self._place(folder)])
        results: list[Result] = []
        errors: list[Exception] = []

        def keep_outcome(_settings: DictConfig) -> None:
            try:
                results.append(function())
            except Exception as error:  # noqa: BLE001 - Hydra would print it; raised below
                errors.append(error)

        run_job(
            task_function=keep_outcome,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=self._context,
        )
        for error in errors:
            raise error
        return results[0]

    def submit(self, jobs: Sequence[tuple[Sequence[str], Path]], task: TaskFunction) -> None:
        """Hand jobs (overrides and folder) to the launcher that was chosen; job i calls `task` as number i."""
        launcher = Plugins.instance().instantiate_launcher(self._context, task, self._common)
        launcher.launch([[*overrides, self._place(folder)] for overrides, folder in jobs], initial_job_idx=0)

    def _compose_job(self, index: int, overrides: list[str]) -> DictConfig:
        loader = self._composer.config_loader
        config: DictConfig = loader.load_sweep_config(self._common, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = index
        return config

    def _place(self, folder: Path) -> str:
        return f"hydra.sweep.subdir={quote(str(folder.relative_to(self._sweep_dir)))}"


def quote(text: str) -> str:
    """Return `text` as a value of Hydra's override grammar that means just that."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)  # backslashes count only before a quote
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'".replace("${", "\\${")
