"""Scores tokens that a driver returned by the model's own forward, and says how far the two are from one another.

The forward is that of training: transformers' own, without a cache, in the autocast that the caller has put around it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbexp.engine.borrow import ABSENT, Changes, exclusive_use, list_modules
from cbexp.engine.requests import check_token_ids
from cbexp.engine.roofline import EXPERT_MARK
from cbexp.engine.shadow import Shadow, find_autocast_dtype
from cbexp.engine.support import list_wrappers, require_supported_model
from cbexp.engine.types import EngineError, Sampling
from cbexp.engine.wrapped_forward import plain_forward

# Sequences whose importance ratio is above this get no gradient: TRL's default.
RATIO_CAP = 3.0
LARGEST_RATIO = 1e30  # there is no infinity in JSON
# Above this, the driver samples from another distribution than the one that is trained.
MAX_KL = 0.015
# Logits that are in memory at once, in float32 and in the model's dtype.
MAX_LOGITS = 2**25


@dataclass(frozen=True)
class Rounding:
    """What rounding may do to greedy tokens, in shares of the spread of a token's logits, of models up to 36 layers.

    The spread is the standard deviation over the vocabulary: logits err in proportion to it, so that a model with flat
    logits is held to as much as one with steep ones. The bounds grow with the layers from 36 on.

    `lag`: how far a token may lie below the best one, beside two spacings of the logits, since each side rounds two
    logits by half of one. `error`: the deviation of the error that a difference of two logits may have, for the mean
    lag. Right tokens of random models in bfloat16 reach 0.19 and 0.06 (Qwen3-4B's shape on an H200), and in 80 layers
    0.88 and 0.13 (small and steep); wrong ones lie some 4 below.
    """

    lag: float
    error: float


_IN_SINGLE = Rounding(lag=1e-3, error=1e-4)
_IN_HALF = Rounding(lag=0.5, error=0.1)
ROUNDING = {
    torch.float64: _IN_SINGLE,
    torch.float32: _IN_SINGLE,
    torch.bfloat16: _IN_HALF,
    torch.float16: _IN_HALF,
}
NUM_LAYERS = 36
# In half precision rounding may choose another expert for a token, which is then as far off as it likes.
MAX_REROUTED_SHARE, MIN_REROUTED = 0.05, 2


@dataclass(frozen=True)
class RescoredCompletion:
    """One completion's tokens by the forward: float64 [tokens] on the CPU each, in nats.

    `lags`: how much less likely than the best token, at temperature 1; `lag_bounds`: what rounding may make of each,
    and `mean_lag_bounds` of their mean. `num_rerouted`: tokens that may be beyond their bound (0: none may).
    `differences`: log-probability by the forward minus the driver's; None where the driver gave none.
    """

    name: str
    lags: Tensor
    lag_bounds: Tensor
    mean_lag_bounds: Tensor
    num_rerouted: int
    differences: Tensor | None

    @property
    def ratio(self) -> float | None:
        """Importance ratio of the sequence, as TRL corrects by it; at most `LARGEST_RATIO`."""
        return None if self.differences is None else min(float(self.differences.sum().exp()), LARGEST_RATIO)

    def find_problem(self) -> str | None:
        """The first greedy token that lies further below the best one than rounding explains, as a sentence."""
        is_wrong = self.lags > self.lag_bounds
        if int(is_wrong.sum()) <= self.num_rerouted:
            return None
        place = int(is_wrong.int().argmax())
        return (
            f"{self.name}: token {place} is less likely than the best one by {self.lags[place]:.3g} nats, where "
            f"rounding makes {self.lag_bounds[place]:.3g} at most; of {len(is_wrong)} tokens "
            f"{int(is_wrong.sum())} are beyond that."
        )


def rescore(
    model: Any,
    name: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> RescoredCompletion:
    """Run a prompt with its completion, at least one token of each, through the model's own forward.

    `model` is what the driver has, bare or in its wrappers: their autocast and PEFT's layers count, what compiles or
    talks to other ranks does not. It is in eval mode for the length of this. `logprobs` are the driver's, at
    `temperature` (0 is 1 here) over the whole vocabulary. `name` is for messages. Logits are there for some tokens at a
    time.

    Raises:
        EngineError: a token is outside the vocabulary, there are not as many log-probabilities as tokens, a
            log-probability or a logit is not finite, or another thread uses the model.
        UnsupportedModelError: the model is none that a driver takes.
    """
    base, wrappers = require_supported_model(model), list_wrappers(model)
    autocast_dtype = find_autocast_dtype(base.device.type, wrappers)
    dtype = Shadow(base, wrappers).find_dtype() or base.dtype  # what a driver runs in
    vocab_size = int(base.config.vocab_size)
    _check_tokens(f"{name}, prompt", prompt_ids, vocab_size)
    _check_tokens(f"{name}, completion", completion_ids, vocab_size)
    if logprobs is not None and len(logprobs) != len(completion_ids):
        raise EngineError(f"{name} has {len(completion_ids)} tokens and {len(logprobs)} log-probabilities.")
    # The last token is predicted and predicts nothing.
    input_ids = torch.tensor([[*prompt_ids, *completion_ids[:-1]]], device=base.device)
    targets = torch.tensor(completion_ids, device=base.device)
    with ExitStack() as stack:
        autocast = torch.autocast(
            base.device.type,
            autocast_dtype,
            enabled=autocast_dtype is not None,
            cache_enabled=False,  # which would be a second copy of the weights
        )
        for mode in (exclusive_use(base), torch.no_grad(), autocast, _plain(base)):
            stack.enter_context(mode)
        chunks = [
            _score(logits, target_ids, temperature or 1.0, dtype)
            for logits, target_ids in _run_in_chunks(base, input_ids, targets)
        ]
    own_logprobs, lags, spreads, spacings = torch.cat(chunks, dim=1).double().cpu()
    if not (own_logprobs.isfinite() & spreads.isfinite()).all():
        raise EngineError(f"{name}: the model's own logits are not finite; look at its weights.")
    differences = None if logprobs is None else own_logprobs - torch.tensor(logprobs, dtype=torch.float64)
    if differences is not None and not differences.isfinite().all():
        raise EngineError(f"{name}: a log-probability of the driver's is not finite.")
    rounding = _find_rounding(dtype)
    depth = max(1.0, base.config.num_hidden_layers / NUM_LAYERS)
    may_reroute = rounding is _IN_HALF and any(EXPERT_MARK in key for key, _ in base.named_parameters())
    return RescoredCompletion(
        name=name,
        lags=lags,
        lag_bounds=rounding.lag * depth * spreads + 2 * spacings,
        mean_lag_bounds=_bound_mean_lag(rounding.error * depth, spreads, spacings, vocab_size),
        num_rerouted=max(MIN_REROUTED, int(MAX_REROUTED_SHARE * len(lags))) if may_reroute else 0,
        differences=differences,
    )


def takes_best_tokens(sampling: Sampling) -> bool:
    """Whether each token is the one with the largest logit, as the model gives them."""
    is_changed = (
        sampling.repetition_penalty != 1 or sampling.min_new_tokens > 0 or sampling.suppress_token_ids
    )
    return sampling.temperature == 0 and not is_changed


@dataclass(frozen=True)
class Rescoring:
    """Completions of one driver, at least one, rescored: figures in nats, and what is wrong with them.

    `is_greedy`: each token was to be the most likely one, see `takes_best_tokens`.
    """

    completions: Sequence[RescoredCompletion]
    is_greedy: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(len(completion.lags) for completion in self.completions)

    @property
    def has_logprobs(self) -> bool:
        """Whether the driver gave log-probabilities of all."""
        return all(completion.differences is not None for completion in self.completions)

    @property
    def figures(self) -> dict[str, float]:
        """The figures of a summary: of greedy tokens, and of log-probabilities where the driver gave some.

        `max_lag` and `mean_lag`: how far a token lies below the best one; `not_best_share`: tokens that do at all.
        `kl` is `k3` of `details`; `max_logprob_difference` the largest, whatever its sign. `beyond_cap_share`:
        sequences whose importance ratio is above `RATIO_CAP`.
        """
        figures: dict[str, float] = {}
        if self.is_greedy:
            lags = self._all("lags")
            figures |= {"max_lag": float(lags.max()), "mean_lag": float(lags.mean())}
            figures["not_best_share"] = float((lags > 0).double().mean())
        if self.has_logprobs:
            ratios = torch.tensor([completion.ratio for completion in self.completions])
            figures["kl"] = self.details["k3"]
            figures["max_logprob_difference"] = float(self._all("differences").abs().max())
            figures["beyond_cap_share"] = float((ratios > RATIO_CAP).double().mean())
        return figures

    @property
    def details(self) -> dict[str, float]:
        """More of log-probabilities, where the driver gave some.

        `k1` and `k3` estimate how far the driver's distribution diverges from the forward's, from the tokens that it
        drew; `k1` may be negative (Schulman, Approximating KL Divergence, 2020).
        """
        if not self.has_logprobs:
            return {}
        differences = self._all("differences")
        return {
            "mean_logprob_difference": float(differences.abs().mean()),
            "k1": float(-differences.mean()),
            "k3": float((differences.expm1() - differences).mean()),
        }

    @property
    def bounds(self) -> dict[str, float]:
        """What `find_problem` holds the figures of the same names to; that of `max_lag` is each token's own.

        Of experts that rounding may exchange, a mean has no bound.
        """
        if not self.is_greedy:
            return {"kl": MAX_KL} if self.has_logprobs else {}
        if any(completion.num_rerouted for completion in self.completions):
            return {}
        return {"mean_lag": float(self._all("mean_lag_bounds").mean())}

    def find_problem(self) -> str | None:
        """What differs by more than rounding explains, as a sentence; None: nothing."""
        if self.is_greedy:
            problems = (completion.find_problem() for completion in self.completions)
            if problem := next(filter(None, problems), None):
                return problem
        figures = self.figures
        for name, bound in self.bounds.items():
            if not figures[name] <= bound:
                return (
                    f"{_MEANINGS[name]} {figures[name]:.3g} nats, where rounding makes {bound:.3g} at most."
                )
        return None

    def _all(self, name: str) -> Tensor:
        return torch.cat([getattr(completion, name) for completion in self.completions])


_MEANINGS = {
    "mean_lag": "tokens are less likely than the best one on average by",
    "kl": "the driver's distribution differs from that of the model's own forward by a KL divergence of",
}


def _bound_mean_lag(error: float, spreads: Tensor, spacings: Tensor, vocab_size: int) -> Tensor:
    """What rounding may make of the mean lag, for each token.

    A driver chooses another token when the best two are closer than its error, which then is no larger than that. Of
    normally distributed logits of spread s, the best of a vocabulary V leads by less than a small d with the
    probability d sqrt(2 ln V) / s; an error of variance v makes a mean lag of v / 4 times that density. The best tokens
    of trained models lead by more, so they lag less.
    """
    variances = (
        error * spreads
    ).square() + spacings.square() / 3  # four roundings by up to half a spacing each
    return variances * math.sqrt(2 * math.log(vocab_size)) / (4 * spreads.clamp(min=1e-9))


def _find_rounding(dtype: torch.dtype) -> Rounding:
    """TF32 has no more bits than half precision."""
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return ROUNDING[dtype] if is_exact or dtype == torch.float64 else _IN_HALF


def _check_tokens(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) == 0:
        raise EngineError(f"{name} is empty: there is nothing to rescore.")
    try:
        check_token_ids(name, token_ids, vocab_size)
    except ValueError as error:
        raise EngineError(str(error)) from None


def _score(logits: Tensor, target_ids: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Log-probabilities, lags, spreads and spacings, float32 [4, tokens]."""
    logits = logits.float()
    best, chosen = logits.amax(-1), logits.gather(1, target_ids[:, None])[:, 0]
    logprobs = chosen / temperature - (logits / temperature).logsumexp(-1)
    smallest = torch.finfo(torch.float32).tiny
    spacings = torch.finfo(dtype).eps * best.abs().clamp(min=smallest).log2().floor().exp2()
    return torch.stack([logprobs, best - chosen, logits.std(-1), spacings])


def _run_in_chunks(
    base: PreTrainedModel, input_ids: Tensor, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [tokens, vocab_size] and the ids that they predict, for some of `targets` at a time."""
    model: Any = base
    places = torch.arange(input_ids.shape[1] - len(targets), input_ids.shape[1], device=input_ids.device)
    if not _takes_logits_to_keep(base):
        yield model(input_ids=input_ids, use_cache=False).logits[0, places], targets
        return
    num_tokens = max(1, MAX_LOGITS // int(base.config.vocab_size))
    with _running_decoder_once(base):
        for kept, target_ids in zip(places.split(num_tokens), targets.split(num_tokens), strict=True):
            yield model(input_ids=input_ids, use_cache=False, logits_to_keep=kept).logits[0], target_ids


def _takes_logits_to_keep(base: PreTrainedModel) -> bool:
    """Whether its forward can leave out logits."""
    return (
        base.base_model is not base and "logits_to_keep" in inspect.signature(type(base).forward).parameters
    )


@contextmanager
def _running_decoder_once(base: PreTrainedModel) -> Iterator[None]:
    """Let the head run several times on what the layers below it make the first time.

    Only the model's own forward knows what it does with its head's output: scale it, or cap it.
    """
    decoder = base.base_model
    run = decoder.forward
    outputs: list[Any] = []

    def run_once(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(run(*args, **kwargs))
        return outputs[0]

    with _changed() as changes:
        changes.set(decoder.__dict__, "forward", run_once)
        yield


@contextmanager
def _plain(base: PreTrainedModel) -> Iterator[None]:
    """Have transformers' own forward, without dropout and gradient checkpointing, not compiled.

    Module by module, since a caller may keep parts in eval mode.
    """
    with _changed() as changes:
        if "forward" in base.__dict__:
            inner = plain_forward(base)
            changes.set(base.__dict__, "forward", ABSENT if inner is None else inner)
        for module in list_modules(base):
            if module.training:
                changes.set(module.__dict__, "training", False)
            if module._compiled_call_impl is not None:
                changes.set(module.__dict__, "_compiled_call_impl", ABSENT)
        yield


@contextmanager
def _changed() -> Iterator[Changes]:
    changes = Changes()
    try:
        yield changes
    finally:
        changes.undo()
