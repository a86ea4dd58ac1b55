"""Finds the projections of a model that read the same input and can be one matrix product; of others says why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cbexp.engine.row_stack import can_leave_its_storage

PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ONE_PRODUCT_ALREADY = ("qkv_proj", "gate_up_proj")


@dataclass(frozen=True)
class ProjectionGroup:
    """Projections in the order of their rows; `block` is the attention or MLP module that calls them."""

    name: str
    block: nn.Module
    linears: tuple[nn.Linear, ...]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The parameters [out_features_i, in_features] as they are now: callers replace them."""
        return tuple(linear.weight for linear in self.linears)

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """The parameters [out_features_i]; empty when the projections have none."""
        return tuple(linear.bias for linear in self.linears if linear.bias is not None)


def find_projection_groups(model: nn.Module) -> tuple[dict[str, ProjectionGroup], dict[str, str]]:
    """Groups that can be fused, by name, and the reasons of those that cannot.

    A group is fused as a whole or not at all. Its members are plain `nn.Linear`s or PEFT LoRA layers around one.
    """
    groups: dict[str, ProjectionGroup] = {}
    skipped: dict[str, str] = {}
    num_users = _count_users(model)
    for path, block in model.named_modules():
        skipped |= {
            f"{path}.{name}": "is one product already" for name in _children(block, ONE_PRODUCT_ALREADY)
        }
        for names in PROJECTIONS:
            members = _children(block, names)
            if len(members) < len(names):
                continue
            group_name = f"{path}.{'+'.join(names)}"
            reason = next(_objections(members, num_users), None)
            if reason is not None:
                skipped[group_name] = reason
            else:
                groups[group_name] = ProjectionGroup(group_name, block, _linears(members))
    return groups, skipped


def _children(block: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    # Through getattr, a model's thousands of misses take longer than all else here.
    children = {name: block._modules.get(name) for name in names}
    return {name: child for name, child in children.items() if child is not None}


def _count_users(model: nn.Module) -> Counter[int]:
    parameters = model.named_parameters(remove_duplicate=False)
    return Counter(parameter.data_ptr() for _, parameter in parameters if _is_plain(parameter))


def _is_plain(parameter: object) -> bool:
    """Not quantised, not distributed: those are subclasses."""
    return type(parameter) is nn.Parameter


def _is_lora(module: nn.Module) -> bool:
    """A PEFT LoRA layer over a dense layer; told by name, since PEFT need not be installed."""
    return type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"


def _linears(members: Mapping[str, nn.Module]) -> tuple[nn.Linear, ...]:
    bases = (member.base_layer if _is_lora(member) else member for member in members.values())
    return tuple(base for base in bases if type(base) is nn.Linear)


def _objections(members: Mapping[str, nn.Module], num_users: Counter[int]) -> Iterator[str]:
    """Why the members cannot be fused, in an order in which each check may rely on those before it."""
    for name, member in members.items():
        yield from _layer_objections(name, member)
    linears = dict(zip(members, _linears(members), strict=True))
    for name, linear in linears.items():
        yield from _parameter_objections(name, linear, num_users)
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


def _parameter_objections(name: str, linear: nn.Linear, num_users: Counter[int]) -> Iterator[str]:
    shapes = {"weight": (linear.out_features, linear.in_features), "bias": (linear.out_features,)}
    for kind, shape in shapes.items():
        parameter = getattr(linear, kind)
        if kind == "bias" and parameter is None:
            continue
        label = f"{name}.{kind}"
        if not _is_plain(parameter):
            yield f"{label} is a {type(parameter).__name__}, not a plain parameter"
        elif parameter.is_meta:
            yield f"{label} holds no data (device meta)"
        elif tuple(parameter.shape) != shape or not parameter.is_contiguous():
            yield f"{label} is laid out as {tuple(parameter.shape)}, not as a contiguous {shape}"
        elif num_users[parameter.data_ptr()] > 1:
            yield f"{label} is shared with another parameter"
        elif not can_leave_its_storage(parameter):
            yield f"{label} is a view into a larger storage (a flat buffer of parameters?)"
