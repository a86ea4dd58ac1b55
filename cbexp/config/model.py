"""Settings of the model and its adapter."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from cbexp.checks import check_at_least, check_choice, check_is_set
from cbexp.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
INITS = ("pretrained", "random")
BUILTIN_PREFIX = "builtin:"
ADAPTER_KINDS = ("none", "lora")


@dataclass
class ModelConfig:
    """What generates. `architecture` holds transformers' own config values and serves `init=random` alone.

    `num_threads`: threads of one operation on a CPU; None takes PyTorch's default, a thread a core.
    """

    name: str = "hf"
    name_or_path: str | None = None
    revision: str | None = None
    init: str = "pretrained"
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    num_threads: int | None = None
    default_max_new_tokens: int = 512
    architecture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("model.init", self.init, INITS)
        check_choice("model.dtype", self.dtype, DTYPES)
        check_at_least("model.default_max_new_tokens", self.default_max_new_tokens, 1)
        check_at_least("model.num_threads", self.num_threads, 1)
        if self.num_threads is not None and self.num_threads > (os.cpu_count() or 1):
            raise ConfigError(
                f"model.num_threads={self.num_threads} is too large: this machine has {os.cpu_count()} cores."
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(
                f"model.device={self.device} is not a device. Allowed: auto, cpu, cuda, cuda:INDEX."
            )
        if self.init == "pretrained":
            check_is_set(
                "model.name_or_path",
                self.name_or_path,
                "give a hub id or a folder, as in model.name_or_path=org/name",
            )
        elif not self.architecture:
            raise ConfigError(
                f"model.init=random needs model.architecture, and model={self.name} has none: "
                "choose a model whose yaml describes its architecture, or write one."
            )
        if self.revision is not None and self.is_builtin:
            raise ConfigError(
                f"model.revision={self.revision} has no effect: {self.name_or_path} comes with cbexp and has no "
                "revisions. Remove it."
            )

    @property
    def is_builtin(self) -> bool:
        """Whether the weights come with the package (`builtin:tiny`)."""
        return (self.name_or_path or "").startswith(BUILTIN_PREFIX)


@dataclass
class AdapterConfig:
    """A LoRA adapter: a PEFT folder or hub id in `path`, or, with `path` unset, a random one of rank `rank`."""

    kind: str = "none"
    path: str | None = None
    revision: str | None = None
    rank: int = 16
    alpha: int = 32
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    merged: bool = False

    def __post_init__(self) -> None:
        check_choice("adapter.kind", self.kind, ADAPTER_KINDS)
        check_at_least("adapter.rank", self.rank, 1)
        check_at_least("adapter.alpha", self.alpha, 1)
        if not self.target_modules:
            raise ConfigError(
                "adapter.target_modules=[] names no module: give at least one, as in [q_proj,v_proj]."
            )
