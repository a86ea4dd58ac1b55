"""Composes configurations just as `hydra.main` will, and runs nothing; the only user of Hydra's internals."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hydra import version
from hydra._internal.core_plugins.basic_launcher import BasicLauncherConf
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from cbexp.errors import ConfigError

HYDRA_VERSION_BASE = "1.3"
MAX_JOB_FOLDER_LENGTH = 80
_NULL = re.compile(r"(?i)(?<![^=,(\s])null(?![^,)\s])")  # a whole value, of a sweep too
SUBMITIT = "hydra_plugins.hydra_submitit_launcher"


class Composer:
    """Turns overrides into composed configurations (with their `hydra` node)."""

    def __init__(self, hydra: Hydra, config_name: str) -> None:
        self._hydra = hydra
        self._config_name = config_name

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The choices of each configuration group, the user's own included; Hydra's groups are left out."""
        loader = self._hydra.config_loader
        return {
            group: loader.get_group_options(group) for group in loader.list_groups("") if group != "hydra"
        }

    def list_choices(self, group: str) -> list[str]:
        """The choices of a configuration group, Hydra's own included; none where it is no group."""
        if group.startswith("hydra/"):
            return self.config_loader.get_group_options(group)
        return self.groups.get(group, [])

    @property
    def config_loader(self) -> ConfigLoader:
        """Hydra's own, for its launchers."""
        loader: ConfigLoader = self._hydra.config_loader
        return loader

    def compose_common(self, overrides: list[str]) -> DictConfig:
        """Return what all jobs of a command line share: swept settings are left at their default."""
        return self._compose(overrides, RunMode.MULTIRUN)

    def compose_job(self, overrides: list[str]) -> DictConfig:
        """Return the configuration of one job."""
        return self._compose(overrides, RunMode.RUN)

    def _compose(self, overrides: list[str], run_mode: RunMode) -> DictConfig:
        return self._hydra.compose_config(
            config_name=self._config_name,
            overrides=overrides,
            run_mode=run_mode,
            with_log_configuration=False,
            validate_sweep_overrides=run_mode is RunMode.RUN,
        )


@contextmanager
def open_composer(conf_dir: Path, config_dir: str | None, config_name: str) -> Iterator[Composer]:
    """Yield a composer over `conf_dir` and, searched after it, the user's own `config_dir`.

    Raises:
        ConfigError: there is no such `config_dir`.
    """
    version.setbase(HYDRA_VERSION_BASE)
    search_path = create_config_search_path(str(conf_dir))
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir={config_dir}: there is no such folder.")
        own = f"file://{os.path.abspath(config_dir)}"
        search_path.prepend(provider="command-line", path=own, anchor=SearchPathQuery(provider="schema"))
    hydra = Hydra.create_main_hydra2("cbexp", search_path)
    try:
        yield Composer(hydra, config_name)
    finally:
        GlobalHydra.instance().clear()


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return what Hydra's own parser makes of a command line, flags anywhere; a bad flag exits with 2."""
    return get_args_parser().parse_intermixed_args(arguments)


def register_no_experiment() -> None:
    """Register the choice `experiment=none`, which sets nothing."""
    ConfigStore.instance().store(name="none", node={}, group="experiment", package="_global_")


def name_no_experiment(argument: str) -> str:
    """Return an argument with `none` in place of each `null` of `experiment=null,smoke`, for Hydra chooses by name."""
    key, equals, value = argument.partition("=")
    if key.lstrip("+") != "experiment":
        return argument
    return f"{key}{equals}{_NULL.sub('none', value)}"


