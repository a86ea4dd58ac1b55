"""What a job prints, within 100 columns: its plan, its progress, and how it ended."""

from cbexp.display.progress import ProgressDisplay

__all__ = ["ProgressDisplay"]
