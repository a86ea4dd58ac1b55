"""The ways to generate, by name, and what each of them can do: data that may be asked for before anything is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from cbexp.engine.rollout_driver import RolloutDriver
from cbexp.engine.settings import DECODE_SETTINGS
from cbexp.engine.types import COMPILE_MODES, ENGINE_ATTENTION, CBSyncConfig, EngineError, Sampling

# Of the engine's own decode steps, whatever compiles them.
STEP_SETTINGS = tuple(name for name in DECODE_SETTINGS if name not in ("compile_mode", "recompile_limit"))

# The settings that not every driver reads. All others of `cache`, `compile`, `driver` and `sampling` every one does.
_MEMORY = frozenset(("cache.max_memory_fraction",))
_CACHE = _MEMORY | frozenset(f"cache.{name}" for name in ("num_tokens", "page_size", "block_sharing"))
_ORDINARY_STEPS = frozenset(("cache.max_batch_tokens", "cache.scheduler"))
_DECODE_STEPS = frozenset(f"compile.{name}" for name in STEP_SETTINGS)
_COMPILER = frozenset(("compile.recompile_limit",))
_PADDING = frozenset(("sampling.pad_token_id",))
_WORKER = frozenset(f"driver.{name}" for name in ("python", "pythonpath", "start_timeout_s", "request_times"))
VLLM_MIN_TEMPERATURE = 0.01
_DROPPED = "whose batching has no such step"
_NO_PADDING = {"sampling.pad_token_id": "which pads no prompt"}


class OwnProcess(Protocol):
    """A driver whose work is done in another process, which times it; its memory is none of ours."""

    @property
    def round_span_s(self) -> tuple[float, float]:
        """Start and end of the last drive on the `time.perf_counter` clock, in seconds."""

    @property
    def device_bytes(self) -> int | None:
        """What it has taken of the device; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class DriverKind:
    """What a driver can do.

    `module` has its `build`, a function of `DriverInputs`. `auto_mode`: the compile mode that `auto` means, by the kind
    of device and the attention. `reads`: which of the settings that not every driver reads; `why_not` has the reason
    why it does not read a setting, or those of a group.

    `cannot_sample`: settings of `sampling` that it refuses, each with the reason as half a sentence; `differs` gives
    such a reason for values, or combinations, that it would sample otherwise than asked.

    `own_attention`: an attention that no other driver has; `has_other_attentions`: it runs transformers' too.
    `is_best_with_flash`: it captures graphs with a flash attention alone. `page_sizes` in tokens: without block sharing
    and with it. `own_process`: it loads the weights itself, in a process that times its own rounds; the driver is an
    `OwnProcess`. `has_kernels`: on a GPU it compiles kernels of its own, whatever the mode.
    """

    name: str
    module: str
    compile_modes: tuple[str, ...]
    auto_mode: Callable[[str, str], str]
    reads: frozenset[str]
    why_not: Mapping[str, str] = field(default_factory=dict)
    cannot_sample: Mapping[str, str] = field(default_factory=dict)
    differs: Callable[[Sampling], Mapping[str, str]] = lambda _: {}
    own_attention: str | None = None
    has_other_attentions: bool = True
    is_best_with_flash: bool = False
    has_paged_cache: bool = True
    page_sizes: tuple[int, int] = (CBSyncConfig.page_size, 32)
    own_process: bool = False
    has_kernels: bool = False
    takes_adapter: bool = True

    def build(self, inputs: Any) -> RolloutDriver:
        """Return the driver; imports what it needs only now."""
        return cast(RolloutDriver, importlib.import_module(self.module).build(inputs))

    def check_compile_mode(self, mode: str) -> None:
        """Raise `EngineError` unless the driver has the compile mode."""
        if mode in self.compile_modes:
            return
        choices = " or ".join(("auto", *self.compile_modes))
        other = next((f", or driver={kind.name}" for kind in _KINDS if mode in kind.compile_modes), "")
        raise EngineError(f"compile.mode={mode} does not work with driver={self.name}: use {choices}{other}.")

    def check_sampling(self, sampling: Sampling, logprobs: bool) -> None:
        """Raise `EngineError`, naming the setting, unless the driver samples the distribution that is asked for."""
        values = sampling.in_effect | ({"logprobs": True} if logprobs else {})
        reasons = {**self.cannot_sample, **self.differs(sampling)}
        for name, value in values.items():
            if name in reasons:
                raise EngineError(
                    f"sampling.{name}={value} does not work with driver={self.name}, {reasons[name]}: leave it out, or "
                    "use driver=sync."
                )

    def find_unread(self) -> dict[str, str]:
        """Return the settings that the driver does not read, each with the reason as half a sentence."""
        unread = frozenset.union(*(kind.reads for kind in _KINDS)) - self.reads
        return {setting: f"driver={self.name}{self._explain(setting)}" for setting in unread}

    def process_of(self, driver: RolloutDriver) -> OwnProcess | None:
        """Return a driver of this kind as what times its own rounds; None where our clock does."""
        return cast(OwnProcess, driver) if self.own_process else None

    def _explain(self, setting: str) -> str:
        reason = self.why_not.get(setting) or self.why_not.get(setting.split(".")[0])
        if reason is not None:
            return f", {reason}"
        readers = [f"driver={kind.name}" for kind in _KINDS if setting in kind.reads]
        return f": it is a setting of {' and '.join(readers)}"


