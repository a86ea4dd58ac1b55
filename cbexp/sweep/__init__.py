"""Sweeps: cells in processes of their own, their records, and resuming. Loads neither torch nor Hydra."""
