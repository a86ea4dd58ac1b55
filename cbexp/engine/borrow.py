"""Borrows a model from its owner for the length of a drive, and gives it back as it was."""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.shadow import Shadow
from cbexp.engine.support import find_parameter_problem
from cbexp.engine.types import EngineError
from cbexp.engine.wrapped_forward import plain_forward

_CHECKPOINTING = "gradient_checkpointing"
# Hooks on the embedding that make its output require gradients, as transformers and PEFT call them.
_INPUT_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
# TRL's, beside a tied head that it has cast to float32: makes the embedding's output what it was before that. Beside a
# copy of the embedding it would undo the copy's dtype.
_EMBEDDING_HOOK = "cast_outputs_to_original_dtype"
ABSENT: Any = object()
# Held by the thread that has the model; one thread may hold it several times.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@contextmanager
def exclusive_use(model: PreTrainedModel) -> Iterator[None]:
    """Keep other threads from borrowing the model while the body runs; one thread may nest this.

    Raises `EngineError`, with nothing changed, when another thread has it.
    """
    with _locks_guard:
        lock = _locks.setdefault(model, threading.RLock())
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
def borrowed_for_inference(
    model: PreTrainedModel, attn_implementation: str, shadow: Shadow | None = None
) -> Iterator[Borrow]:
    """Run the body in eval mode, without gradients, in the model's own dtype, with the attention of that name.

    With `shadow`, copies stand in the place of float32 weights whose owner computes under autocast: in the body the
    model's own dtype is theirs. They are refreshed whenever the model is taken.

    Modes are flipped module by module and put back one by one: a caller may keep parts of a model in eval mode.
    Inference mode is left, since the cache is written by drives inside and outside of it. Also out of the way are
    flags of gradient checkpointing, to which compiled programs would be bound; autocast and TRL's loss around the
    forward; hooks that make inputs require gradients; and what the caller has compiled. Each config is a copy while
    borrowed, since other models may share it.

    Raises `EngineError` when another thread has the model, see `exclusive_use`, or when its weights are elsewhere.
    """
    with exclusive_use(model):
        borrow = Borrow(model, attn_implementation, shadow)
        try:
            borrow.take()
            yield borrow
        finally:
            borrow.give_back()


class Borrow:
    """A model that is taken and given back, several times over if need be."""

    def __init__(
        self, model: PreTrainedModel, attn_implementation: str, shadow: Shadow | None = None
    ) -> None:
        self._model = model
        self._attention = attn_implementation
        self._shadow = shadow
        self._changes = Changes()
        self._modes = ExitStack()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """The owner has the model in the body, and may change it. After an exception there it is not taken again."""
        self.give_back()
        yield
        self.take()

    def take(self) -> None:
        """Prepare the model, as it is now; it must not be taken. `EngineError`: its weights are elsewhere."""
        problem = find_parameter_problem(next(self._model.parameters()))  # of the others too, most likely
        if problem is not None:
            raise EngineError(f"This {type(self._model).__name__} cannot be driven as it is now: {problem}.")
        with deferring_interrupts():
            # Before autocast is off.
            dtype = None if self._shadow is None else self._shadow.find_dtype()
            self._modes.enter_context(torch.inference_mode(False))
            self._modes.enter_context(torch.no_grad())
            self._modes.enter_context(torch.autocast(device_type=self._model.device.type, enabled=False))
            configs: dict[int, PreTrainedConfig] = {}
            # Only where it was imported can something be compiled, and importing it takes seconds.
            compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
            modules = list_modules(self._model)
            dropped = _INPUT_GRADIENT_HOOKS if dtype is None else (*_INPUT_GRADIENT_HOOKS, _EMBEDDING_HOOK)
            for module in modules:
                self._prepare(module, configs, dropped)
                if compiler is not None and module._modules:
                    self._unwrap_children(module._modules, compiler.OptimizedModule)
            if self._shadow is not None:
                for parameters, name, copied in self._shadow.refresh(modules, dtype):
                    self._changes.set(parameters, name, copied)

    def give_back(self) -> None:
        """Undo all that `take` has done. Safe to call twice."""
        with deferring_interrupts():
            self._changes.undo()
            self._modes.close()

    def _prepare(
        self, module: nn.Module, configs: dict[int, PreTrainedConfig], dropped_hooks: tuple[str, ...]
    ) -> None:
        attributes = module.__dict__
        if attributes.get("training"):
            self._changes.set(attributes, "training", False)
        if _CHECKPOINTING in attributes:
            # As if never set: a program is bound to whether the module has the flag of its class alone.
            value = ABSENT if hasattr(type(module), _CHECKPOINTING) else False
            self._changes.set(attributes, _CHECKPOINTING, value)
        config = attributes.get("config")
        if isinstance(config, PreTrainedConfig):
            if id(config) not in configs:
                configs[id(config)] = _with_attention(config, self._attention)
            self._changes.set(attributes, "config", configs[id(config)])
        if attributes.get("_compiled_call_impl") is not None:
            self._changes.set(attributes, "_compiled_call_impl", ABSENT)
        if "forward" in attributes:
            forward = plain_forward(module)
            self._changes.set(attributes, "forward", ABSENT if forward is None else forward)
        hooks = module._forward_hooks
        if hooks:
            kept = OrderedDict(
                (key, hook)
                for key, hook in hooks.items()
                if getattr(hook, "__name__", None) not in dropped_hooks
            )
            if len(kept) < len(hooks):
                self._changes.set(attributes, "_forward_hooks", kept)

    def _unwrap_children(self, children: dict[str, Any], compiled_type: Any) -> None:
        for name, child in children.items():
            inner: Any = child
            while isinstance(inner, compiled_type):
                inner = inner._orig_mod
            if inner is not child:
                self._changes.set(children, name, inner)


class Changes:
    """Entries of dictionaries, mostly of modules' attributes, that are other ones for a while.

    Not by getattr and setattr: a model has hundreds of modules, and all this runs around every `on_step`.
    """

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def set(self, namespace: dict[str, Any], key: str, value: Any) -> None:
        """Set an entry, or remove it (`ABSENT`)."""
        self._before.append((namespace, key, namespace.get(key, ABSENT)))
        if value is ABSENT:
            namespace.pop(key, None)
        else:
            namespace[key] = value

    def undo(self) -> None:
        """Put everything back, the last change first. Safe to call twice."""
        while self._before:
            namespace, key, before = self._before[-1]
            if before is ABSENT:
                namespace.pop(key, None)
            else:
                namespace[key] = before
            self._before.pop()


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Every module of the model once, in an order that depends on its structure alone; faster than `modules()`."""
    found: dict[nn.Module, None] = {}
    pending: list[nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is not None and module not in found:
            found[module] = None
            if children := module._modules:
                pending += children.values()
    return list(found)


def read_versions(model: nn.Module) -> list[tuple[int, int]]:
    """What changes when a parameter is written in place or replaced; not when it is written through `.data`."""
    return [
        (id(parameter), 0 if parameter.is_inference() else parameter._version)
        for module in list_modules(model)
        for parameter in module._parameters.values()
        if parameter is not None
    ]


def _with_attention(config: PreTrainedConfig, attn_implementation: str) -> PreTrainedConfig:
    copied = copy.copy(config)
    # Not by the property, which would write to configs inside of this one, and they are still the caller's.
    copied._attn_implementation_internal = attn_implementation
    return copied
