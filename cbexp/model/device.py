"""Resolves the device and dtype of a model, and refuses those that this machine lacks."""

from __future__ import annotations

import torch

from cbexp.errors import ModelError

FIRST_CAPABILITY_WITH_BFLOAT16 = (8, 0)
DTYPES_BY_NAME = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(name: str) -> torch.device:
    """Return the device `name` (auto, cpu, cuda or cuda:INDEX). auto is the current GPU, or else the CPU.

    Raises:
        ModelError: the name is unknown, or this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise ModelError(f"model.device={name!r} is not supported. Allowed: auto, cpu, cuda, cuda:INDEX.")
    if kind == "cpu":
        return torch.device("cpu")
    return _resolve_cuda(name, int(index) if index else None)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype `name`. auto is float32 on a CPU, bfloat16 on a GPU that has it, else float16.

    Raises:
        ModelError: the name is bfloat16 and the GPU only emulates it.
    """
    has_bfloat16 = device.type == "cpu" or _capability(device) >= FIRST_CAPABILITY_WITH_BFLOAT16
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if has_bfloat16 else torch.float16
    if name == "bfloat16" and not has_bfloat16:
        found = ".".join(map(str, _capability(device)))
        raise ModelError(
            f"model.dtype=bfloat16: {device} has compute capability {found} and would only emulate it (8.0 is needed). "
            "Use model.dtype=float16, float32 or auto."
        )
    return DTYPES_BY_NAME[name]


def _resolve_cuda(name: str, index: int | None) -> torch.device:
    if not torch.cuda.is_available():
        reason = (
            "PyTorch finds no usable NVIDIA GPU or driver"
            if torch.version.cuda
            else f"this PyTorch ({torch.__version__}) is built without CUDA"
        )
        raise ModelError(f"model.device={name}: {reason}. Use model.device=cpu or auto.")
    num_devices = torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    if index >= num_devices:
        raise ModelError(
            f"model.device={name}: this machine has {num_devices} CUDA device(s), cuda:0 to cuda:{num_devices - 1}."
        )
    return torch.device("cuda", index)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
