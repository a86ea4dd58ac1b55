"""Whether a model that is driven on a paged cache computes what its own forward computes without one.

Many architectures take a paged cache on paper only, and some compute something else on it without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbexp.engine.borrow import borrowed_for_inference, exclusive_use
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.requests import PromptGroup, RequestLimits
from cbexp.engine.shadow import Shadow
from cbexp.engine.support import unsupported
from cbexp.engine.types import CBSyncConfig, UnsupportedModelError

# Two rows of different lengths: what a model computes once for a batch is wrong for one of them. The longer one has at
# least so many tokens, and half a block beyond the first: half precision shows it when attention forgets those.
SHORT_PROMPT = 3
MIN_LONG_PROMPT = 128
NUM_NEW_TOKENS = 4
# What rounding may do at any position. Random models of 80 layers reach 2e-5 in float32, those of 32 experts 5e-4.
MAX_DIFFERENCE = 1e-3
# What it may do in half precision at most positions of a row; at the others it may choose another expert. Random dense
# models of 80 layers reach 0.23.
MAX_MEDIAN_IN_HALF_PRECISION = 0.25
# Logits that are nearly equal have no length to speak of: what differs by so many of their roundings is within bounds.
ROUNDINGS_WITHIN_BOUND = 8
# A model that makes more of rounding than that is compared with what it makes of its own embeddings, rounded anew.
# Right ones reach 1.4 of it (random experts, 24 and 80 layers), and DiffLlama in bfloat16 7 at the least.
MAX_TIMES_ROUNDING = 3


# Generates as the settings say: the tokens of each prompt with what it is continued with.
Generate = Callable[[CBSyncConfig, list[PromptGroup]], list[tuple[int, ...]]]


def require_own_forward(
    model: PreTrainedModel,
    config: CBSyncConfig,
    limits: RequestLimits,
    own_attention: str | None,
    generate: Generate,
    shadow: Shadow | None = None,
) -> None:
    """Have `generate` run two small prompts with the attention of `config`, and compare with the model's own forward.

    `own_attention`: what the model was loaded with, where it works on a paged cache. `shadow`: what `generate` runs on.

    Raises:
        UnsupportedModelError: either forward fails, or they differ. It says whether `own_attention` would do. Running
            out of memory is no such failure.
    """
    try:
        _check(model, config, limits, generate, shadow)
    except UnsupportedModelError as error:
        if own_attention is None or not config.has_engine_attention:
            raise
        try:
            _check(model, replace(config, attn_implementation=own_attention), limits, generate, shadow)
        except UnsupportedModelError:
            raise error from None
        raise UnsupportedModelError(
            f"{error} Use attn_implementation={own_attention!r}, which the model was loaded with."
        ) from error


def _check(
    model: PreTrainedModel,
    config: CBSyncConfig,
    limits: RequestLimits,
    generate: Generate,
    shadow: Shadow | None,
) -> None:
    groups = _build_trial_groups(limits, config.page_size)
    settings = replace(
        config,
        num_blocks=None,
        max_batch_tokens=max(config.page_size, sum(len(group.prompt_ids) for group in groups)),
        max_requests_per_batch=len(groups),
        max_burst=1,
        allow_block_sharing=False,
        scheduler="fifo",
        compile_mode="eager",
        batch_shape="full",
        buckets=None,
        fusion="none",
        self_check=False,
        fp32_head=False,
    )
    with exclusive_use(model):
        try:
            with (
                _refusing(model, "its forward fails on a paged cache"),
                _recorded_logits(model, len(groups)) as logits,
            ):
                token_ids = generate(settings, groups)
        except UnsupportedModelError:
            if _has_finite_logits(model, groups, shadow):
                raise
            return  # the model's own affair: its requests fail, and say so
        with (
            _refusing(model, "its own forward fails without a cache"),
            borrowed_for_inference(model, model.config._attn_implementation, shadow),
        ):
            difference = _find_difference(model, token_ids, logits)
    if difference is not None:
        raise unsupported(model, difference)


@contextmanager
def _refusing(model: PreTrainedModel, what_fails: str) -> Iterator[None]:
    """Make an `UnsupportedModelError` of any error in the body, but of running out of memory."""
    try:
        yield
    except Exception as error:
        # The allocator of CPUs raises a plain RuntimeError.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise unsupported(model, f"{what_fails} ({type(error).__name__}: {first_line})") from error


def _build_trial_groups(limits: RequestLimits, page_size: int) -> list[PromptGroup]:
    """Prompts of known tokens, the longest first, shorter where the model has few positions."""
    prompt_lengths = max(MIN_LONG_PROMPT, page_size + page_size // 2), SHORT_PROMPT
    num_fed = prompt_lengths[0] + NUM_NEW_TOKENS - 1  # the last token is never fed back
    if limits.positions.count is not None:
        num_fed = max(1, min(num_fed, limits.positions.count))
    num_new = min(NUM_NEW_TOKENS, num_fed)
    lengths = [min(length, num_fed - num_new + 1) for length in prompt_lengths]
    return [
        PromptGroup(
            numbers=range(row, row + 1),
            prompt_ids=tuple((row + 3 + 7 * i) % limits.vocab_size for i in range(length)),
            max_new_tokens=num_new,
            eos_token_ids=(),
            submitted_s=time.perf_counter(),
        )
        for row, length in enumerate(lengths)
    ]


@contextmanager
def _recorded_logits(model: PreTrainedModel, num_requests: int) -> Iterator[list[Tensor]]:
    """The logits [rows, vocab_size] of each batch and each step that the model runs in the body, of its requests."""
    logits: list[Tensor] = []

    def record(_model: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        rows = output.logits.flatten(0, 1)
        if len(rows) > num_requests:  # of a batch's every token
            rows = rows[kwargs["logits_indices"][:num_requests]]
        logits.append(rows.clone())

    with _hooked(model, record, with_kwargs=True):
        yield logits


def _find_difference(
    model: PreTrainedModel, token_ids: Sequence[Sequence[int]], logits: Sequence[Tensor]
) -> str | None:
    """How far `logits`, as recorded, are from those of the plain forward of `model`, with the attention that it has.

    Half a sentence; None where rounding may do that. `token_ids`: each row's prompt, and what was made of its logits.
    """
    expected = _run_plainly(model, token_ids, len(logits))
    difference, bound = _summarize(model, expected, torch.stack(list(logits), dim=1))
    if difference <= bound:
        return None
    with _rounded_embeddings(model):
        rounded = _run_plainly(model, token_ids, len(logits))
    bound = max(bound, MAX_TIMES_ROUNDING * _summarize(model, expected, rounded)[0])
    if difference <= bound:
        return None
    return (
        f"on a paged cache its logits differ by {difference:.2g} of their length from those of its own forward "
        f"without one, where rounding makes {bound:.2g} at most"
    )


def _summarize(model: PreTrainedModel, expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """The difference of logits [rows, positions, vocab_size] that counts, and its bound."""
    if _rounds_coarsely(model):
        differences = _relative_differences(expected, actual, MAX_MEDIAN_IN_HALF_PRECISION)
        return float(differences.median(dim=-1).values.max()), MAX_MEDIAN_IN_HALF_PRECISION
    return float(_relative_differences(expected, actual, MAX_DIFFERENCE).max()), MAX_DIFFERENCE


def _rounds_coarsely(model: PreTrainedModel) -> bool:
    """Whether products are of ten bits or less, as in half precision, or may be, as in TF32."""
    if model.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return True
    return model.dtype not in (torch.float32, torch.float64)


def _run_plainly(model: PreTrainedModel, token_ids: Sequence[Sequence[int]], num_last: int) -> Tensor:
    """Logits [rows, num_last, vocab_size], row by row, of the tokens before the last one, which was never fed."""
    rows = []
    for ids in token_ids:
        output = cast(Any, model)(input_ids=torch.tensor([ids[:-1]], device=model.device), use_cache=False)
        rows.append(output.logits[0, -num_last:])
    return torch.stack(rows)


def _has_finite_logits(model: PreTrainedModel, groups: Sequence[PromptGroup], shadow: Shadow | None) -> bool:
    with (
        _refusing(model, "its own forward fails without a cache"),
        borrowed_for_inference(model, model.config._attn_implementation, shadow),
    ):
        # The last token is not fed.
        return bool(_run_plainly(model, [(*group.prompt_ids, 0) for group in groups], 1).isfinite().all())


@contextmanager
def _rounded_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """Move each number of the embeddings by about as much as rounding does, the next one the other way."""

    def move(_module: Any, _args: Any, output: Tensor) -> Tensor:
        signs = 1 - 2 * (torch.arange(output.shape[-1], device=output.device) % 2)
        return output + output * signs * torch.finfo(output.dtype).eps

    with _hooked(model.get_input_embeddings(), move):
        yield


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., Any], **options: bool) -> Iterator[None]:
    """Run the body with a forward hook, which no interrupt leaves behind."""
    with ExitStack() as hooks:
        with deferring_interrupts():
            hooks.enter_context(module.register_forward_hook(hook, **options))
        yield


def _relative_differences(expected: Tensor, actual: Tensor, bound: float) -> Tensor:
    """Of each position, the length of what differs by that of the expected logits; both [..., vocab_size].

    The mean of a position's logits counts for nothing, but where there is nothing else: what differs is at least held
    against a length of which `ROUNDINGS_WITHIN_BOUND` make the bound. Logits that are not finite are the model's own
    affair.
    """
    rounding = torch.finfo(expected.dtype).eps * expected.double().norm(dim=-1)
    least = ROUNDINGS_WITHIN_BOUND / bound * rounding
    expected, actual = (
        logits.double() - logits.double().mean(-1, keepdim=True) for logits in (expected, actual)
    )
    lengths = expected.norm(dim=-1).clamp(min=least).clamp(min=torch.finfo(torch.float64).tiny)
    differences = (actual - expected).norm(dim=-1) / lengths
    return torch.where(lengths.isfinite(), differences, 0.0)
