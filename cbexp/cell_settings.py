"""The settings that are not part of a cell's identity: whatever their values, it is the same cell."""

from __future__ import annotations

# How the cells of a sweep are run.
SWEEP_SETTINGS = ("isolation", "cell_timeout_s", "resume", "resume_force")
# Those, and where results and logs go.
SETTINGS_OUTSIDE_A_CELL = (*SWEEP_SETTINGS, "tracking", "name", "stats_path", "dry_run")
