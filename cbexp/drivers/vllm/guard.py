"""Leads vLLM's process group and ends it when the process that started both is gone, however that went.

Run by its path with that process's id, and its stdin a pipe that only that process holds open. Nothing else runs here,
so that neither a worker that never gets to run Python nor one that holds the interpreter's lock can outlive its run;
the group has the processes that vLLM starts too.
"""

from __future__ import annotations

import os
import select
import signal
import sys

PARENT_CHECK_INTERVAL_S = 1.0
# Some launchers send these to every process. The guard is still needed where the worker or its parent outlives them.
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Wait for the parent's end, which the pipe tells at once unless another process has inherited its other end."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent_pid = int(sys.argv[1])
    while os.getppid() == parent_pid:
        if select.select([0], [], [], PARENT_CHECK_INTERVAL_S)[0]:
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
