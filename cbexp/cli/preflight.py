"""Checks every job of a command line before any of them runs; writes nothing."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from cbexp.cli.composer import (
    Composer,
    expand_sweep,
    open_composer,
    parse_overrides,
    placed_job,
    without_hydra,
)
from cbexp.cli.config_errors import explain_choice, explain_error, explain_unknown_setting
from cbexp.config import ExperimentConfig
from cbexp.errors import CbexpError, ConfigError

PRIMARY_CONFIG = "config"


@dataclass(frozen=True)
class CheckedJob:
    """One job of the command line. `output_dir` is the folder of the run or sweep, but for the time in its name."""

    overrides: list[str]
    config: ExperimentConfig
    output_dir: Path


@dataclass(frozen=True)
class CheckedCommand:
    """What a command line will run, in order."""

    jobs: list[CheckedJob]
    is_multirun: bool


def check_command(args: Namespace, conf_dir: Path) -> CheckedCommand:
    """Compose and validate each job that `args` (of Hydra's parser) stand for, sweeps expanded as Hydra expands them.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or impossible in its combination.
    """
    if args.config_path is not None:
        raise ConfigError(f"--config-path={args.config_path}: add your own yamls with --config-dir instead.")
    if args.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun would write over the results of that run: give its overrides again."
        )
    with open_composer(conf_dir, args.config_dir, args.config_name or PRIMARY_CONFIG) as composer:
        with _explained(args.overrides, composer):
            _check_group_overrides(args.overrides, composer)
            common = composer.compose_common(args.overrides)
            is_multirun = args.multirun or common.hydra.mode == RunMode.MULTIRUN
            if not is_multirun:
                _refuse_sweep(args.overrides, common)
            cells = expand_sweep(common) if is_multirun else [args.overrides]
        jobs = [
            _check_job(composer, cell, index if is_multirun else None, len(cells))
            for index, cell in enumerate(cells)
        ]
    _refuse_shared_stats_path(jobs)
    return CheckedCommand(jobs, is_multirun)


def convert_config(settings: DictConfig) -> ExperimentConfig:
    """Return the composed settings (without the `hydra` node) as dataclasses, whose own checks run.

    Raises:
        ConfigError: a combination is impossible, or a key was added that is not a setting.
    """
    if OmegaConf.get_type(settings) is not ExperimentConfig:
        raise ConfigError(
            "the primary config does not start from cbexp_schema: put it first in its defaults list."
        )
    for key in _list_added_keys(settings):
        raise ConfigError(f"+{key}: {explain_unknown_setting(key, {})}")
    config: ExperimentConfig = OmegaConf.to_object(settings)  # type: ignore[assignment]
    return config


def _check_job(composer: Composer, cell: list[str], job_index: int | None, num_jobs: int) -> CheckedJob:
    where = "" if job_index is None else f"job {job_index} of {num_jobs} ({' '.join(cell)}): "
    with _explained(cell, composer, where):
        composed = composer.compose_job(cell)
        with placed_job(composed, job_index) as output_dir:
            config = convert_config(without_hydra(composed))
    _refuse_idle_architecture(cell, config)
    return CheckedJob(cell, config, output_dir)


@contextmanager
def _explained(overrides: list[str], composer: Composer, where: str = "") -> Iterator[None]:
    """Turn what composing raises into a `ConfigError` in the user's words; `where` names the job."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, CbexpError) as error:
        raise ConfigError(where + explain_error(error, overrides, composer.groups)) from error


def _check_group_overrides(overrides: list[str], composer: Composer) -> None:
    """Refuse `model=null`, `model=3` and `model=[a,b]`, on which Hydra stumbles without naming the group."""
    for override in parse_overrides(overrides):
        is_named = override.is_sweep_override() or isinstance(override.value(), str)
        key = override.get_key_element()
        if not is_named and key in composer.groups:
            raise ConfigError(explain_choice(key, override.get_value_element_as_str(), composer.groups[key]))


def _refuse_sweep(overrides: list[str], common: DictConfig) -> None:
    for override in parse_overrides(overrides):
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: several values are a sweep: add -m. A list is written [a,b]."
            )
    if common.hydra.sweeper.params:
        raise ConfigError("hydra.sweeper.params lists a sweep, but this is no multirun: add -m.")


def _refuse_idle_architecture(cell: list[str], config: ExperimentConfig) -> None:
    idle = [text for text in cell if text.lstrip("+").startswith("model.architecture")]
    if idle and config.model.init == "pretrained":
        raise ConfigError(
            f"{idle[0]} has no effect with model.init=pretrained: add model.init=random or remove it."
        )


def _refuse_shared_stats_path(jobs: Sequence[CheckedJob]) -> None:
    paths = [job.config.stats_path for job in jobs if job.config.stats_path is not None]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"stats_path={paths[0]}: the jobs of this sweep would overwrite each other's file. "
            "Use a path of each job's own, as in 'stats_path=stats_${hydra:job.num}.json'."
        )


def _list_added_keys(settings: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys that the schema does not have (`+key=value` adds them to a node without complaint)."""
    schema = OmegaConf.get_type(settings)
    known = (
        {item.name for item in dataclasses.fields(schema)}
        if dataclasses.is_dataclass(schema)
        else set(map(str, settings))
    )
    for key in map(str, settings):
        if key not in known:
            yield f"{prefix}{key}"
        elif not OmegaConf.is_missing(settings, key) and OmegaConf.is_dict(settings._get_node(key)):
            yield from _list_added_keys(settings[key], f"{prefix}{key}.")
