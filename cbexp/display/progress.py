"""Shows a job while it runs, and how it ended. Without a terminal it prints a plain line for each round."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cbexp.artifacts import TRACEBACK, RunDirectory
from cbexp.display.layout import MAX_COLUMNS, print_line, print_row
from cbexp.display.round_progress import RoundProgress
from cbexp.display.settings import cache_rows, plan_rows, set_up_rows
from cbexp.display.summary import print_summary
from cbexp.display.units import format_bytes, format_number, format_path, format_seconds, format_share
from cbexp.engine.types import StepInfo
from cbexp.metrics import RoundRecord

if TYPE_CHECKING:
    from cbexp.planning.dry_run import DryRunReport
    from cbexp.planning.plan import RunPlan

REFRESH_INTERVAL_S = 0.25  # a refresh takes 0.2 ms of the driver's thread, so below 0.1 %
NOTEWORTHY_PHASE_S = 1.0

ENDS = {
    "failed": ("FAILED", "bold red"),
    "bad_config": ("BAD CONFIGURATION", "bold red"),
    "out_of_memory": ("OUT OF MEMORY", "bold red"),
    "interrupted": ("INTERRUPTED", "bold yellow"),
    "not_applicable": ("NOT APPLICABLE", "bold yellow"),
}


class ProgressDisplay:
    """Everything that a job prints; errors go to stderr. It starts no thread."""

    def __init__(self, console: Console | None = None, error_console: Console | None = None) -> None:
        self._console = console or _build_console(sys.stdout)
        self._errors = error_console or _build_console(sys.stderr)
        self._live: Live | None = None
        self._round: RoundProgress | None = None
        self._refreshed_s = 0.0

    def print_line(self, text: str) -> None:
        """Print a remark."""
        print_line(self._console, text)

    def print_plan(self, plan: RunPlan) -> None:
        """Print what will run, with every `auto` resolved, and the warnings."""
        self._print_rows(plan_rows(plan.to_dict()))
        for warning in plan.warnings:
            print_row(self._console, "warning", warning, "yellow")

    def print_stop_ids(self, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        """Print which token ids end a completion."""
        ends = ", ".join(map(str, eos_token_ids)) or "none, requests end at their limit"
        print_row(self._console, "stop", f"EOS ids {ends}; pad id {pad_token_id}")

    def print_cache(self, settings: Mapping[str, Any]) -> None:
        """Print what `cache_rows` says of a driver's settings."""
        self._print_rows(cache_rows(settings))

    def print_set_up(self, compile_stats: Mapping[str, Any], compile_cache: Mapping[str, Any] | None) -> None:
        """Print what compiling and capturing took, and the folders and size of the compile cache."""
        self._print_rows(set_up_rows(compile_stats, compile_cache))

    def print_dry_run(self, report: DryRunReport) -> None:
        """Print the result of a dry run."""
        self._print_rows(report.rows())

    @contextmanager
    def showing_phase(self, name: str) -> Iterator[None]:
        """Show a phase other than a round while it runs, and afterwards its time if that was long."""
        label = name.replace("_", " ")
        start_s = time.perf_counter()
        with self._showing(f"{label} ..."):
            yield
        took_s = time.perf_counter() - start_s
        if took_s >= NOTEWORTHY_PHASE_S:
            print_row(self._console, label, format_seconds(took_s))

    def show_progress(self, text: str) -> None:
        """Show how far a long phase is: in the terminal's live line, or else in a line of its own."""
        if self._live is None:
            self.print_line(text)
        else:
            self._live.update(Text(text), refresh=True)

    @property
    def is_live(self) -> bool:
        """Whether there is a live line, for which `on_step` must be called; elsewhere it has nothing to show."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    @contextmanager
    def showing_round(self, round_index: int, is_warmup: bool, num_requests: int) -> Iterator[None]:
        """Show a round's progress, as far as `on_step` reports it."""
        self._round = RoundProgress(_round_name(round_index, is_warmup), num_requests, time.perf_counter())
        try:
            with self._showing(self._round.describe(time.perf_counter())):
                yield
        finally:
            self._round = None

    def on_step(self, _step_index: int, info: StepInfo) -> None:
        """Count a step, and refresh the live line if the last refresh is long enough ago."""
        if self._live is None or self._round is None:
            return
        self._round.add_step(info)
        if info.end_s - self._refreshed_s >= REFRESH_INTERVAL_S:
            self._refreshed_s = info.end_s
            self._live.update(Text(self._round.describe(info.end_s)), refresh=True)

    def print_round(self, record: RoundRecord) -> None:
        """Print one line about a round that has ended."""
        num_bad = record.num_failed + record.num_lost
        style = "bold red" if num_bad else ("dim" if record.is_warmup else "")
        print_row(
            self._console, _round_name(record.round_index, record.is_warmup), _round_line(record), style
        )

    def print_outcome(
        self, status: str, summary: Mapping[str, Any] | None, message: str | None, directory: RunDirectory
    ) -> None:
        """Print how the job ended: the final table, or the error and where the records are."""
        if summary is not None:
            print_summary(self._console, summary, directory.path, directory.size_bytes())
            return
        word, style = ENDS[status]
        print_line(self._errors, word if message is None else f"{word}: {message}", style)
        print_row(
            self._errors, "records", f"{format_path(directory.path)} ({format_bytes(directory.size_bytes())})"
        )
        if (directory.path / TRACEBACK).exists():
            print_row(self._errors, "traceback", format_path(directory.path / TRACEBACK))

    def _print_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        for label, text in rows:
            print_row(self._console, label, text)

    @contextmanager
    def _showing(self, text: str) -> Iterator[None]:
        """Show a live line at the bottom of a terminal; nothing elsewhere."""
        if not self.is_live:
            yield
            return
        with Live(Text(text), console=self._console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None


class _LastingConsole(Console):
    """A console whose reader may go away (`| head`). The job goes on, and its records are on disk."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)


def _build_console(file: TextIO) -> Console:
    """A console of at most 100 columns, and of 100 where the width is unknown."""
    console = _LastingConsole(file=file, highlight=False)
    is_width_known = console.is_terminal or "COLUMNS" in os.environ
    console.width = min(console.width, MAX_COLUMNS) if is_width_known else MAX_COLUMNS
    return console


def _round_name(round_index: int, is_warmup: bool) -> str:
    return f"warmup {round_index}" if is_warmup else f"round {round_index}"


def _round_line(record: RoundRecord) -> str:
    parts = [
        format_seconds(record.wall_s),
        f"{format_number(record.output_tokens_per_s)} output tokens/s",
        f"{record.num_output_tokens:,} tokens",
        f"{record.num_finished:,} of {record.num_requests:,} requests",
    ]
    if record.accuracy is not None:
        parts.append(f"accuracy {format_share(record.accuracy)}")
    if record.num_failed + record.num_lost:
        parts.append(f"{record.num_failed:,} FAILED, {record.num_lost:,} LOST")
    return ", ".join(parts)
