"""Where each sequence of a packed batch lies, known to the host: read from the device once a step, not once a layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class SequenceSpan(NamedTuple):
    """Where one sequence lies in the packed queries and keys; its queries are the last of its keys' positions."""

    queries: slice
    keys: slice

    @property
    def num_keys(self) -> int:
        """Keys of the sequence, those of its queries included."""
        return int(self.keys.stop - self.keys.start)

    @property
    def num_past(self) -> int:
        """Keys before the first query's own."""
        return self.num_keys - int(self.queries.stop - self.queries.start)


def read_spans(cumulative_q: Tensor, cumulative_k: Tensor) -> list[SequenceSpan]:
    """The sequences that have queries, from cumulative lengths (int [num_sequences + 1], beginning with 0)."""
    ends_q, ends_k = _host_values(cumulative_q), _host_values(cumulative_k)
    return [
        SequenceSpan(slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1]))
        for i in range(len(ends_q) - 1)
        if ends_q[i] < ends_q[i + 1]
    ]


# Tensor -> (version of its content, values). All layers of a step are given the same tensors.
_values_read = WeakTensorKeyDictionary()


def _host_values(tensor: Tensor) -> list[int]:
    if tensor.device.type == "cpu" or tensor.is_inference():
        values: list[int] = tensor.tolist()
        return values
    known = _values_read.get(tensor)
    if known is None or known[0] != tensor._version:
        known = (tensor._version, tensor.tolist())
        _values_read[tensor] = known
    return list(known[1])
