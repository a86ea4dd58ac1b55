"""How much of a GPU is in use, as nvidia-smi tells it: asking CUDA would take memory of the GPU in this process."""

from __future__ import annotations

import subprocess

MIB = 2**20
TIMEOUT_S = 20
COMMAND = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i")


def read_used_bytes(gpu: str) -> int | None:
    """Bytes in use on `gpu` (an index or UUID) by all processes; None where nvidia-smi cannot tell."""
    try:
        done = subprocess.run([*COMMAND, gpu], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return int(done.stdout) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
