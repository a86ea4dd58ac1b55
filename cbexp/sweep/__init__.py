"""Sweeps: cells in processes of their own, their records, and what is left to run; loads neither torch nor Hydra."""