def put_flags_first(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the command line with its `overrides` last, as Hydra needs them, which parses it again."""
    flags = list(arguments)
    for override in reversed(overrides):
        # The last one, as the value of a flag may read the same.
        del flags[len(flags) - 1 - flags[::-1].index(override)]
    return [*flags, *overrides]


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Return the parsed `key=value` arguments; raises Hydra's `OverrideParseException`."""
    return OverridesParser.create().parse_overrides(overrides)


def expand_sweep(common: DictConfig, config_loader: ConfigLoader) -> list[list[str]]:
    """Return the overrides of each job of a multirun, in the order in which Hydra's own sweeper runs them.

    Those of Hydra's own settings, which all jobs share, are not among them.

    Raises:
        ConfigError: another sweeper than Hydra's basic one is chosen, or a limit on its batches, or a launcher that
            reuses processes, or no value is left to a setting that is swept.
    """
    node = common.hydra
    if node.sweeper["_target_"] != BasicSweeperConf._target_:
        raise ConfigError(
            "hydra/sweeper: only basic is supported, so that every cell is known before the first one runs. For a "
            "search use scripts/wandb_sweep.yaml."
        )
    if node.sweeper.max_batch_size is not None:
        raise ConfigError(
            "hydra.sweeper.max_batch_size has no effect here: cells start as slots are free. On Slurm use "
            "hydra.launcher.array_parallelism."
        )
    _check_launcher(common)
    params: dict[str, str] = node.sweeper.params or {}
    assigned = [f"{key}={values}" for key, values in params.items()] + list_overrides(node, "task")
    parser = OverridesParser.create(config_loader=config_loader)  # it knows the choices that glob(...) means
    overrides = parser.parse_overrides(assigned)
    (cells,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    if not cells:
        empty = [str(override.input_line) for override in overrides if not list(_list_values(override))]
        raise ConfigError(
            f"{' '.join(empty)}: this means no value at all, so that the sweep would have no cell."
        )
    return [list(cell) for cell in cells]


def _list_values(override: Override) -> Iterator[str]:
    return override.sweep_string_iterator() if override.is_sweep_override() else iter([""])


def _check_launcher(common: DictConfig) -> None:
    is_submitit = common.hydra.launcher["_target_"].startswith(f"{SUBMITIT}.")
    if not (has_basic_launcher(common) or is_submitit):
        raise ConfigError(
            "hydra/launcher: only basic, slurm, submitit_slurm and submitit_local are supported."
        )


def check_launcher_is_installed(overrides: Sequence[Override]) -> None:
    """Raise `ConfigError` when a launcher is chosen that comes with an extra, and that is not installed."""
    for override in overrides:
        is_submitit = re.match("slurm|submitit", str(override.value() or ""))
        if override.key_or_group == "hydra/launcher" and is_submitit and not _is_installed(SUBMITIT):
            raise ConfigError(f"{override.input_line} needs submitit: pip install 'cbexp[slurm]'.")


def check_slurm_is_here(common: DictConfig) -> None:
    """Raise `ConfigError` when jobs are to be submitted to Slurm, and its commands are not to be found."""
    if common.hydra.launcher["_target_"].endswith(".SlurmLauncher") and shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher submits to Slurm, but this machine has no srun: run the command where sbatch works, or "
            "remove hydra/launcher and its settings to run the cells here."
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is its parent
        return False


def has_basic_launcher(common: DictConfig) -> bool:
    """Whether jobs run on this machine, and not where a cluster puts them."""
    return bool(common.hydra.launcher["_target_"] == BasicLauncherConf._target_)


def list_overrides(hydra_node: HydraConf | DictConfig, kind: Literal["task", "hydra"]) -> list[str]:
    """Return the overrides that a configuration was composed with, as they were written."""
    # Unresolved: an override may hold ${hydra:...}, which means something inside its job alone.
    return [
        str(text) for text in OmegaConf.to_container(getattr(hydra_node.overrides, kind), resolve=False) or []
    ]


@dataclass(frozen=True)
class Place:
    """Where a job's records go: `folder` of the run, or `subdir` in the folder of the sweep."""

    folder: Path
    subdir: str | None


def find_sweep_dir(common: DictConfig) -> Path:
    """Return the folder of a multirun, but for the time in its name, which is of this moment."""
    with _hydra_config(common):
        return Path(common.hydra.sweep.dir)


def is_sweep_dir_dated(common: DictConfig) -> bool:
    """Whether the folder of a multirun has the time in its name."""
    written: Any = OmegaConf.to_container(common.hydra.sweep, resolve=False)
    return "${now:" in written["dir"]


@contextmanager
def placed_job(composed: DictConfig, job_index: int | None) -> Iterator[Place]:
    """Make `${hydra:...}` resolve in `composed` as it will in the job; yield its place.

    `job_index` is None for a single run. The dated part of a path is of this moment, not of the run.
    """
    with open_dict(composed.hydra), read_write(composed.hydra):
        if job_index is not None:
            composed.hydra.job.num = composed.hydra.job.id = job_index
        with _hydra_config(composed):
            node = composed.hydra
            place = (
                Place(Path(node.run.dir), None)
                if job_index is None
                else Place(Path(node.sweep.dir), str(node.sweep.subdir))
            )
            OmegaConf.set_readonly(node, False)
            node.runtime.output_dir = str((place.folder / (place.subdir or "")).absolute())
            HydraConfig.instance().set_config(composed)
            yield place


@contextmanager
def _hydra_config(composed: DictConfig) -> Iterator[None]:
    """What `${hydra:...}` reads."""
    HydraConfig.instance().set_config(composed)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = None


def register_job_folder() -> None:
    """Register the resolver with which `conf/config.yaml` names the folder of a sweep's job."""
    OmegaConf.register_new_resolver("cbexp.job_folder", name_job_folder, replace=True)


def name_job_folder(job_num: int, override_dirname: str) -> str:
    """Return `2_compile=eager_ignore_eos=true`: job number and overrides, short and safe in any file system."""
    short = [re.sub(r"^\W*(\w+[.@/])*", "", item) for item in override_dirname.split(",")]
    safe = re.sub(r"[^\w.=-]+", "-", "_".join(item for item in short if item))
    # Cut by bytes, which is what file systems count.
    cut = f"{job_num}_{safe}".encode()[:MAX_JOB_FOLDER_LENGTH].decode(errors="ignore")
    return cut.rstrip("_-.=")


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return a copy of `composed` with its own settings alone."""
    settings = copy.deepcopy(composed)
    with open_dict(settings), read_write(settings):
        del settings["hydra"]
    return settings
