"""What a report refuses to do."""

from cbexp.errors import CbexpError


class ReportError(CbexpError):
    """A report cannot be made as asked: no runs, an unknown baseline, a comparison of different work."""
