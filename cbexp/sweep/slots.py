"""The slots in which cells run side by side: one for each visible GPU, one on a machine without."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cbexp.provenance import output_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_DEVICES_OF_A_SLOT = ("auto", "cuda")


def find_slots(devices: Iterable[str]) -> list[dict[str, str]]:
    """Return the environment variables of each slot.

    `devices` are the cells' values of `model.device`. If one names the CPU or a certain GPU, there is only one slot,
    which sees all GPUs: cells on one device would disturb each other's times.
    """
    if any(device not in _DEVICES_OF_A_SLOT for device in devices):
        return [{}]
    gpus = list_visible_gpus()
    # nvidia-smi counts by bus; CUDA counts by speed unless this variable is set.
    by_bus = {} if VISIBLE in os.environ else {ORDER: "PCI_BUS_ID"}
    return [{VISIBLE: gpu, **by_bus} for gpu in gpus] if len(gpus) > 1 else [{}]


def list_visible_gpus() -> list[str]:
    """Return this process's GPUs by `CUDA_VISIBLE_DEVICES`, or by nvidia-smi where it is not set."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        # Like CUDA: what comes after an invalid index is not visible. A GPU that is named twice counts once.
        return list(dict.fromkeys(names[: names.index("-1")] if "-1" in names else names))
    found = output_of("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    return [line.strip() for line in (found or "").splitlines() if line.strip().isdigit()]
