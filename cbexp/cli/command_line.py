"""The command line: checks every job, hands them to Hydra, runs each, and ends with one exit code."""

from __future__ import annotations

import importlib.metadata
import io
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from omegaconf import DictConfig

from cbexp.cli.checked_jobs import CheckedCommand
from cbexp.cli.composer import (
    HYDRA_VERSION_BASE,
    name_no_experiment,
    parse_arguments,
    put_flags_first,
    register_job_folder,
    register_no_experiment,
)
from cbexp.cli.exit_codes import (
    EXIT_BAD_CONFIG,
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_JOB_FAILED,
    EXIT_OK,
    choose_dry_runs_exit_code,
    choose_exit_code,
)
from cbexp.cli.job_runner import JobRunner
from cbexp.cli.override_checks import refuse_repeated_keys
from cbexp.cli.preflight import PRIMARY_CONFIG, check_command
from cbexp.cli.terminal import report_error, say, silence_stdout
from cbexp.cli.user_folders import refuse_shadowing
from cbexp.config import register_schema
from cbexp.engine import UnsupportedTransformersError, check_transformers_version
from cbexp.errors import CbexpError, ConfigError, ResultsError
from cbexp.sweep.stop_signals import interrupting_by_stop_signals

FIRST_RECORDS_BYTES = 2**16  # what Hydra's records and the run's first ones take, generously


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (without the program's name; None: the process's own).

    Exits with 0 when all went well, 1 when a job failed, 2 on a bad configuration, 3 when a single run cannot run on
    this machine, 130 when interrupted.
    """
    arguments = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack signs
    try:
        exit_code = _run(arguments)
        if sys.stdout is not None:  # it was closed before the start (`>&-`)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone (`| head`): say no more, to the interpreter neither
        silence_stdout()
        exit_code = EXIT_BROKEN_PIPE
    if exit_code:
        sys.exit(exit_code)


def _run(arguments: list[str]) -> int:
    if "--version" in arguments:
        say(f"cbexp {_find_version()}")
        return EXIT_OK
    register_schema()
    register_job_folder()
    register_no_experiment()
    arguments = list(map(name_no_experiment, arguments))
    with _command_line(arguments):
        args = parse_arguments(arguments)
        sys.argv[1:] = put_flags_first(arguments, args.overrides)
        try:
            _check_arguments(args)
        except ConfigError as error:
            report_error(error)
            return EXIT_BAD_CONFIG
        return _show_information() if _asks_for_information(args) else _run_command(args)


def _check_arguments(args: Namespace) -> None:
    """Refuse what Hydra would pass over in silence or with a traceback, also where it only shows a configuration."""
    if args.multirun and (args.cfg or args.info):
        raise ConfigError("-m runs a sweep, and --cfg and --info only show something: leave out one of them.")
    refuse_repeated_keys(args.overrides)
    if args.config_dir is not None:
        refuse_shadowing(Path(args.config_dir), conf_dir())


def _find_version() -> str:
    try:
        return importlib.metadata.version("cbexp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from its source folder)"


def conf_dir() -> Path:
    """Return the folder of the shipped yamls: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def _run_command(args: Namespace) -> int:
    try:
        command = check_command(args, conf_dir())
        _check_transformers()
        if command.jobs[0].config.resume is None:
            _make_output_root(command.output_dir)
        if command.is_multirun and not command.jobs[0].config.dry_run:
            from cbexp.cli.sweep_command import run_sweep  # late: a single run and --help need none of it

            return run_sweep(command, args, sys.argv[1:], conf_dir())
    except CbexpError as error:
        report_error(error)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_JOB_FAILED
    return _run_jobs(JobRunner(command), command.is_multirun)


def _run_jobs(runner: JobRunner, is_multirun: bool) -> int:
    try:
        with interrupting_by_stop_signals():
            _hand_to_hydra(runner)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return choose_dry_runs_exit_code(runner.statuses) if is_multirun else choose_exit_code(*runner.statuses)


def _check_transformers() -> None:
    """Ask the installed package and not the module, which may not even import beside other versions of its needs."""
    try:
        check_transformers_version(importlib.metadata.version("transformers"))
    except UnsupportedTransformersError as error:
        raise CbexpError(str(error)) from error
    except importlib.metadata.PackageNotFoundError as error:
        raise CbexpError("transformers is not installed: run scripts/setup, or pip install cbexp.") from error


def _hand_to_hydra(runner: JobRunner) -> None:
    def run_job(settings: DictConfig) -> float | None:
        return runner.run(settings)

    decorate = hydra.main(
        version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name=PRIMARY_CONFIG
    )
    decorate(run_job)()


def _show_information() -> int:
    """Let Hydra answer --help, --cfg and the like; it never runs a job then."""
    _hand_to_hydra(JobRunner(CheckedCommand([], Path(), "", is_multirun=False, is_local=True)))
    return 0


def _asks_for_information(args: Namespace) -> bool:
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def _make_output_root(output_dir: Path) -> None:
    """Make the folder that will hold the run's and write there, so that one that cannot be written is a message."""
    root = output_dir.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(FIRST_RECORDS_BYTES))
    except OSError as error:
        raise ResultsError(_describe_unwritable(root, error.strerror)) from error
    try:
        is_taken = output_dir.exists() and not output_dir.is_dir()
    except OSError as error:  # its name is too long
        raise ResultsError(_describe_unwritable(output_dir, error.strerror)) from error
    if is_taken:
        raise ResultsError(_describe_unwritable(output_dir, "it is a file"))


def _describe_unwritable(folder: Path, reason: str | None) -> str:
    where = "hydra.run.dir (-m: hydra.sweep.dir)"
    return f"results cannot be written to {folder}: {reason}. Choose another place with {where}."


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`."""
    previous = sys.argv
    sys.argv = ["cbexp", *arguments]
    try:
        yield
    finally:
        sys.argv = previous
