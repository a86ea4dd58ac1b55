"""Which compile mode a driver runs with on this machine: `auto` resolved, what does not work refused."""

from __future__ import annotations

import torch

from cbexp.config import ExperimentConfig, name_settings
from cbexp.engine.settings import check_device
from cbexp.engine.support import require_cpp_compiler
from cbexp.engine.types import COMPILE_MODES, EngineError
from cbexp.errors import ConfigError, NotApplicableError
from cbexp.model.attention_choice import AttentionChoice


def choose_compile_mode(config: ExperimentConfig, attention: AttentionChoice, device: torch.device) -> str:
    """Return the compile mode that the driver runs with: the one asked for, or for auto what suits it on `device`.

    Raises:
        NotApplicableError: what is asked for needs a GPU, or a compiler that is not here.
        ConfigError: the driver does not have the mode.
    """
    mode, kind = config.compile.mode, config.driver_kind
    if mode == "auto":
        mode = kind.auto_mode(device.type, attention.implementation)
    try:
        check_device(config.engine_settings(mode, attention.implementation), device.type)
    except EngineError as error:
        raise NotApplicableError(name_settings(str(error))) from error
    try:
        kind.check_compile_mode(mode)
    except EngineError as error:
        raise ConfigError(str(error)) from error
    if device.type == "cpu" and not kind.own_process and COMPILE_MODES[mode].torch_mode is not None:
        try:
            require_cpp_compiler(mode)
        except EngineError as error:
            raise NotApplicableError(name_settings(str(error))) from error
    return mode
