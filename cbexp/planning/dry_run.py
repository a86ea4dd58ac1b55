"""Answers, before anything is loaded, what a job would take and what fits on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from cbexp.config import ExperimentConfig
from cbexp.dataset.synthetic import draw_lengths
from cbexp.model.memory import cache_tokens_needed, estimate_cache_cost, format_gib, free_memory_bytes
from cbexp.planning.cache_sizing import full_lengths
from cbexp.planning.plan import RunPlan, resolve_plan

# Prompts of text are not read in a dry run; mathematics questions in chat form have 100 to 300 tokens.
ASSUMED_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class DryRunReport:
    """Bytes and tokens of a job. A request is counted at full length: prompt and all new tokens, in whole pages.

    `cache_tokens_asked` is what was set, else what a round needs. `tokens_that_fit` are what is left of `free_bytes`
    after the weights, within `cache.max_memory_fraction`; `requests_that_fit` those that run at once, in their order,
    no more than a batch may have. `advice` is empty when everything fits.
    """

    model: str
    device: str
    dtype: str
    attn_implementation: str
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    sliding_layers: str | None
    free_bytes: int
    page_size: int
    longest_request_tokens: int
    is_prompt_length_assumed: bool
    num_requests: int
    cache_tokens_asked: int
    tokens_that_fit: int
    requests_that_fit: int
    advice: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return dataclasses.asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return label (at most 12 characters) and value of each line to print."""
        assumed = (
            f", prompts taken as {ASSUMED_PROMPT_TOKENS} tokens" if self.is_prompt_length_assumed else ""
        )
        sliding = [("sliding", self.sliding_layers)] if self.sliding_layers else []
        return [
            ("model", f"{self.model}, {self.num_parameters:,} parameters"),
            ("runs on", f"{self.device}, {self.dtype}, attention {self.attn_implementation}"),
            ("weights", format_gib(self.weight_bytes)),
            ("KV per token", f"{self.kv_bytes_per_token:,} bytes"),
            *sliding,
            ("free memory", format_gib(self.free_bytes)),
            (
                "request",
                f"at most {self.longest_request_tokens:,} tokens (pages of {self.page_size}{assumed})",
            ),
            ("cache asked", f"{self.cache_tokens_asked:,} tokens"),
            ("cache fits", f"{self.tokens_that_fit:,} tokens"),
            ("at once", f"{self.requests_that_fit:,} of the {self.num_requests:,} requests of a round"),
            *(("to lower", line) for line in self.advice),
            *(("warning", line) for line in self.warnings),
        ]


def summarize_dry_run(config: ExperimentConfig) -> DryRunReport:
    """Return what `config` would take here; loads no weight and no prompt.

    Raises as `build_plan`, but for memory, which the report is about.
    """
    plan = resolve_plan(_without_hub(config))
    lengths, is_assumed = _prompt_lengths(config)
    num_requests = len(lengths) * config.dataset.num_generations
    at_full_length = full_lengths(plan, lengths)
    needed = cache_tokens_needed(at_full_length, config.dataset.num_generations, plan.page_size)
    longest = cache_tokens_needed([max(at_full_length)], 1, plan.page_size)
    free_bytes = free_memory_bytes(plan.device)
    tokens_that_fit = _tokens_that_fit(plan, lengths, config.dataset.num_generations, free_bytes)
    asked = plan.cache_tokens or needed
    report = DryRunReport(
        model=_describe_model(config),
        device=str(plan.device),
        dtype=str(plan.dtype).removeprefix("torch."),
        attn_implementation=plan.attention.implementation,
        num_parameters=plan.weights.num_parameters,
        weight_bytes=plan.weights.num_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        sliding_layers=_describe_sliding_layers(plan),
        free_bytes=free_bytes,
        page_size=plan.page_size,
        longest_request_tokens=longest,
        is_prompt_length_assumed=is_assumed,
        num_requests=num_requests,
        cache_tokens_asked=asked,
        tokens_that_fit=tokens_that_fit,
        requests_that_fit=_count_fitting(
            plan, at_full_length, config.dataset.num_generations, min(asked, tokens_that_fit)
        ),
        advice=[],
        warnings=plan.warnings,
    )
    return dataclasses.replace(report, advice=_advise(plan, report))


def _describe_model(config: ExperimentConfig) -> str:
    name = config.model.name_or_path or config.model.name
    return f"{name} with random weights" if config.model.init == "random" else name


def _without_hub(config: ExperimentConfig) -> ExperimentConfig:
    """Take the architecture from the configuration where it is written there, so that nothing is fetched."""
    if not config.model.architecture:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, init="random"))


def _prompt_lengths(config: ExperimentConfig) -> tuple[list[int], bool]:
    """Each prompt's length, and whether it is assumed."""
    if config.dataset.kind == "synthetic":
        return draw_lengths(config.dataset, config.seed), False
    return [ASSUMED_PROMPT_TOKENS] * config.dataset.num_prompts, True


def _tokens_that_fit(
    plan: RunPlan, prompt_lengths: Sequence[int], num_generations: int, free_bytes: int
) -> int:
    budget_bytes = (free_bytes - plan.weights.num_bytes) * plan.config.cache.max_memory_fraction
    if not plan.kind.has_paged_cache:
        return max(0, int(budget_bytes // plan.kv_bytes_per_token))
    max_batch_tokens = min(plan.config.cache.max_batch_tokens, sum(prompt_lengths) * num_generations)
    cost = estimate_cache_cost(
        plan.architecture,
        plan.dtype,
        max_batch_tokens,
        plan.max_requests_per_batch,
        is_masked=plan.attention.is_masked,
    )
    return cost.tokens_within(budget_bytes) // plan.page_size * plan.page_size


def _count_fitting(
    plan: RunPlan, at_full_length: Sequence[int], num_generations: int, num_tokens: int
) -> int:
    """How many requests `num_tokens` hold at full length, in their order, up to the largest batch."""
    needs = (
        cache_tokens_needed([length], 1, plan.page_size)
        for length in at_full_length
        for _ in range(num_generations)
    )
    num_fitting = sum(total <= num_tokens for total in accumulate(needs))
    return min(num_fitting, plan.max_requests_per_batch)


def _describe_sliding_layers(plan: RunPlan) -> str | None:
    layout = plan.layout
    if layout.num_sliding_layers == 0:
        return None
    return (
        f"{layout.num_sliding_layers} of {layout.num_layers}, which keep the last {layout.sliding_window:,} tokens: "
        "longer requests take less than said here"
    )


def _advise(plan: RunPlan, report: DryRunReport) -> list[str]:
    excess_bytes = report.weight_bytes - report.free_bytes
    if excess_bytes > 0:
        return [f"the model: its weights alone exceed the free memory by {format_gib(excess_bytes)}"]
    advice = []
    if plan.cache_tokens is not None and plan.cache_tokens > report.tokens_that_fit:
        advice.append(f"cache.num_tokens={plan.cache_tokens} to {report.tokens_that_fit} at most")
    if report.requests_that_fit == 0:
        advice.append("sampling.max_new_tokens or the prompts' lengths: not one request fits at full length")
    elif report.requests_that_fit < min(report.num_requests, plan.max_requests_per_batch):
        advice.append(
            f"only to run all requests at once ({report.requests_that_fit} do, the others wait): dataset.num_prompts, "
            "dataset.num_generations or sampling.max_new_tokens"
        )
    return advice
