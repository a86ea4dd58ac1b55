"""The choice of next tokens, and what happens to the rows of a batch then; graphs can capture it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cbexp.engine.buffers import NOT_FINITE, DecodeBuffers, SamplingBuffers, SamplingColumn
from cbexp.engine.kernels.tiles import LOWEST_LOGIT, MAX_SKINNY_ROWS, MIN_TEMPERATURE, SAMPLING_TILE
from cbexp.engine.operators import operator


class HeadInputs(NamedTuple):
    """What a language-model head makes logits of: `hidden` [rows, hidden_size], `weight` [vocab_size, hidden_size]."""

    hidden: Tensor
    weight: Tensor


def compute_logits(logits: Tensor | HeadInputs) -> Tensor:
    """Logits [rows, vocab_size], computed where they are not yet."""
    return functional.linear(*logits) if isinstance(logits, HeadInputs) else logits


def choose(logits: Tensor | HeadInputs) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row, from logits [rows, vocab_size] or from what makes them.

    Greedy, as in `generate`: returns the id (int64 [rows]) of the largest logit, of equals the lowest, and that logit
    in float32, in which logits are compared. A NaN counts as the largest.
    """
    if isinstance(logits, HeadInputs):
        next_ids: Tensor
        best_logits: Tensor
        next_ids, best_logits = choose_from_hidden(*logits)
        return next_ids, best_logits
    return _choose_best(logits)


def _choose_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64:  # half precision keeps its order
        logits = logits.float()
    next_ids = logits.argmax(dim=-1)
    return next_ids, logits.gather(1, next_ids[:, None])[:, 0].float()


