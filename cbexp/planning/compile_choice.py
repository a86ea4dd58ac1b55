"""How a driver compiles and captures on this machine: `auto` resolved, what does not work refused."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from cbexp.config import CompileConfig
from cbexp.errors import ConfigError, NotApplicableError
from cbexp.model.attention_choice import AttentionChoice
from cbexp.peers.generate import SUPPORTED_COMPILE_MODES as GENERATE_COMPILE_MODES
from cbexp.peers.manager import SUPPORTED_COMPILE_MODES as MANAGER_COMPILE_MODES
from cbexp.peers.manager import resolve_compile_mode

COMPILE_MODES_BY_DRIVER = {
    "sync": ("auto", "eager"),
    "manager": MANAGER_COMPILE_MODES,
    "generate": GENERATE_COMPILE_MODES,
}
MODES_WITH_CUDA_GRAPHS = ("reduce_overhead", "max_autotune", "cuda_graph", "compiled_cuda_graph")
MODES_WITHOUT_COMPILER = ("eager", "cuda_graph")


def choose_compile_mode(mode: str, driver: str, attention: AttentionChoice, device: torch.device) -> str:
    """Return the compile mode that `driver` runs with: `mode`, or for auto what suits it on `device`.

    Raises:
        NotApplicableError: the mode captures CUDA graphs, and `device` is a CPU.
        ConfigError: the driver does not have the mode.
    """
    if mode in MODES_WITH_CUDA_GRAPHS and device.type != "cuda":
        raise NotApplicableError(f"compile.mode={mode} captures CUDA graphs, and the model runs on {device}.")
    allowed = COMPILE_MODES_BY_DRIVER[driver]
    if mode not in allowed:
        raise ConfigError(
            f"compile.mode={mode} does not work with driver={driver} yet: use {' or '.join(allowed)}, "
            "or driver=manager."
        )
    if driver == "manager":
        return resolve_compile_mode(mode, attention.implementation, device)
    return "eager"


def apply_compile_settings(config: CompileConfig, mode: str) -> None:
    """Give torch.compile its recompile limit and, where one is set, its cache folder; both hold for the process."""
    if mode in MODES_WITHOUT_COMPILER:
        return
    torch._dynamo.config.recompile_limit = config.recompile_limit
    if config.cache_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(config.cache_dir).expanduser().absolute())
