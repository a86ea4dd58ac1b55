"""Checks every job of a command line before any of them runs; writes nothing."""

from __future__ import annotations

import dataclasses
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from cbexp.cli.checked_jobs import CheckedCommand, CheckedJob, refuse_collisions, refuse_equal_cells
from cbexp.cli.composer import (
    Composer,
    Place,
    check_launcher_is_installed,
    check_slurm_is_here,
    expand_sweep,
    find_sweep_dir,
    has_basic_launcher,
    is_sweep_dir_dated,
    list_overrides,
    open_composer,
    parse_overrides,
    placed_job,
    without_hydra,
)
from cbexp.cli.config_errors import explain_error, explain_unknown_setting
from cbexp.cli.override_checks import (
    refuse_broken_text,
    refuse_entry_of_no_sweep,
    refuse_sweep,
    refuse_unnamed_choices,
)
from cbexp.cli.terminal import say
from cbexp.cli.user_folders import list_folders, refuse_shadowing
from cbexp.config import SWEEP_SETTINGS, ExperimentConfig
from cbexp.drivers.vllm.python import check_interpreter
from cbexp.errors import CbexpError, ConfigError

PRIMARY_CONFIG = "config"
MANY_CELLS = 20  # so many take seconds to compose
# Hydra's sweeper escapes it where it is not quoted.
_JOB_NUMBER = re.compile(r"(?<!\\)\$\\?\{hydra\\?:job\.(num|id)\\?\}")


def check_command(args: Namespace, conf_dir: Path, indices: Sequence[int] | None = None) -> CheckedCommand:
    """Compose and validate each job that `args` (of Hydra's parser) stand for, sweeps expanded as Hydra expands them.

    Args:
        args: what Hydra's parser made of the command line.
        conf_dir: the folder of the shipped yamls.
        indices: the number of each job of a multirun; None: counted from 0.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of range or impossible in its combination.
    """
    if args.config_path is not None:
        raise ConfigError(f"--config-path={args.config_path}: add your own yamls with --config-dir instead.")
    if args.experimental_rerun is not None:
        raise ConfigError(
            "--experimental-rerun would write over the results of that run: give its overrides again."
        )
    refuse_broken_text(args.overrides)
    with open_composer(conf_dir, args.config_dir, args.config_name or PRIMARY_CONFIG) as composer:
        with _explained(args.overrides, composer):
            check_launcher_is_installed(parse_overrides(args.overrides))
            refuse_unnamed_choices(args.overrides, composer)
            refuse_entry_of_no_sweep(args.overrides, composer)
            common = composer.compose_common(args.overrides)
            for folder in list_folders(common.hydra.searchpath):
                refuse_shadowing(folder, conf_dir)
            is_multirun = args.multirun or common.hydra.mode == RunMode.MULTIRUN
            if not is_multirun:
                refuse_sweep(args.overrides, common)
            cells = expand_sweep(common, composer.config_loader) if is_multirun else [args.overrides]
            refuse_unnamed_choices(sorted(set().union(*cells)), composer)
        numbered = list(zip(indices or range(len(cells)), cells, strict=True))
        if not is_multirun:
            job, place = _check_job(composer, args, args.overrides, None, common)
            return CheckedCommand([job], place.folder, job.config.name, is_multirun=False, is_local=True)
        naming = _name_folders_by_differences(cells)
        jobs = []
        if len(cells) >= MANY_CELLS:
            say(f"composing and checking {len(cells)} cells")
        for position, (index, cell) in enumerate(numbered):
            where = f"job {position} of {len(cells)} ({' '.join(_list_own_overrides(cell))}): "
            jobs.append(_check_job(composer, args, cell, index, common, where, naming)[0])
        refuse_collisions(jobs)
        refuse_equal_cells(jobs)
        from cbexp.tracking import refuse_impossible_online  # late: a single run and --help need none of it

        refuse_impossible_online((job.config.tracking for job in jobs), is_local=has_basic_launcher(common))
        if not has_basic_launcher(common):
            _refuse_settings_of_this_machine(jobs[0].config)
            check_slurm_is_here(common)
        with _explained(args.overrides, composer):
            sweep_dir = find_sweep_dir(common)
    return CheckedCommand(
        jobs,
        sweep_dir,
        str(common.name),
        is_multirun=True,
        is_local=has_basic_launcher(common),
        has_dated_dir=is_sweep_dir_dated(common),
    )


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