def _auto_for_sync(device_type: str, attention: str) -> str:
    """On a GPU the fastest mode measured; transformers' own steps are not compiled."""
    return "cuda_graph" if device_type == "cuda" and attention == ENGINE_ATTENTION else "eager"


def _differs_in_vllm(sampling: Sampling) -> dict[str, str]:
    """Of min-p and top-p, vLLM applies the other one first; and it has bounds of its own."""
    reasons = {}
    if sampling.min_p > 0 and sampling.top_p < 1:
        reasons["min_p"] = f"which applies it before sampling.top_p={sampling.top_p} and not after it"
    if sampling.top_p == 0:
        reasons["top_p"] = "which takes more than 0"
    if 0 < sampling.temperature < VLLM_MIN_TEMPERATURE:
        reasons["temperature"] = f"which raises it to {VLLM_MIN_TEMPERATURE}"
    return reasons


def _auto_for_manager(device_type: str, attention: str) -> str:
    """Upstream's own advice."""
    return "cuda_graph" if device_type == "cuda" and "flash" in attention else "eager"


_KINDS = (
    DriverKind(
        name="sync",
        module="cbexp.drivers.sync",
        compile_modes=tuple(COMPILE_MODES),
        auto_mode=_auto_for_sync,
        reads=_CACHE | _ORDINARY_STEPS | _DECODE_STEPS | _COMPILER,
        why_not=_NO_PADDING,
        own_attention=ENGINE_ATTENTION,
        has_kernels=True,
    ),
    DriverKind(
        name="manager",
        module="cbexp.drivers.manager",
        compile_modes=tuple(COMPILE_MODES),
        auto_mode=_auto_for_manager,
        reads=_CACHE | _ORDINARY_STEPS,
        why_not=_NO_PADDING
        | {
            "compile.recompile_limit": "which compiles on a thread of its own, where PyTorch's own limit holds"
        },
        cannot_sample=dict.fromkeys(
            ("repetition_penalty", "min_new_tokens", "stop_strings", "suppress_token_ids"), _DROPPED
        ),
        is_best_with_flash=True,
    ),
    DriverKind(
        name="generate",
        module="cbexp.drivers.generate",
        compile_modes=("eager",),
        auto_mode=lambda _device_type, _attention: "eager",
        reads=_MEMORY | _PADDING,
        why_not={"cache": "which has no paged cache", "compile.recompile_limit": "which compiles nothing"},
        cannot_sample={"logprobs": "which would keep the logits of every step for them"},
        has_paged_cache=False,
    ),
    DriverKind(
        name="vllm",
        module="cbexp.drivers.vllm.driver",
        compile_modes=("eager", "default", "cuda_graph", "compiled_cuda_graph"),
        # What vLLM runs where nothing of `compile` is set.
        auto_mode=lambda device_type, _: "compiled_cuda_graph" if device_type == "cuda" else "default",
        reads=_CACHE | _WORKER,
        why_not=_NO_PADDING
        | {"cache": "which decides itself", "compile.recompile_limit": "which compiles itself"},
        cannot_sample={"suppress_token_ids": "which has a bias for them, and no ban"},
        differs=_differs_in_vllm,
        own_attention="vllm",
        has_other_attentions=False,
        page_sizes=(16, 16),
        own_process=True,
        takes_adapter=False,
    ),
)
DRIVERS: dict[str, DriverKind] = {kind.name: kind for kind in _KINDS}
