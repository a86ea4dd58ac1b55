"""Parameters as consecutive rows of one tensor: stacks them, tells whether they still are, and takes them apart.

The parameters stay the caller's objects; only where their data lies changes. No reference to the data is kept here, so
that a model which is moved or freed takes its memory with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Known here, so that rows left behind by a re-assigned neighbour are not mistaken for somebody else's flat buffer.
_stack_storages: set[StorageWeakRef] = set()


def is_stacked(parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters, in this order, are all that their common storage holds."""
    first = parameters[0]
    storage = StorageWeakRef(first.untyped_storage())
    return first.untyped_storage().nbytes() == _num_bytes(parameters) and all(
        StorageWeakRef(parameter.untyped_storage()) == storage
        and parameter.storage_offset() == offset
        and parameter.dtype == first.dtype
        and parameter.is_contiguous()
        for parameter, offset in zip(parameters, _offsets(parameters), strict=True)
    )


def stack(parameters: Sequence[Tensor]) -> None:
    """Move the parameters' values into one new tensor and point each parameter at its rows.

    Shapes [rows_i, ...] with equal trailing sizes, one dtype, one device. Never reuses an existing storage: the caller
    may hold its tensors, a backup of the weights for one.
    """
    first = parameters[0]
    sizes = [parameter.shape[0] for parameter in parameters]
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.empty((sum(sizes), *first.shape[1:]), dtype=first.dtype, device=first.device)
        _remember(rows)
        for parameter, own_rows in zip(parameters, rows.split(sizes), strict=True):
            own_rows.copy_(parameter)
            parameter.data = own_rows


def unstack(parameters: Sequence[Tensor]) -> None:
    """Give each parameter that lies in a stack a storage of its own, values unchanged; those tied by data stay tied."""
    with torch.inference_mode(False), torch.no_grad():
        # Held until the end: no clone may come to lie where another's rows were.
        stacked = [parameter.detach() if _is_in_a_stack(parameter) else None for parameter in parameters]
        clones: dict[tuple[int, torch.Size], Tensor] = {}
        for parameter, rows in zip(parameters, stacked, strict=True):
            if rows is not None:
                place = (rows.data_ptr(), rows.shape)
                if place not in clones:
                    clones[place] = rows.clone()
                parameter.data = clones[place]


def stacked_tensor(parameters: Sequence[Tensor]) -> Tensor:
    """All rows of stacked parameters as one tensor [sum of rows_i, ...]; shares their memory, carries no gradient."""
    first = parameters[0].detach()
    num_rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((num_rows, *first.shape[1:]), first.stride(), 0)


def can_leave_its_storage(parameter: Tensor) -> bool:
    """False for a view into somebody else's larger storage, such as a flat buffer of parameters."""
    return parameter.untyped_storage().nbytes() == _num_bytes([parameter]) or _is_in_a_stack(parameter)


def _is_in_a_stack(parameter: Tensor) -> bool:
    return StorageWeakRef(parameter.untyped_storage()) in _stack_storages


def _remember(rows: Tensor) -> None:
    _stack_storages.difference_update([storage for storage in _stack_storages if storage.expired()])
    _stack_storages.add(StorageWeakRef(rows.untyped_storage()))


def _num_bytes(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _offsets(parameters: Sequence[Tensor]) -> Iterator[int]:
    offset = 0
    for parameter in parameters:
        yield offset
        offset += parameter.numel()
