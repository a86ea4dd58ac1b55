"""The settings that are no part of what a cell is: with any value of them it does the same work and is known again."""

from __future__ import annotations

# How the cells of a sweep are run, which changes nothing of what one of them does.
SWEEP_SETTINGS = ("isolation", "cell_timeout_s", "resume", "resume_force")
# Those, and where results go and who hears of them.
SETTINGS_OUTSIDE_A_CELL = (*SWEEP_SETTINGS, "tracking", "name", "stats_path", "dry_run")
