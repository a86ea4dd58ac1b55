"""Logging to Weights & Biases, one run for each job or sweep. Its failures never end a job."""

from cbexp.tracking.credentials import refuse_impossible_online
from cbexp.tracking.objective import OBJECTIVE, compute_objective
from cbexp.tracking.start import start_tracking
from cbexp.tracking.sweep_run import log_sweep
from cbexp.tracking.tracker import Tracker

__all__ = [
    "OBJECTIVE",
    "Tracker",
    "compute_objective",
    "log_sweep",
    "refuse_impossible_online",
    "start_tracking",
]
