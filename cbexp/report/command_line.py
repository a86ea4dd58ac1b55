"""The command line of reports: its arguments, its output files and its exit statuses."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cbexp.errors import CbexpError
from cbexp.files import check_writable, describe_failure, replace_text
from cbexp.report.compare import DEFAULT_THRESHOLD, compare_runs, exit_status
from cbexp.report.compare_table import format_comparison
from cbexp.report.errors import ReportError
from cbexp.report.loading import load_runs
from cbexp.report.page import build_page
from cbexp.report.run import Run
from cbexp.report.table import format_csv, format_json, format_markdown
from cbexp.report.terminal import format_report

COMPARE = "compare"
BAD_USE = 2
STDOUT = Path("-")
Formatter = Callable[[Sequence[Run], str | None], str]
FORMATS: dict[str, Formatter] = {
    "html": build_page,
    "csv": format_csv,
    "json": format_json,
    "markdown": format_markdown,
}


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns its exit status: 0 done, 2 impossible as asked, or the status of a comparison."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of folders are bytes that need not be Unicode, and a terminal may lack signs.
        sys.stdout.reconfigure(errors="replace")
    try:
        if arguments and arguments[0] == COMPARE:
            return _compare(_comparison_parser().parse_args(arguments[1:]))
        return _report(_report_parser().parse_args(arguments))
    except CbexpError as error:
        print(f"cbexp.report: {error}", file=sys.stderr)  # noqa: T201
        return BAD_USE
    except BrokenPipeError:  # the reader has seen enough (`| head`); nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _report(options: argparse.Namespace) -> int:
    targets = _targets(options)
    runs = load_runs(options.folders)
    if STDOUT not in targets.values():
        _print(format_report(runs, options.baseline))
    for name, path in targets.items():
        _write(path, FORMATS[name](runs, options.baseline))
    return 0


def _targets(options: argparse.Namespace) -> dict[str, Path]:
    """Output file of each format. Checked first, since a long report should not be made in vain."""
    targets: dict[str, Path] = {}
    for name in FORMATS:
        path = getattr(options, name)
        if path is None:
            continue
        other = next((other for other in targets if targets[other].absolute() == path.absolute()), None)
        if other is not None:
            raise ReportError(f"--{other} and --{name} both go to {path}: give each a file of its own.")
        targets[name] = path
        if path != STDOUT:
            check_writable(path)
    return targets


def _compare(options: argparse.Namespace) -> int:
    old, new = load_runs([options.old]), load_runs([options.new])
    changes = compare_runs(old, new, options.threshold)
    _print(format_comparison(old, new, changes, options.threshold))
    return exit_status(changes)


def _write(path: Path, text: str) -> None:
    if path == STDOUT:
        _print(text)
        return
    try:
        replace_text(path, text.encode(errors="replace").decode())  # names of folders need not be Unicode
    except OSError as error:
        raise ReportError(describe_failure(path, error)) from error
    _print(f"wrote {path}\n")


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ReportError(f"the output cannot be written: {error.strerror}.") from error


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cbexp.report",
        description="Print the runs of some folders, the fastest first. Another form says whether a later report "
        f"has regressed: python -m cbexp.report {COMPARE} OLD NEW",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="a run or a sweep, as outputs/NAME/DATE, or above",
    )
    parser.add_argument(
        "--baseline",
        metavar="WORDS",
        help="overrides of the run that the ratios are to, as compile=eager; without it the slowest of each workload",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="one page with charts that needs no network; '-' is stdout"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="all figures of each run as CSV; '-' is stdout"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same as a JSON list; '-' is stdout")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table as markdown; '-' is stdout")
    return parser


def _comparison_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m cbexp.report {COMPARE}",
        description="Compare two reports cell by cell. Exit status: 0 every cell compared and none worse, 1 a "
        "regression, 3 no regression but something could not be judged, 2 the command cannot be carried out.",
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="the folder of the earlier run or sweep")
    parser.add_argument("new", type=Path, metavar="NEW", help="the folder of the later one")
    parser.add_argument(
        "--threshold",
        type=float,
        default=DEFAULT_THRESHOLD,
        metavar="SHARE",
        help="how much slower is still none: 0.02 for 2 %% (default %(default)s); process to process varies by as much",
    )
    return parser
