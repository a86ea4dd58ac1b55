"""Where cells run side by side: one on each visible GPU, one at a time without any."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cbexp.provenance import output_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_DEVICES_OF_A_SLOT = ("auto", "cuda")


def find_slots(devices: Iterable[str]) -> list[dict[str, str]]:
    """Return the environment variables of each place where a cell can run.

    A setting `model.device` (one of `devices`) that names the CPU or a certain GPU leaves one place that sees them
    all: cells on one device would disturb each other's times.
    """
    if any(device not in _DEVICES_OF_A_SLOT for device in devices):
        return [{}]
    gpus = list_visible_gpus()
    # nvidia-smi counts by bus, CUDA by speed unless it is told.
    by_bus = {} if VISIBLE in os.environ else {ORDER: "PCI_BUS_ID"}
    return [{VISIBLE: gpu, **by_bus} for gpu in gpus] if len(gpus) > 1 else [{}]


def list_visible_gpus() -> list[str]:
    """Return the GPUs of this process as `CUDA_VISIBLE_DEVICES` names them; asks nvidia-smi where it is not set."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        # As CUDA does: what comes after an invalid index is not visible. Twice the same is one GPU all the same.
        return list(dict.fromkeys(names[: names.index("-1")] if "-1" in names else names))
    found = output_of("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    return [line.strip() for line in (found or "").splitlines() if line.strip().isdigit()]
