"""How a driver compiles, captures and batches on this machine: `auto` resolved, what does not work refused."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from cbexp.config import CompileConfig, check_region
from cbexp.engine.support import find_cpp_compiler_problem
from cbexp.engine.types import ENGINE_ATTENTION, BatchShape, CompileMode, CompileRegion, Fusion
from cbexp.errors import ConfigError, NotApplicableError
from cbexp.model.attention_choice import AttentionChoice
from cbexp.peers.generate import SUPPORTED_COMPILE_MODES as GENERATE_COMPILE_MODES
from cbexp.peers.manager import SUPPORTED_COMPILE_MODES as MANAGER_COMPILE_MODES
from cbexp.peers.manager import resolve_compile_mode
from cbexp.peers.vllm_driver import AUTO_COMPILE_MODES as VLLM_AUTO_COMPILE_MODES
from cbexp.peers.vllm_driver import SUPPORTED_COMPILE_MODES as VLLM_COMPILE_MODES

# What `auto` is for the synchronous driver on a GPU: the fastest mode measured, README "Measured".
BEST_MODE_ON_CUDA = "cuda_graph"
MODES_WITH_CUDA_GRAPHS = ("reduce_overhead", "max_autotune", "cuda_graph", "compiled_cuda_graph")
MODES_WITHOUT_COMPILER = ("eager", "cuda_graph")
# compile.mode -> the engine's compile_mode (torch.compile's name of it) and whether it captures the forward itself.
ENGINE_MODES: dict[str, tuple[CompileMode | None, bool]] = {
    "eager": (None, False),
    "default": ("default", False),
    "reduce_overhead": ("reduce-overhead", False),
    "max_autotune": ("max-autotune", False),
    "max_autotune_no_cudagraphs": ("max-autotune-no-cudagraphs", False),
    "cuda_graph": (None, True),
    "compiled_cuda_graph": ("default", True),
}
COMPILE_MODES_BY_PEER = {
    "manager": MANAGER_COMPILE_MODES,
    "generate": GENERATE_COMPILE_MODES,
    "vllm": VLLM_COMPILE_MODES,
}


@dataclass(frozen=True)
class DecodePlan:
    """How the engine decodes. `buckets` None: powers of two up to the largest batch, which is included."""

    compile_region: CompileRegion
    fusion: Fusion
    batch_shape: BatchShape
    buckets: tuple[int, ...] | None
    max_burst: int
    self_check: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self) | {"buckets": None if self.buckets is None else list(self.buckets)}


def choose_compile_mode(mode: str, driver: str, attention: AttentionChoice, device: torch.device) -> str:
    """Return the compile mode that `driver` runs with: `mode`, or for auto what suits it on `device`.

    Raises:
        NotApplicableError: the mode captures CUDA graphs on a CPU, or compiles for a CPU where no compiler is.
        ConfigError: the driver does not have the mode, or not with this attention.
    """
    if mode in MODES_WITH_CUDA_GRAPHS and device.type != "cuda":
        raise NotApplicableError(f"compile.mode={mode} captures CUDA graphs, and the model runs on {device}.")
    resolved = (
        _choose_for_sync(mode, attention, device)
        if driver == "sync"
        else _choose_for_peer(mode, driver, attention, device)
    )
    if device.type == "cpu" and driver != "vllm" and resolved not in MODES_WITHOUT_COMPILER:
        _require_cpp_compiler(resolved)
    return resolved


def plan_decode(
    config: CompileConfig, mode: str, attention: AttentionChoice, device: torch.device
) -> DecodePlan | None:
    """Return how the synchronous driver decodes in the resolved compile mode `mode`; None: by transformers' steps.

    Raises:
        ConfigError: the mode cannot compile by layers, or transformers' steps are to be fused.
        NotApplicableError: fused layers need a GPU, and `device` is none.
    """
    check_region(config.region, mode)
    if config.fusion == "layers" and device.type != "cuda":
        raise NotApplicableError(
            f"compile.fusion=layers needs a CUDA device, and the model runs on {device}: use auto or projections."
        )
    if attention.implementation != ENGINE_ATTENTION:
        if config.fusion not in ("auto", "none"):
            raise ConfigError(_describe_foreign_attention("compile.fusion", config.fusion, "none", attention))
        return None
    return DecodePlan(
        compile_region=cast(CompileRegion, config.region),  # these three are checked by the schema
        fusion=cast(Fusion, config.fusion),
        batch_shape=cast(BatchShape, config.batch_shape),
        buckets=None if config.buckets is None or config.batch_shape == "natural" else tuple(config.buckets),
        max_burst=config.max_burst,
        self_check=config.self_check,
    )


def _choose_for_sync(mode: str, attention: AttentionChoice, device: torch.device) -> str:
    if attention.implementation != ENGINE_ATTENTION:
        if mode not in ("auto", "eager"):
            raise ConfigError(_describe_foreign_attention("compile.mode", mode, "eager", attention))
        return "eager"
    if mode == "auto":
        return BEST_MODE_ON_CUDA if device.type == "cuda" else "eager"
    return mode


def _describe_foreign_attention(key: str, value: str, only: str, attention: AttentionChoice) -> str:
    return (
        f"{key}={value} does not work with driver=sync and model.attn_implementation={attention.implementation}, which "
        f"runs transformers' own forward: use {key}={only}, or model.attn_implementation={ENGINE_ATTENTION} (auto)."
    )


def _choose_for_peer(mode: str, driver: str, attention: AttentionChoice, device: torch.device) -> str:
    allowed = COMPILE_MODES_BY_PEER[driver]
    if mode not in allowed:
        raise ConfigError(
            f"compile.mode={mode} does not work with driver={driver}: use {' or '.join(allowed)}, or driver=sync."
        )
    if driver == "vllm":
        return VLLM_AUTO_COMPILE_MODES[device.type] if mode == "auto" else mode
    return resolve_compile_mode(mode, attention.implementation, device) if driver == "manager" else "eager"


def _require_cpp_compiler(mode: str) -> None:
    problem = find_cpp_compiler_problem()
    if problem is not None:
        raise NotApplicableError(
            f"compile.mode={mode} compiles C++ for the CPU, and {problem}: install g++ or name one in the environment "
            "variable CXX, or use compile=eager."
        )
