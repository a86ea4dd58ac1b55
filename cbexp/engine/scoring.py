"""Given completions to be scored: checked and grouped, and the log-probabilities of their tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cbexp.engine.kernels.tiles import MIN_TEMPERATURE
from cbexp.engine.requests import GroupLengths, RequestLimits, check_batch, check_prompt, check_token_ids

# Of float32 logits that exist at once; what is computed of them takes as much again.
CHUNK_BYTES = 2**27


@dataclass(frozen=True)
class ScoredGroup:
    """A prompt and the completions of it to be scored, none of them empty, by their place in the call."""

    prompt_ids: tuple[int, ...]
    completions: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def lengths(self) -> GroupLengths:
        """What the group takes of a cache follows from these, as if the longest completion were generated each time."""
        longest = max(map(len, self.completions.values()))
        return GroupLengths(len(self.prompt_ids), longest, len(self.completions))


def group_completions(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], limits: RequestLimits
) -> list[ScoredGroup]:
    """Groups of adjacent equal prompts, without empty completions.

    Raises `ValueError`, by index, for what cannot be scored within `limits`.
    """
    check_batch("prompts", prompts)
    check_batch("completions", completions)
    if len(prompts) != len(completions):
        raise ValueError(f"There are {len(prompts)} prompts and {len(completions)} completions: one each.")
    groups: list[ScoredGroup] = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        prompt_ids = check_prompt(index, prompt, limits.vocab_size)
        completion_ids = check_token_ids(f"completions[{index}]", completion, limits.vocab_size)
        _check_length(index, len(prompt_ids), len(completion_ids), limits)
        if not completion_ids:
            continue
        if not groups or groups[-1].prompt_ids != prompt_ids:
            groups.append(ScoredGroup(prompt_ids))
        groups[-1].completions[index] = completion_ids
    return groups


def _check_length(index: int, prompt_length: int, completion_length: int, limits: RequestLimits) -> None:
    total = prompt_length + completion_length
    what = f"prompts[{index}] and completions[{index}] have {prompt_length} + {completion_length} = {total} tokens"
    if limits.positions.count is not None and total > limits.positions.count:
        raise ValueError(f"{what}, which exceed {limits.positions}.")
    # The last token is never fed.
    if limits.max_stored_tokens is not None and total - 1 > limits.max_stored_tokens:
        raise ValueError(
            f"{what}, and the cache holds {limits.max_stored_tokens} of one request: raise num_blocks."
        )


def rows_at_once(vocab_size: int) -> int:
    """Rows of logits that may exist at once."""
    return max(1, CHUNK_BYTES // (vocab_size * torch.float32.itemsize))


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Log-probabilities float32 [rows, 2] of tokens int64 [rows] by logits [rows, vocab_size].

    First at the temperature, where 0 counts as 1, then at 1; both over the whole vocabulary, in float32.
    """
    logits = logits.float()
    logits = logits - logits.amax(1, keepdim=True)
    raw = _log_softmax_at(logits, token_ids)
    if temperature in (0, 1):
        return torch.stack((raw, raw), dim=1)
    logits /= max(temperature, MIN_TEMPERATURE)
    return torch.stack((_log_softmax_at(logits, token_ids), raw), dim=1)


def _log_softmax_at(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.gather(1, token_ids[:, None])[:, 0] - logits.logsumexp(1)
