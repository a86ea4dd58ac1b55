"""Makes unchanged model code compute q/k/v, and gate/up, as one product over several weights.

While installed, each projection's `nn.Linear` answers with its share of a product that is computed at the first call
and kept for the length of one forward of the attention or MLP module. PEFT's LoRA layers call that `nn.Linear` for
their base result, so adapters (several, merged, disabled) are added by PEFT's own code. Parameters stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from cbexp.engine.borrow import Changes
from cbexp.engine.forward.ops import joint_linear

PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ONE_PRODUCT_ALREADY = ("qkv_proj", "gate_up_proj")


@dataclass(frozen=True)
class ProjectionGroup:
    """Projections that read the same input; `block` is the attention or MLP module that calls them.

    Weakly referenced: between drives the caller may replace any of them, and the old weights must be free then.
    """

    block: ref[nn.Module]
    linears: tuple[ref[nn.Linear], ...]


class ProjectionFusion:
    """Fuses the projections of `model` between `install` and `remove`, once `resolve` has found them.

    Results equal the unfused model's but for the order of summation inside the product. With gradients enabled the
    projections run one by one, so that training stays right even while installed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups: dict[str, ProjectionGroup] = {}
        self._skipped: dict[str, str] = {}
        self._changes = Changes()

    def resolve(self) -> None:
        """Find the projections to fuse, in the model as it is now; to be called again when it has changed."""
        self._groups, self._skipped = find_projection_groups(self._model)

    def install(self) -> None:
        """Take over the forwards of the projections; none may be installed."""
        try:
            for group in self._groups.values():
                _install_group(group, self._changes)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give every module its own forward back. Safe to call twice."""
        self._changes.undo()

    def describe(self) -> dict[str, Any]:
        """As plain JSON values: how many groups are fused, and why each other one is not."""
        return {
            "num_fused": len(self._groups),
            "num_skipped": len(self._skipped),
            "skipped": dict(self._skipped),
        }


def find_projection_groups(model: nn.Module) -> tuple[dict[str, ProjectionGroup], dict[str, str]]:
    """Groups that can be fused, by name, and the reasons of those that cannot.

    A group is fused as a whole or not at all. Its members are plain `nn.Linear`s or PEFT LoRA layers around one.
    """
    groups: dict[str, ProjectionGroup] = {}
    skipped: dict[str, str] = {}
    for path, block in model.named_modules():
        skipped |= {
            f"{path}.{name}": "is one product already" for name in _children(block, ONE_PRODUCT_ALREADY)
        }
        for names in PROJECTIONS:
            members = _children(block, names)
            if len(members) < len(names):
                continue
            name = f"{path}.{'+'.join(names)}"
            reason = next(_objections(members), None)
            if reason is not None:
                skipped[name] = reason
            else:
                groups[name] = ProjectionGroup(ref(block), tuple(map(ref, _linears(members))))
    return groups, skipped


def _children(block: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    # Through getattr, a model's thousands of misses take longer than all else here.
    children = {name: block._modules.get(name) for name in names}
    return {name: child for name, child in children.items() if child is not None}


def _is_lora(module: nn.Module) -> bool:
    """A PEFT LoRA layer over a dense layer, by its name: PEFT need not be installed."""
    return type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"


def _linears(members: Mapping[str, nn.Module]) -> tuple[nn.Linear, ...]:
    bases = (member.base_layer if _is_lora(member) else member for member in members.values())
    return tuple(base for base in bases if type(base) is nn.Linear)


def _objections(members: Mapping[str, nn.Module]) -> Iterator[str]:
    """Why the members cannot be fused, in an order in which each check may rely on those before it."""
    for name, member in members.items():
        yield from _layer_objections(name, member)
    linears = dict(zip(members, _linears(members), strict=True))
    for name, linear in linears.items():
        if "forward" in vars(linear):
            yield f"{name}'s forward was replaced by somebody else"
        yield from _layout_objections(name, linear)
    if len({linear.bias is None for linear in linears.values()}) > 1:
        yield "only some of the projections have a bias"
    parameters = [parameter for linear in linears.values() for parameter in linear.parameters()]
    for what in ("dtype", "device"):
        values = {str(getattr(parameter, what)) for parameter in parameters}
        if len(values) > 1:
            yield f"the projections differ in {what}: {', '.join(sorted(values))}"
    if len({linear.in_features for linear in linears.values()}) > 1:
        yield "the projections read inputs of different sizes"


def _layer_objections(name: str, member: Any) -> Iterator[str]:
    if _is_lora(member):
        variants = {type(variant).__name__ for variant in member.lora_variant.values()}
        if variants:
            yield f"{name} has an adapter of another kind than plain LoRA: {', '.join(sorted(variants))}"
        member = member.base_layer
    if type(member) is not nn.Linear:
        kind = type(member)
        yield f"{name} is a {kind.__module__}.{kind.__qualname__}, not a plain torch.nn.Linear"


def _layout_objections(name: str, linear: nn.Linear) -> Iterator[str]:
    """Why kernels cannot read the parameters where they are."""
    shapes = {"weight": (linear.out_features, linear.in_features), "bias": (linear.out_features,)}
    for kind, shape in shapes.items():
        parameter = getattr(linear, kind)
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:  # quantised, distributed
            yield f"{name}.{kind} is a {type(parameter).__name__}, not a plain parameter"
        elif parameter.is_meta:
            yield f"{name}.{kind} holds no data (device meta)"
        elif tuple(parameter.shape) != shape or not parameter.is_contiguous():
            yield f"{name}.{kind} is laid out as {tuple(parameter.shape)}, not as a contiguous {shape}"


def _install_group(group: ProjectionGroup, changes: Changes) -> None:
    block = cast(nn.Module, group.block())
    linears = tuple(cast(nn.Linear, linear()) for linear in group.linears)
    product = _SharedProduct(linears)
    for index, linear in enumerate(linears):
        changes.set(linear.__dict__, "forward", _projection_forward(linear, product, index))
    # Around an instance's own forward (a hook of accelerate's, say), if it has one.
    changes.set(block.__dict__, "forward", _block_forward(block.forward, product))


class _SharedProduct:
    """The products of a group for one input tensor, while the group's block is in its forward."""

    def __init__(self, linears: tuple[nn.Linear, ...]) -> None:
        self._linears = linears
        self.is_open = False
        self._input: Tensor | None = None
        self._products: list[Tensor] = []

    def start(self) -> None:
        self._forget()
        self.is_open = True

    def end(self) -> None:
        self._forget()
        self.is_open = False

    def of(self, index: int, input: Tensor) -> Tensor:
        """What projection `index` makes of `input` [..., in_features]."""
        if self._input is not input:
            weights = [linear.weight for linear in self._linears]
            biases = [linear.bias for linear in self._linears if linear.bias is not None]
            self._input, self._products = input, joint_linear(input, weights, biases)
        return self._products[index]

    def _forget(self) -> None:
        self._input, self._products = None, []


def _projection_forward(linear: nn.Linear, product: _SharedProduct, index: int) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        # The operator has no gradient, and autocast does not know it.
        if (
            product.is_open
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(input.device.type)
        ):
            return product.of(index, input)
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
