"""Lays the weights of projections that read the same input out as one tensor, without a second copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cbexp.engine.projection_groups import ProjectionGroup, find_projection_groups
from cbexp.engine.row_stack import is_stacked, stack, stacked_tensor, unstack


@dataclass(frozen=True)
class FusedProjection:
    """One group as it can be read now: `weight` [sum of sizes, in_features], `bias` [sum of sizes] or None.

    Both share the memory of the caller's parameters. Hold them no longer than a drive: a re-assigned parameter is
    noticed by `FusedWeights.refresh` alone.
    """

    group: ProjectionGroup
    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class RefreshReport:
    """How many groups a refresh fused for the first time, fused again since their parameters moved, and let go."""

    num_fused: int
    num_fused_again: int
    num_released: int

    @property
    def has_moved(self) -> bool:
        """Whether weights lie at new addresses: captured graphs that read them are void."""
        return self.num_fused + self.num_fused_again + self.num_released > 0


class FusedWeights:
    """Keeps q/k/v and gate/up weights of `model` as rows of one tensor each, from `refresh` until `close`.

    The module tree and the parameter objects stay the caller's, each parameter being a view of its rows: what is
    written in place (optimizer steps, `copy_`, `load_state_dict`) is in the fused tensor at once. Groups that cannot be
    fused are left alone and named in `describe`. Two instances on one model share the layout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups: dict[str, ProjectionGroup] = {}
        self._skipped: dict[str, str] = {}
        self._num_fused_again = 0

    def is_current(self) -> bool:
        """Whether what `refresh` would do is nothing. Walks the modules: milliseconds."""
        groups, _ = find_projection_groups(self._model)
        return groups == self._groups and all(map(_is_fused, groups.values()))

    def refresh(self) -> RefreshReport:
        """Fuse what is not fused: everything at first, later what the caller re-assigned, moved or added.

        To be called before each drive. Needs the memory of one more group while it works. After an exception, out of
        memory for one, every weight is valid and `close` undoes what was done.
        """
        groups, self._skipped = find_projection_groups(self._model)
        gone = [group for name, group in self._groups.items() if groups.get(name) != group]
        for group in gone:
            _release(group)
        num_known = 0
        stale = [group for group in groups.values() if not _is_fused(group)]
        for group in stale:
            num_known += self._groups.get(group.name) == group
            self._groups[group.name] = group
            _fuse(group)
        self._groups = groups
        self._num_fused_again += num_known
        return RefreshReport(len(stale) - num_known, num_known, len(gone))

    def projections(self) -> Iterator[FusedProjection]:
        """The fused groups, in the model's order; to be called after `refresh`."""
        for group in self._groups.values():
            bias = stacked_tensor(group.biases) if group.biases else None
            sizes = tuple(linear.out_features for linear in group.linears)
            yield FusedProjection(group, stacked_tensor(group.weights), bias, sizes)

    def describe(self) -> dict[str, Any]:
        """As plain JSON values: how many groups are fused, how often again, and why each other one is not."""
        return {
            "num_fused": len(self._groups),
            "num_fused_again": self._num_fused_again,
            "num_skipped": len(self._skipped),
            "skipped": dict(self._skipped),
        }

    def close(self) -> None:
        """Give each parameter its own storage again, values unchanged, one group at a time. Safe to call twice."""
        while self._groups:
            name = next(iter(self._groups))
            _release(self._groups[name])
            del self._groups[name]


def _is_fused(group: ProjectionGroup) -> bool:
    return is_stacked(group.weights) and (not group.biases or is_stacked(group.biases))


def _fuse(group: ProjectionGroup) -> None:
    for parameters in (group.weights, group.biases):
        if parameters and not is_stacked(parameters):
            stack(parameters)
    _return_freed_memory(group)


def _release(group: ProjectionGroup) -> None:
    # By now they may be anything: quantised, distributed.
    plain = [parameter for parameter in (*group.weights, *group.biases) if type(parameter) is nn.Parameter]
    unstack(plain)
    _return_freed_memory(group)


def _return_freed_memory(group: ProjectionGroup) -> None:
    """A freed projection is too small a block for the next group; kept, such blocks would add up to the weights."""
    if group.linears[0].weight.is_cuda:
        torch.cuda.empty_cache()
