"""Makes unchanged model code compute q/k/v, and gate/up, as one matrix product.

While installed, each projection's `nn.Linear` answers with its columns of a product that is computed at the first call
and kept for the length of one forward of the attention or MLP module. PEFT's LoRA layers call that `nn.Linear` for
their base result, so adapters (several, merged, disabled) are added by PEFT's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from cbexp.engine.fused_weights import FusedProjection, FusedWeights, RefreshReport


class ProjectionFusion:
    """Fuses the projections of `model` between `install` and `remove`; as a context manager, for the body.

    Results equal the unfused model's but for the order of summation inside the matrix product. With gradients enabled
    the projections run one by one, so that training stays right even while installed. `remove` gives the modules back
    as they were and leaves the weights fused, for the next round; `close` takes those apart too.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = FusedWeights(model)
        self._installed = ExitStack()
        self._skipped: dict[str, str] = {}

    def install(self) -> RefreshReport:
        """Fuse weights that are not fused (see `FusedWeights.refresh`) and take over the projections' forwards."""
        self.remove()
        report = self.weights.refresh()
        self._skipped = {}
        with ExitStack() as undo:
            for projection in self.weights.projections():
                self._install_group(projection, undo)
            self._installed = undo.pop_all()
        return report

    def remove(self) -> None:
        """Give every module its own forward back. Safe to call twice."""
        self._installed.close()

    def close(self) -> None:
        """`remove`, and give every parameter its own storage back. Safe to call twice."""
        self.remove()
        self.weights.close()

    def describe(self) -> dict[str, Any]:
        """As `FusedWeights.describe`, counting as skipped also those whose layers have a forward of their own."""
        facts = self.weights.describe()
        return facts | {
            "num_fused": facts["num_fused"] - len(self._skipped),
            "num_skipped": facts["num_skipped"] + len(self._skipped),
            "skipped": facts["skipped"] | self._skipped,
        }

    def __enter__(self) -> ProjectionFusion:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _install_group(self, projection: FusedProjection, undo: ExitStack) -> None:
        group = projection.group
        if any("forward" in linear.__dict__ for linear in group.linears):
            self._skipped[group.name] = "a projection's forward was replaced by somebody else"
            return
        product = _SharedProduct(projection)
        for index, linear in enumerate(group.linears):
            _replace_forward(linear, _projection_forward(linear, product, index), undo)
        _replace_forward(group.block, _block_forward(group.block.forward, product), undo)


class _SharedProduct:
    """All columns of a group for one input tensor, while the group's block is in its forward."""

    def __init__(self, projection: FusedProjection) -> None:
        self._weight, self._bias, self._sizes = projection.weight, projection.bias, projection.sizes
        for tensor in (self._weight, self._bias):
            if tensor is not None:
                # As parameters are: otherwise cudagraph trees copy it at every replay.
                torch._dynamo.mark_static_address(tensor)
        self.is_open = False
        self._input: Tensor | None = None
        self._columns: tuple[Tensor, ...] = ()

    def start(self) -> None:
        self._forget()
        self.is_open = True

    def end(self) -> None:
        self._forget()
        self.is_open = False

    def columns(self, index: int, input: Tensor) -> Tensor:
        """What projection `index` makes of `input` [..., in_features]: a view [..., sizes[index]] of the product."""
        if self._input is not input:
            product = nn.functional.linear(input, self._weight, self._bias)
            self._input, self._columns = input, product.split(self._sizes, dim=-1)
        return self._columns[index]

    def _forget(self) -> None:
        self._input, self._columns = None, ()


def _projection_forward(linear: nn.Linear, product: _SharedProduct, index: int) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        # The fused tensor has no gradient to give to the parameters.
        if product.is_open and not torch.is_grad_enabled():
            return product.columns(index, input)
        return nn.functional.linear(input, linear.weight, linear.bias)

    return forward


def _block_forward(block_forward: Callable[..., Any], product: _SharedProduct) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        product.start()
        try:
            return block_forward(*args, **kwargs)
        finally:
            product.end()

    return forward


def _replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """Shadow `module.forward`; an instance's own forward (a hook of accelerate's, say) comes back on undo."""
    attributes = module.__dict__
    if "forward" in attributes:
        undo.callback(attributes.__setitem__, "forward", attributes["forward"])
    else:
        undo.callback(attributes.pop, "forward", None)
    attributes["forward"] = forward
