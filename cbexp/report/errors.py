"""The error of reports."""

from cbexp.errors import CbexpError


class ReportError(CbexpError):
    """A report cannot be made as asked: no runs, an unknown baseline, a ratio between different workloads."""