def _check_job(
    composer: Composer,
    args: Namespace,
    cell: list[str],
    job_index: int | None,
    common: DictConfig,
    where: str = "",
    naming: Sequence[str] = (),
) -> tuple[CheckedJob, Place]:
    shared = [] if job_index is None else list_overrides(common.hydra, "hydra")
    with _explained([*shared, *cell], composer, where):
        composed = composer.compose_job([*shared, *naming, *cell])
        with placed_job(composed, job_index) as place:
            config = convert_config(without_hydra(composed))
        if has_basic_launcher(common):
            check_interpreter(config.driver)
    _refuse_idle_architecture(cell, config)
    _refuse_sweep_in_sweep(cell, composed, common, where)
    own = [_with_job_number(text, job_index) for text in _list_own_overrides(cell)]
    command = _format_command(args, own, needs_multirun=bool(common.hydra.sweeper.params))
    return CheckedJob(cell, config, job_index or 0, place.subdir, own, command), place


def _name_folders_by_differences(cells: Sequence[list[str]]) -> list[str]:
    """The override that keeps out of a job's folder name what all jobs share, and how the sweep runs them."""
    common = set(cells[0]).intersection(*cells) if len(cells) > 1 else set()
    keys = {override.key_or_group for override in parse_overrides(sorted(common))} | set(SWEEP_SETTINGS)
    names = ",".join(f"'{key}'" for key in sorted(keys))
    return [f"hydra.job.config.override_dirname.exclude_keys=[{names}]"]


def _list_own_overrides(overrides: list[str]) -> list[str]:
    """Those that say what a job does, and not how Hydra or the sweep runs it."""
    keys = (text.lstrip("+~").partition("=")[0] for text in overrides)
    return [
        text
        for text, key in zip(overrides, keys, strict=True)
        if key not in SWEEP_SETTINGS and not re.match(r"hydra\b", key)
    ]


def _with_job_number(text: str, job_index: int | None) -> str:
    """The override with the number in place of `${hydra:job.num}`, which a run by itself does not have."""
    return text if job_index is None else _JOB_NUMBER.sub(str(job_index), text)


def _format_command(args: Namespace, overrides: list[str], needs_multirun: bool) -> str:
    """The command of one job; where an experiment's yaml lists the sweep, it is a sweep of that job."""
    flags = ["-m"] if needs_multirun else []
    flags += [] if args.config_dir is None else ["--config-dir", args.config_dir]
    flags += [] if args.config_name is None else ["--config-name", args.config_name]
    return shlex.join(["python", "-m", "cbexp", *flags, *overrides])


@contextmanager
def _explained(overrides: list[str], composer: Composer, where: str = "") -> Iterator[None]:
    """Turn what composing raises into a `ConfigError` in the user's words; `where` names the job."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, CbexpError) as error:
        raise ConfigError(where + explain_error(error, overrides, composer.groups)) from error


def _refuse_sweep_in_sweep(cell: list[str], composed: DictConfig, common: DictConfig, where: str) -> None:
    """Refuse a job whose experiment lists a sweep, of which the sweep that it is a job of knows nothing."""
    if composed.hydra.sweeper.params != common.hydra.sweeper.params:
        choice = next((text for text in cell if text.startswith("experiment=")), "its configuration")
        raise ConfigError(f"{where}{choice} lists a sweep of its own: run it by itself, without -m.")


def _refuse_idle_architecture(cell: list[str], config: ExperimentConfig) -> None:
    idle = [text for text in cell if text.lstrip("+").startswith("model.architecture")]
    if idle and config.model.init == "pretrained":
        raise ConfigError(
            f"{idle[0]} has no effect with model.init=pretrained: add model.init=random or remove it."
        )


def _refuse_settings_of_this_machine(config: ExperimentConfig) -> None:
    """Refuse what has no meaning where another machine's launcher runs the jobs."""
    if config.dry_run:
        raise ConfigError(
            "dry_run=true looks at this machine, and hydra/launcher runs the jobs elsewhere: remove hydra/launcher "
            "and its settings."
        )
    if config.isolation == "none":
        raise ConfigError(
            "isolation=none has no effect with hydra/launcher=submitit: each job is a process. Remove it."
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
