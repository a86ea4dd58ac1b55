"""How the rows of a drive are sampled: each one's settings as integers, its sets of token ids as bits, and the key."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cbexp.engine.buffers import MAX_TOKEN_SETS, RowSampling, SamplingColumn, pack_ids, set_width
from cbexp.engine.requests import PromptGroup
from cbexp.engine.sampling import HeadInputs, head_logits, sample
from cbexp.engine.types import GREEDY, EngineError, Sampling


class DriveSampling:
    """Of the requests of one drive. `needs_sampling`: whether any of them takes more than the most likely token.

    Without requests, whether one with the sampling `default` would.

    Raises `EngineError` for more different sets of ids than steps can hold.
    """

    def __init__(
        self,
        groups: Sequence[PromptGroup],
        seed: int,
        vocab_size: int,
        *,
        default: Sampling = GREEDY,
        logprobs: bool = False,
        fp32_head: bool = False,
    ) -> None:
        self._fp32_head = fp32_head
        # Besides EOS and limits; stop strings are looked for on the host.
        self.ends_early = any(
            group.sampling.stop_token_ids or group.sampling.stop_strings for group in groups
        )
        self.needs_sampling = (
            logprobs
            or fp32_head
            or any(_does_more_than_greedy(group.sampling) for group in groups)
            or (not groups and _does_more_than_greedy(default))
        )
        self._set_width = set_width(vocab_size)
        self._sets: dict[frozenset[int], int] = {frozenset(): 0}
        self._settings: dict[str, tuple[int, ...]] = {}
        if not self.needs_sampling:
            return
        for group in groups:
            settings = self._pack(group)
            for generation, request_id in enumerate(group.request_ids):
                self._settings[request_id] = (*settings, generation)
        if len(self._sets) > MAX_TOKEN_SETS:
            raise EngineError(
                f"The requests of one drive have {len(self._sets) - 1} different sets of stop or suppressed ids, and "
                f"{MAX_TOKEN_SETS - 1} are possible: drive them in several rounds."
            )
        self.token_sets = torch.stack([pack_ids(ids, self._set_width) for ids in self._sets])
        self.key = make_key(seed)

    def settings_of(self, request_id: str) -> tuple[int, ...]:
        """A request's values by `SamplingColumn`; there are none in a greedy drive."""
        return self._settings[request_id]

    def choose(
        self, logits: Tensor | HeadInputs, rows: Sequence[RowSampling], positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Next token ids int64 of the first rows of `logits`, and log-probabilities float32 [rows, 4].

        `positions`: of the last token that each row has.
        """
        num_rows = len(rows)
        if isinstance(logits, HeadInputs):
            logits = head_logits(logits.hidden[:num_rows], logits.weight, self._fp32_head)
        assert isinstance(logits, Tensor)
        seen = torch.zeros((num_rows, self.token_sets.shape[1]), dtype=torch.int32)
        for index, row in enumerate(rows):
            if row.seen_ids:
                seen[index] = pack_ids(row.seen_ids, self._set_width)
        host = [
            torch.tensor([row.settings for row in rows], dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int32),
            seen,
            self.token_sets,
            self.key,
        ]
        next_ids, _, logprobs = sample(
            logits[:num_rows], *(tensor.to(logits.device, non_blocking=True) for tensor in host)
        )
        return next_ids, logprobs

    def _pack(self, group: PromptGroup) -> tuple[int, ...]:
        sampling, stops = group.sampling, (*group.eos_token_ids, *group.sampling.stop_token_ids)
        values = {
            SamplingColumn.TEMPERATURE: _bits(sampling.temperature),
            SamplingColumn.TOP_K: max(0, sampling.top_k),
            SamplingColumn.TOP_P: _bits(sampling.top_p),
            SamplingColumn.MIN_P: _bits(sampling.min_p),
            SamplingColumn.REPETITION_PENALTY: _bits(sampling.repetition_penalty),
            SamplingColumn.FIRST_STOP: len(group.prompt_ids) + sampling.min_new_tokens,
            SamplingColumn.STOP_SET: self._number_of(stops),
            SamplingColumn.SUPPRESSED_SET: self._number_of(sampling.suppress_token_ids),
            SamplingColumn.SUBMISSION: _signed(group.submission),
            SamplingColumn.PROMPT: group.index,
        }
        return tuple(values[column] for column in sorted(values))

    def _number_of(self, token_ids: Iterable[int]) -> int:
        return self._sets.setdefault(frozenset(token_ids), len(self._sets))


def make_key(seed: int) -> Tensor:
    """The key int32 [2] of random numbers: of the seed and of this process's rank, since ranks must differ."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_distributed else 0
    digest = hashlib.blake2b(struct.pack("<QQ", seed, rank), digest_size=8).digest()
    return torch.tensor(struct.unpack("<2i", digest), dtype=torch.int32)


def _does_more_than_greedy(sampling: Sampling) -> bool:
    is_plain = sampling.temperature == 0 and sampling.repetition_penalty == 1 and sampling.min_new_tokens == 0
    return not is_plain or bool(sampling.stop_token_ids) or bool(sampling.suppress_token_ids)


def _bits(value: float) -> int:
    """A float32 number as the signed 32-bit integer of the same bits."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _signed(value: int) -> int:
    """A 32-bit number as a signed one; larger numbers begin again."""
    return (value + 2**31) % 2**32 - 2**31
