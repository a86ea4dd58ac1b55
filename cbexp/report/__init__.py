"""Reports on finished, failed and half-written runs: tables, files, an HTML page, and a verdict for CI."""

from cbexp.report.errors import ReportError
from cbexp.report.loading import load_runs
from cbexp.report.rows import run_rows
from cbexp.report.run import Run
from cbexp.report.table import format_table
from cbexp.report.terminal import format_report

__all__ = ["ReportError", "Run", "format_report", "format_table", "load_runs", "run_rows"]
