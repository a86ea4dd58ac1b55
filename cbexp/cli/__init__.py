"""The command line: checks every job, hands them to Hydra, and ends with one exit code."""
