"""Compares the decode step of one batch size, as it was compiled or captured, with the model's own eager forward.

A wrong graph gives wrong tokens without a word; here it ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cbexp.engine.buffers import NOT_FINITE, DecodeBuffers
from cbexp.engine.decode.step import StepRunner
from cbexp.engine.decode.synthetic_rows import SyntheticRows
from cbexp.engine.forward import Forward
from cbexp.engine.sampling import HeadInputs, advance_plainly, compute_logits
from cbexp.engine.types import EngineError

# A mean over fewer rows is mostly noise; the maximum bounds those.
MIN_ROWS_FOR_MEAN = 32


@dataclass(frozen=True)
class Tolerance:
    """What rounding may do. Log-probabilities are of the reference's best token, logits of the step's; both in nats.

    Both have the same bounds, to which one spacing of the logits is added: each side rounds its own by up to half of
    that. To the bound of the mean the model's own noise of rounding is added, see `_rounding_noise`.

    `cache`: of one row's new keys, or values, in one layer, relative to their length. It grows with the depth: right
    steps in bfloat16 reach 0.06 in 36 layers (Qwen3-4B's shape) and 0.13 in 80 (small and random).
    """

    mean_logprob: float
    max_logprob: float
    cache: float


_IN_SINGLE = Tolerance(mean_logprob=1e-4, max_logprob=1e-3, cache=1e-3)
TOLERANCES = {
    # A step's best logits are float32, whatever the model computes in.
    torch.float64: _IN_SINGLE,
    torch.float32: _IN_SINGLE,
    torch.bfloat16: Tolerance(mean_logprob=0.01, max_logprob=0.3, cache=0.2),
    torch.float16: Tolerance(mean_logprob=0.01, max_logprob=0.3, cache=0.2),
}


@dataclass(frozen=True)
class SelfCheckResult:
    """How far a batch size is from the reference, over its active rows; units as in `Tolerance`.

    Errors of log-probabilities are of the forward run eagerly, those of logits of the step as it runs: it leaves the
    logit of each row's token behind. Those of the cache are of both, the larger ones.
    A spacing is the distance of two neighbouring numbers of the logits' dtype, at a row's best logit.
    """

    bucket: int
    num_rows: int
    num_other_tokens: int
    mean_logprob_error: float
    max_logprob_error: float
    mean_logit_error: float
    max_logit_error: float
    max_cache_error: float
    mean_logit_spacing: float
    max_logit_spacing: float
    rounding_noise: float


def summarize_errors(results: Collection[SelfCheckResult]) -> dict[str, float | None]:
    """Mean and maximum of the errors over all rows of all batch sizes, in nats; None without results."""
    return {
        "mean_logprob_error": _average(results, [result.mean_logprob_error for result in results]),
        "max_logprob_error": max((result.max_logprob_error for result in results), default=None),
        "mean_logit_error": _average(results, [result.mean_logit_error for result in results]),
        "max_logit_error": max((result.max_logit_error for result in results), default=None),
    }


def _average(results: Collection[SelfCheckResult], means: Sequence[float]) -> float | None:
    num_rows = sum(result.num_rows for result in results)
    total = sum(result.num_rows * mean for result, mean in zip(results, means, strict=True))
    return total / num_rows if num_rows else None


@torch.no_grad()
def check_bucket(
    runner: StepRunner,
    forward: Forward,
    reference: Callable[[Tensor, Tensor], Tensor],
    buffers: DecodeBuffers,
    *,
    bucket: int,
    mode: str,
    vocab_size: int,
    max_positions: int,
    tolerance: Tolerance | None = None,
) -> SelfCheckResult:
    """Run one step of `bucket` rows three ways: eagerly by `reference`, by `forward`, and by `runner`; then bursts.

    Compared are the logits of both forwards, the runner's tokens and the logit that it leaves behind of each, what each
    writes to the cache and where, and how the runner's rows advance. A burst of a few steps, in which rows end by their
    limits, is compared with `reference` on the burst's own tokens; in another one a row ends by an EOS. That is four
    eager forwards and seven steps. Buffers and cache are as before afterwards, whatever they hold. The model's
    vocabulary and positions are not left. `tolerance` None: that of the cache's dtype.

    Raises:
        EngineError: they differ by more than rounding does; the message has bucket, mode and error.
    """
    tolerance = tolerance or TOLERANCES[buffers.layers[0].pages.dtype]
    rows = SyntheticRows(buffers, bucket, vocab_size=vocab_size, max_positions=max_positions)
    check = _Check(buffers, rows, mode)
    with check.rows.in_place():
        logits, cache = check.run_forward(reference, "the reference")
        if not bool(logits.isfinite().all()):
            raise EngineError("The model's own logits are not finite: look at its weights.")
        vocab_size = logits.shape[-1]
        own_logits, own_cache = check.run_forward(forward, "the forward")
        step = check.run_steps(runner, 1, vocab_size)
        burst = check.run_steps(runner, rows.num_steps, vocab_size)
        burst_lag, burst_logprob_error, burst_cache_error = check.compare_burst(
            burst, reference, logits, cache
        )
        eos_id = int(burst.token_ids[:2, 0][-1])
        check.run_steps(runner, rows.num_steps, vocab_size, eos_id)
    tokens, best_logits = step.token_ids[0, check.is_active], step.best_logits[check.is_active]
    rounded = logits.to(buffers.layers[0].pages.dtype)  # they may be float32, of hidden states that are not
    spacing = _spacing_of_best(rounded)
    logprobs = logits.float().log_softmax(-1)
    logprob_errors = _best_logprob_errors(logprobs, own_logits.float().log_softmax(-1))
    is_greedy = check.is_greedy[check.is_active]
    lag = _lag(logprobs, tokens)[is_greedy]
    logit_errors = (best_logits - logits.gather(1, tokens[:, None])[:, 0].float()).abs()
    result = SelfCheckResult(
        bucket=bucket,
        num_rows=len(tokens),
        num_other_tokens=int((lag > 0).sum()),
        mean_logprob_error=float(logprob_errors.mean()),
        max_logprob_error=float(torch.cat([logprob_errors, burst_logprob_error]).max()),
        mean_logit_error=float(logit_errors.mean()),
        max_logit_error=float(logit_errors.max()),
        max_cache_error=max(
            _cache_error(cache, own_cache), _cache_error(cache, step.cache), burst_cache_error
        ),
        mean_logit_spacing=float(spacing.mean()),
        max_logit_spacing=float(spacing.max()),
        rounding_noise=_rounding_noise(rounded, num_layers=len(buffers.layers)),
    )
    check.require(result, float(torch.cat([lag, burst_lag]).max()), tolerance)
    return result


class _Steps(NamedTuple):
    """What steps have made: `token_ids` int64 [num_steps, bucket], -1 for inactive rows.

    `logprobs` float32 [num_steps, bucket, 4] of sampled steps, as `SamplingBuffers` has them; None of greedy ones.
    `best_logits` float32 [bucket] is of the last step, `cache` of each layer what was written in all of them.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    best_logits: Tensor
    cache: list[Tensor]

    @property
    def counts(self) -> Tensor:
        """How many steps each row was active in."""
        return _count_steps(self.token_ids)


class _Check:
    """One bucket's check; `rows` must be in place while something runs."""

    def __init__(self, buffers: DecodeBuffers, rows: SyntheticRows, mode: str) -> None:
        self.rows = rows
        self._mode = mode
        self._buffers = buffers
        self._cut = buffers.rows(rows.bucket)
        self.is_active = torch.tensor([p >= 0 for p in rows.positions], device=buffers.device)
        self._once = self.is_active.long()
        # Drawn tokens are not the most likely ones: their log-probabilities are checked.
        self.is_greedy = torch.ones_like(self.is_active)
        if buffers.sampling is not None:
            self.is_greedy[1::2] = False

    def run_forward(
        self, forward: Callable[[Tensor, Tensor], Tensor | HeadInputs], name: str
    ) -> tuple[Tensor, list[Tensor]]:
        """The active rows' logits in the first step, and what was written to the cache."""
        self.rows.reset()
        logits = compute_logits(forward(self._cut.token_ids, self._cut.positions))[self.is_active]
        self._require_kept_slots(self._once, name)
        return logits, self.rows.read_new(self._once)

    def run_steps(self, runner: StepRunner, num_steps: int, vocab_size: int, eos_id: int = -1) -> _Steps:
        """Run steps from the start; a row that makes `eos_id` ends."""
        self.rows.reset(eos_id)
        runner.run(self.rows.bucket, num_steps)
        token_ids, best_logits = self._cut.outputs[:num_steps].long(), self._cut.best_logits.clone()
        sampling = self._cut.sampling
        logprobs = None if sampling is None else sampling.logprobs[:num_steps].clone()
        self._require_known(token_ids, vocab_size)
        self._require_advanced(token_ids, logprobs, eos_id)
        counts = _count_steps(token_ids)
        self._require_kept_slots(counts, "the step")
        return _Steps(token_ids, logprobs, best_logits, self.rows.read_new(counts))

    def compare_burst(
        self,
        burst: _Steps,
        reference: Callable[[Tensor, Tensor], Tensor],
        logits: Tensor,
        cache: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, float]:
        """How far each greedy token is from the best, the errors of log-probabilities, and that of the cache.

        By the reference on the burst's tokens.

        `logits` and `cache` are what the reference has made of the first step.
        """
        self.rows.reset()
        self.rows.write_new(self._once, cache)
        lags, errors = [], [torch.zeros(1, device=logits.device)]
        for step, token_ids in enumerate(burst.token_ids):
            is_active = token_ids >= 0
            if step > 0:
                logits = reference(self._cut.token_ids, self._cut.positions)[is_active]
            expected = logits.float().log_softmax(-1)
            lags.append(_lag(expected, token_ids[is_active])[self.is_greedy[is_active]])
            of_step = None if burst.logprobs is None else burst.logprobs[step]
            if of_step is not None:  # all temperatures are 1, or count as that
                of_token = expected.gather(1, token_ids[is_active][:, None])[:, 0]
                errors.append((of_step[is_active, 0] - of_token).abs())
            self._advance(token_ids, of_step)
        return torch.cat(lags), torch.cat(errors), _cache_error(self.rows.read_new(burst.counts), burst.cache)

    def require(self, result: SelfCheckResult, max_lag: float, tolerance: Tolerance) -> None:
        """Raise unless all errors are within `tolerance`; a NaN is not."""
        has_mean = result.num_rows >= MIN_ROWS_FOR_MEAN
        max_logprob = tolerance.max_logprob + result.max_logit_spacing
        mean_logprob = tolerance.mean_logprob + result.mean_logit_spacing + result.rounding_noise
        bounds = [
            ("log-probabilities differ by up to", result.max_logprob_error, max_logprob),
            ("keys or values in the cache differ by up to", result.max_cache_error, tolerance.cache),
            ("a token is less likely than the best by", max_lag, max_logprob),
            ("the step's best logits differ by up to", result.max_logit_error, max_logprob),
        ]
        if has_mean:
            bounds += [
                ("log-probabilities differ on average by", result.mean_logprob_error, mean_logprob),
                ("the step's best logits differ on average by", result.mean_logit_error, mean_logprob),
            ]
        for what, error, bound in bounds:
            if not error <= bound:
                raise self._failure(f"{what} {error:.4g}, where rounding makes {bound:g} at most")

    def _require_known(self, token_ids: Tensor, vocab_size: int) -> None:
        """Raise for a token outside of the vocabulary, and for none since its logits were not finite."""
        if bool((token_ids == NOT_FINITE).any()):
            raise self._failure("the step's logits are not finite")
        highest = int(token_ids.max())
        if highest >= vocab_size:
            raise self._failure(f"token {highest} is not in the vocabulary of {vocab_size}")

    def _require_kept_slots(self, counts: Tensor, name: str) -> None:
        layer = self.rows.find_overwritten(counts)
        if layer is not None:
            raise self._failure(f"{name} changed keys or values in layer {layer} that were not its to write")

    def _require_advanced(self, token_ids: Tensor, logprobs: Tensor | None, eos_id: int) -> None:
        """All state, but for the logits left behind, is what plain torch makes of the steps' tokens."""
        self._buffers.best_logits.zero_()  # those of inactive rows may be NaN, which equals nothing
        after = [tensor.clone() for tensor in self._buffers.state()]
        self.rows.reset_state(eos_id)
        for step, of_step in enumerate(token_ids):
            self._advance(of_step, None if logprobs is None else logprobs[step])
        self._buffers.best_logits.zero_()
        if not all(_same_bits(*pair) for pair in zip(after, self._buffers.state(), strict=True)):
            raise self._failure("the rows did not advance as their tokens say")

    def _advance(self, token_ids: Tensor, logprobs: Tensor | None) -> None:
        advance_plainly(self._cut, token_ids.clamp(min=0), torch.zeros_like(self._cut.best_logits), logprobs)

    def _failure(self, what: str) -> EngineError:
        return EngineError(
            f"Self-check of compile mode {self._mode}, batch of {self.rows.bucket} rows: {what}. The decode step does "
            "not compute what the model's own code does; run with another mode or fusion, or report this."
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaNs included."""
    return torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)


def _count_steps(token_ids: Tensor) -> Tensor:
    return (token_ids >= 0).sum(0)


def _lag(logprobs: Tensor, token_ids: Tensor) -> Tensor:
    """How much less likely [rows] than the best one each row's token is."""
    return logprobs.amax(-1) - logprobs.gather(1, token_ids[:, None])[:, 0]


def _best_logprob_errors(expected: Tensor, actual: Tensor) -> Tensor:
    best = expected.argmax(-1, keepdim=True)
    return (actual.gather(1, best) - expected.gather(1, best)).abs()[:, 0]


def _spacing_of_best(logits: Tensor) -> Tensor:
    """Distance [rows] between neighbouring numbers of the logits' dtype at the best logit."""
    best = logits.amax(-1).float().abs().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.finfo(logits.dtype).eps * torch.exp2(torch.floor(torch.log2(best)))


def _rounding_noise(logits: Tensor, num_layers: int) -> float:
    """How far rounding the residual stream alone moves logits [rows, vocabulary], in nats.

    Both additions of a layer round it, and what they add was rounded before: by about a quarter of eps together, in a
    direction of its own each time. That is a random walk, as long as the square root of its steps. Logits err in
    proportion to their spread.
    """
    relative = torch.finfo(logits.dtype).eps / 4 * math.sqrt(2 * num_layers)
    return relative * float(logits.float().std(dim=-1).mean())


def _cache_error(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Largest relative error of a row's keys or values; NaN when there is one anywhere.

    Keys and values may be zero, as those of a padding token that was never trained.
    """
    errors = []
    for e, a in zip(expected, actual, strict=True):
        lengths = e.float().flatten(2).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        errors.append(((a.float() - e.float()).flatten(2).norm(dim=-1) / lengths).max())
    return float(torch.stack(errors).max())
