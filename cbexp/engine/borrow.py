"""Borrows a model from its owner for the length of a drive, and gives it back as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.types import EngineError

_CHECKPOINTING = "gradient_checkpointing"
# Held by the thread that has the model; one thread may hold it several times.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@contextmanager
def exclusive_use(model: PreTrainedModel) -> Iterator[None]:
    """Keep other threads from borrowing the model while the body runs; one thread may nest this.

    Raises `EngineError`, with nothing changed, when another thread has it.
    """
    lock = _lock_of(model)
    is_ours = False
    try:
        with deferring_interrupts():
            is_ours = lock.acquire(blocking=False)
        if not is_ours:
            raise EngineError(
                f"This {type(model).__name__} is in use by a driver in another thread, which runs it in eval mode "
                "and with another attention: wait until that is done, or give each thread a model of its own."
            )
        yield
    finally:
        if is_ours:
            lock.release()


@contextmanager
def borrowed_for_inference(model: PreTrainedModel, attn_implementation: str) -> Iterator[None]:
    """Run the body in eval mode, without gradients, in the model's own dtype, with the attention of that name.

    Modes are flipped module by module and put back one by one: a caller may keep parts of a model in eval mode.
    Inference mode is left, since the cache is written by drives inside and outside of it. Flags of gradient
    checkpointing are out of the way as well: nothing reads them here, but compiled programs are bound to them.

    Raises `EngineError` when another thread has the model, see `exclusive_use`.
    """
    with exclusive_use(model), _prepared_for_inference(model, attn_implementation):
        yield


@contextmanager
def _prepared_for_inference(model: PreTrainedModel, attn_implementation: str) -> Iterator[None]:
    in_training = [module for module in model.modules() if module.training]
    checkpointing = [(m, vars(m)[_CHECKPOINTING]) for m in model.modules() if _CHECKPOINTING in vars(m)]
    attention_before = [(config, config._attn_implementation) for config in _configs(model)]
    autocast_off = torch.autocast(device_type=model.device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast_off:
        try:
            for module in in_training:
                module.training = False
            for module, _ in checkpointing:
                _clear_checkpointing(module)
            # Not by `set_attn_implementation`, which would look for a flash package.
            for config, _ in attention_before:
                config._attn_implementation = attn_implementation
            yield
        finally:
            with deferring_interrupts():
                for module in in_training:
                    module.training = True
                for module, value in checkpointing:
                    setattr(module, _CHECKPOINTING, value)
                for config, name in attention_before:
                    config._attn_implementation = name


def _lock_of(model: PreTrainedModel) -> threading.RLock:
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


def _clear_checkpointing(module: nn.Module) -> None:
    """As if it had never been set, since a program is bound to whether the module has the flag of its class alone."""
    if hasattr(type(module), _CHECKPOINTING):
        delattr(module, _CHECKPOINTING)
    else:
        setattr(module, _CHECKPOINTING, False)


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config object in the model: most modules share the model's, some have a copy of their own."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())