def choose_from_hidden_plainly(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`choose` from the inputs of the head, in plain torch."""
    return _choose_best(functional.linear(hidden, weight))


@operator(choose_from_hidden_plainly)
def choose_from_hidden(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `choose_from_hidden_plainly`. For few rows the head's kernel keeps the best token of each tile alone."""
    from cbexp.engine.kernels import finish, linear, tiles

    if hidden.shape[0] > tiles.MAX_SKINNY_ROWS:
        return finish.largest_logit(functional.linear(hidden, weight))
    tile = tiles.choose_head_tile(hidden.shape[0], hidden.itemsize, tiles.device_limits(hidden.device))
    return finish.best_token(*linear.head_maxima(hidden, weight, tile))


def head_logits_plainly(hidden: Tensor, weight: Tensor, in_fp32: bool) -> Tensor:
    """Logits [rows, vocab_size] of the inputs of the head; `in_fp32` they are neither summed nor rounded in less."""
    return functional.linear(hidden.float(), weight.float()) if in_fp32 else functional.linear(hidden, weight)


@operator(head_logits_plainly)
def head_logits(hidden: Tensor, weight: Tensor, in_fp32: bool) -> Tensor:
    """As `head_logits_plainly`. Products of half precision are exact in float32, in which they are summed."""
    from cbexp.engine.kernels import linear, tiles

    if hidden.itemsize != 2:
        return functional.linear(hidden, weight)
    if hidden.shape[0] <= MAX_SKINNY_ROWS:
        tile = tiles.choose_head_tile(hidden.shape[0], hidden.itemsize, tiles.device_limits(hidden.device))
        dtype = torch.float32 if in_fp32 else hidden.dtype
        [parts] = linear.split_linear(hidden.contiguous(), [weight], [], tile, out_dtype=dtype)
        return parts[0]
    if in_fp32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return functional.linear(hidden, weight)


def sample_plainly(
    logits: Tensor, settings: Tensor, positions: Tensor, seen: Tensor, token_sets: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the next token of each row from logits [rows, vocab_size] as its settings say.

    `settings`, `seen`, `token_sets` and `key` as in `SamplingBuffers`; `positions` int32 [rows]: of the tokens fed, to
    each of which the drawn one is the next; a row at -1 gets anything.

    In the order of transformers: repetition penalty, suppression; temperature; the `top_k` largest logits (0, less, or
    the vocabulary: all); of those the fewest of the largest that have `top_p` of the probability (1: all); of those
    what has `min_p` times the probability of the most likely token. Tokens with equal logits are kept or dropped
    together, so a limit may keep more than it says, and at least one. Temperature 0: the largest logit, of equals the
    lowest id; nothing else of that order matters then but the first two.

    Returns:
        ids int64 [rows], `NOT_FINITE` where a logit is NaN or plus infinity, or nothing is left to choose; the logits
        of those tokens float32 [rows], as the model gave them; float32 [rows, 4]: the tokens' log-probability by the
        model at this temperature, in the distribution that they were drawn from, by the model at temperature 1, and
        the model's own probability, at this temperature, of all tokens that could have been drawn.
    """
    raw, floats = logits.float(), settings.view(torch.float32)

    def setting(column: SamplingColumn) -> Tensor:
        of_floats = column <= SamplingColumn.REPETITION_PENALTY and column != SamplingColumn.TOP_K
        return (floats if of_floats else settings)[:, column, None]

    temperature = setting(SamplingColumn.TEMPERATURE)
    is_greedy = temperature[:, 0] <= 0
    scale = torch.where(temperature <= 0, 1.0, temperature.clamp(min=MIN_TEMPERATURE))
    processed = _process(raw, setting, positions[:, None] + 1, seen, token_sets)

    largest_raw, largest = raw.amax(1, keepdim=True), processed.amax(1, keepdim=True)
    is_finite = ((largest_raw < torch.inf) & (largest > -torch.inf))[:, 0]
    masses = ((processed - largest) / scale).exp()
    kept = processed >= LOWEST_LOGIT
    is_filtered = (setting(SamplingColumn.TOP_K) > 0) | (setting(SamplingColumn.TOP_P) < 1)
    if bool((is_filtered | (setting(SamplingColumn.MIN_P) > 0)).any()):
        kept = processed >= _find_threshold(processed, masses, largest, scale, setting)
    tiles = _tiles(torch.where(kept, masses, 0.0))
    uniforms = _draw_uniforms(setting, positions + 1, key)
    tile = _choose_by_mass(tiles.sum(2), uniforms[0])
    in_tile = tiles.gather(1, tile[:, None, None].expand(-1, 1, SAMPLING_TILE))[:, 0]
    drawn = tile * SAMPLING_TILE + _choose_by_mass(in_tile, uniforms[1])
    next_ids = torch.where(is_greedy, processed.argmax(1), drawn).clamp(max=raw.shape[1] - 1)

    def of_next(values: Tensor) -> Tensor:
        return values.gather(1, next_ids[:, None])[:, 0]

    from_largest = (raw - largest_raw) / scale
    model_masses = from_largest.exp()
    model_sum = _sum(model_masses)
    model = of_next(from_largest) - model_sum.log()
    unscaled = raw - largest_raw
    at_one = of_next(unscaled) - _sum(unscaled.exp()).log()
    sampled = of_next((processed - largest) / scale) - tiles.sum(2).sum(1).log()
    kept_mass = _sum(torch.where(kept, model_masses, 0.0)) / model_sum
    logprobs = torch.stack([model, sampled, at_one, kept_mass], 1)
    of_greedy = torch.stack([at_one, torch.zeros_like(model), at_one, at_one.exp()], 1)
    logprobs = torch.where(is_greedy[:, None], of_greedy, logprobs)
    return (
        torch.where(is_finite, next_ids, NOT_FINITE),
        of_next(raw),
        torch.where(is_finite[:, None], logprobs, 0.0),
    )


def _sample_shapes(logits: Tensor, *_rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = logits.shape[0]
    return (
        logits.new_empty(num_rows, dtype=torch.int64),
        logits.new_empty(num_rows, dtype=torch.float32),
        logits.new_empty(num_rows, 4, dtype=torch.float32),
    )


@operator(sample_plainly, shapes=_sample_shapes)
def sample(
    logits: Tensor, settings: Tensor, positions: Tensor, seen: Tensor, token_sets: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sample_plainly`."""
    from cbexp.engine.kernels import sampling as kernels

    return kernels.sample(logits, settings, positions, seen, token_sets, key)


def _process(
    raw: Tensor,
    setting: Callable[[SamplingColumn], Tensor],
    position: Tensor,
    seen: Tensor,
    token_sets: Tensor,
) -> Tensor:
    """Logits after penalty and suppression: minus infinity for tokens that may not be chosen at `position`."""
    vocab_size = raw.shape[1]
    penalty = setting(SamplingColumn.REPETITION_PENALTY)
    penalised = torch.where(raw > 0, raw / penalty, raw * penalty)
    is_banned = _read_set(token_sets[setting(SamplingColumn.SUPPRESSED_SET)[:, 0]], vocab_size)
    is_early = position < setting(SamplingColumn.FIRST_STOP)
    is_banned |= is_early & _read_set(token_sets[setting(SamplingColumn.STOP_SET)[:, 0]], vocab_size)
    processed = torch.where((penalty != 1) & _read_set(seen, vocab_size), penalised, raw)
    return torch.where(is_banned, -torch.inf, processed)


def _read_set(words: Tensor, vocab_size: int) -> Tensor:
    """Booleans [rows, vocab_size] of sets of token ids [rows, words]."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).flatten(1)[:, :vocab_size] != 0


def _find_threshold(
    processed: Tensor,
    masses: Tensor,
    largest: Tensor,
    scale: Tensor,
    setting: Callable[[SamplingColumn], Tensor],
) -> Tensor:
    """The smallest logit [rows, 1] that may be chosen, finite."""
    top_k, top_p = setting(SamplingColumn.TOP_K), setting(SamplingColumn.TOP_P)
    min_p = setting(SamplingColumn.MIN_P)
    upper = largest.clamp(min=LOWEST_LOGIT)
    in_top_k = _largest_threshold(processed, torch.ones_like(processed), upper, top_k)
    threshold = torch.where((top_k > 0) & (top_k < processed.shape[1]), in_top_k, LOWEST_LOGIT)
    masses = torch.where(processed >= threshold, masses, 0.0)
    in_top_p = _largest_threshold(processed, masses, upper, top_p * _sum(masses)[:, None])
    threshold = torch.where(top_p < 1, in_top_p.maximum(threshold), threshold)
    in_min_p = (largest + scale * min_p.log()).minimum(largest)
    return torch.where(min_p > 0, in_min_p.maximum(threshold), threshold)


def _largest_threshold(values: Tensor, weights: Tensor, upper: Tensor, wanted: Tensor) -> Tensor:
    """The largest number [rows, 1] up to `upper` such that values from it on have the weight `wanted` [rows, 1].

    By bisection of float32 numbers in their order.
    """
    low, high = torch.full_like(upper, LOWEST_LOGIT), upper
    low, high = _order_of(low), _order_of(high) + 1
    wanted = wanted.clamp(min=torch.finfo(torch.float32).tiny)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = _sum(torch.where(values >= _number_at(middle), weights, 0.0))[:, None] >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return _number_at(low)


def _order_of(numbers: Tensor) -> Tensor:
    """Int64 in the order of float32 numbers, without gaps."""
    bits = numbers.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _number_at(order: Tensor) -> Tensor:
    """The inverse of `_order_of`."""
    bits = order.int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)


def _tiles(values: Tensor) -> Tensor:
    """Values [rows, vocab_size] as [rows, tiles, SAMPLING_TILE], zeros at the end."""
    padding = -values.shape[1] % SAMPLING_TILE
    tiles: Tensor = functional.pad(values, (0, padding)).unflatten(1, (-1, SAMPLING_TILE))
    return tiles


def _sum(values: Tensor) -> Tensor:
    """Sums [rows], in the same order whatever the number of rows: torch shares out a row only if it is alone."""
    return _tiles(values).sum(2).sum(1)


def _choose_by_mass(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Choose of each row of masses [rows, n] one with probability in proportion, by uniforms [rows] in [0, 1).

    Never one without mass, as long as there are others: rounding may put the target beyond all sums.
    """
    has_mass, sums = masses > 0, masses.cumsum(1)
    target = uniforms * masses.sum(1)
    is_beyond = has_mass & (sums > target[:, None])
    last = masses.shape[1] - 1 - has_mass.flip(1).int().argmax(1)
    return torch.where(is_beyond.any(1), is_beyond.int().argmax(1), last)


def _draw_uniforms(
    setting: Callable[[SamplingColumn], Tensor], positions: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Two numbers float32 [rows] in [0, 1), of 24 bits, for the tokens at `positions`."""
    columns = SamplingColumn.SUBMISSION, SamplingColumn.PROMPT, SamplingColumn.GENERATION
    first, second, *_ = philox([*(setting(column)[:, 0] for column in columns), positions], key)
    return (first >> 8).float() * 2.0**-24, (second >> 8).float() * 2.0**-24


def philox(counter: Sequence[Tensor], key: Tensor) -> list[Tensor]:
    """Four random 32-bit words (in int64) of four counters and a key [2] of 32 bits each: Philox 4x32-10.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
    """
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = (each.long() & word for each in counter)
    k0, k1 = key.long() & word
    for _ in range(10):
        # Of products that int64 cannot hold, all 64 bits are there nevertheless.
        product_0, product_2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product_2 >> 32 & word) ^ c1 ^ k0, product_2 & word
        c2, c3 = (product_0 >> 32 & word) ^ c3 ^ k1, product_0 & word
        k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
    return [c0, c1, c2, c3]


def finish_step(rows: DecodeBuffers, logits: Tensor | HeadInputs) -> None:
    """Choose the next token of all `rows`, and `advance` them."""
    if rows.sampling is None:
        advance(rows, *choose(logits))
        return
    own = rows.sampling
    if isinstance(logits, HeadInputs):
        logits = head_logits(*logits, own.fp32_head)
    advance(rows, *sample(logits, own.settings, rows.positions, own.seen, own.token_sets, own.key))


def advance(
    buffers: DecodeBuffers, next_ids: Tensor, best_logits: Tensor, logprobs: Tensor | None = None
) -> None:
    """Record the next tokens int64 [rows] of the first rows, end those that are done, move the others one position on.

    Their logits float32 [rows] are stored as they are. All in place, without host synchronisation. A row ends with its
    last allowed token or an EOS, which is recorded, and without a token where its logit is not finite: `NOT_FINITE` is
    recorded. Sampled rows, with `logprobs` [rows, 4] to store, end with a token of their stop set, once they may, and
    where `sample` has found `NOT_FINITE`; those with a repetition penalty have seen the token then.
    """
    if next_ids.is_cuda and not torch.compiler.is_compiling():
        from cbexp.engine.kernels import finish  # a dozen launches in one

        finish.advance(buffers, next_ids, best_logits, logprobs)
        return
    advance_plainly(buffers, next_ids, best_logits, logprobs)


def advance_plainly(
    buffers: DecodeBuffers, next_ids: Tensor, best_logits: Tensor, logprobs: Tensor | None = None
) -> None:
    """`advance` in plain torch, on any device."""
    rows = next_ids.shape[0]
    token_ids, positions = buffers.token_ids[:rows], buffers.positions[:rows]
    remaining, step = buffers.remaining[:rows], buffers.step.long().view(1)
    is_active = positions >= 0
    if logprobs is None or buffers.sampling is None:
        is_finite = best_logits.isfinite()
        is_last = (next_ids[:, None] == buffers.eos_ids).any(dim=1)
    else:
        is_finite = next_ids >= 0
        is_last = _note_sampled(buffers.sampling.rows(rows), next_ids, positions, step, logprobs)
    outputs = torch.where(is_active, torch.where(is_finite, next_ids, NOT_FINITE), -1).to(torch.int32)
    buffers.outputs[:, :rows].index_copy_(0, step, outputs[None])
    buffers.best_logits[:rows].copy_(best_logits)
    remaining.sub_(is_active.to(torch.int32))
    goes_on = is_active & is_finite & (remaining > 0) & ~is_last
    token_ids.copy_(torch.where(goes_on, next_ids, token_ids))
    positions.copy_(torch.where(goes_on, positions + 1, -1))
    buffers.step.add_(1)


def _note_sampled(
    rows: SamplingBuffers, next_ids: Tensor, positions: Tensor, step: Tensor, logprobs: Tensor
) -> Tensor:
    """Keep log-probabilities and tokens seen of active rows; whether each row's token is a stop id."""
    rows.logprobs.index_copy_(0, step, logprobs[None])
    ids = next_ids.clamp(min=0)
    word, bit = (ids >> 5)[:, None], (torch.ones_like(positions) << (ids & 31).int())[:, None]
    penalty = rows.settings.view(torch.float32)[:, SamplingColumn.REPETITION_PENALTY]
    is_noted = (positions >= 0) & (next_ids >= 0) & (penalty != 1)
    known = rows.seen.gather(1, word)
    rows.seen.scatter_(1, word, torch.where(is_noted[:, None], known | bit, known))
    stop_words = rows.token_sets[rows.settings[:, SamplingColumn.STOP_SET]].gather(1, word)
    is_stop = ((stop_words & bit) != 0)[:, 0]
    return is_stop & (positions + 1 >= rows.settings[:, SamplingColumn.FIRST_STOP])
