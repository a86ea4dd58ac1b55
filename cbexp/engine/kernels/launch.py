"""Programmatic dependent launch: a kernel starts while its predecessor drains."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Compute capability from which a kernel can wait for its predecessor on the device.
MIN_CAPABILITY = (9, 0)


@cache
def _supports_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` may be launched before their predecessor has ended."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the constexpr that the kernel reads, and the launch attribute where it holds."""
    if _supports_dependent_launch(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@triton.jit
def release_successor(DEPENDENT: tl.constexpr):
    """Let the next kernel start as soon as every program of this one has."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    """Wait until all that earlier kernels wrote can be read; weights alone may be touched before."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
