"""The surroundings of compiled decode steps: what torch.compile is told, what it may not see, how its errors read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.operators import declare_operators
from cbexp.engine.types import EngineError

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class CompileOptions:
    """How a step is compiled.

    `mode` is the name in messages, `torch_mode` torch.compile's. `recompile_limit` None: PyTorch's own.
    `is_batch_dynamic` False: each batch size is a program of its own.
    """

    mode: str
    torch_mode: str
    recompile_limit: int | None
    is_batch_dynamic: bool


def compile_alone(function: _Function, options: CompileOptions) -> _Function:
    """Compile a copy of `function` with a code object of its own.

    Programs and the recompile limit belong to a code object: runners do not share them, and they go with the runner.
    """
    declare_operators()
    copied = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return cast(_Function, torch.compile(copied, fullgraph=True, mode=options.torch_mode))


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let one program serve every size of `dim` above one; PyTorch makes constants of 0 and 1."""
    if tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)


@contextmanager
def compiler_session(
    options: CompileOptions, bucket: int, parameters: Sequence[nn.Parameter]
) -> Iterator[None]:
    """Run compiled steps of `bucket` rows in the body; `EngineError` for what cannot be compiled.

    `parameters` are frozen meanwhile: programs are bound to which of them require gradients.
    """
    # The sizes of another engine's cache in the same process must not make those of this one dynamic.
    settings: dict[str, Any] = {"automatic_dynamic_shapes": False}
    if options.recompile_limit is not None:
        settings["recompile_limit"] = options.recompile_limit
    with (
        torch.no_grad(),
        _frozen(parameters),
        torch._dynamo.config.patch(settings),
        _named_errors(options, bucket),
    ):
        yield


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        with deferring_interrupts():
            for parameter in trained:
                parameter.requires_grad_(True)


@contextmanager
def _named_errors(options: CompileOptions, bucket: int) -> Iterator[None]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # late: it takes seconds

    failure = f"{options.mode} cannot compile the decode step of {bucket} rows: "
    try:
        yield
    except FailOnRecompileLimitHit as error:
        limit = options.recompile_limit or torch._dynamo.config.recompile_limit
        raise EngineError(f"{failure}recompile_limit={limit} programs are there already.") from error
    except TorchDynamoException as error:
        raise EngineError(failure + " ".join(str(error).split("\n", 2)[:2])) from error
