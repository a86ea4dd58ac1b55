"""What a person sees, within 100 columns and without a terminal too: progress, and how the job ended."""

from cbexp.display.progress import ProgressDisplay

__all__ = ["ProgressDisplay"]
