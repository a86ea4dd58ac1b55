"""Answers, before anything is loaded, what a job would take and what fits on this machine."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cbexp.config import ExperimentConfig
from cbexp.dataset.synthetic import draw_lengths
from cbexp.engine.settings import MAX_MEMORY_FRACTION
from cbexp.engine.sizing import count_blocks, estimate_cache_cost, format_gib, free_memory_bytes, measure_need
from cbexp.planning.cache_sizing import full_lengths, group_lengths, round_settings
from cbexp.planning.plan import RunPlan, resolve_plan

# Prompts of text are not read in a dry run; mathematics questions in chat form have 100 to 300 tokens.
ASSUMED_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class DryRunReport:
    """Bytes and tokens of a job. A request is counted at full length: prompt and all new tokens, in whole pages.

    Of a round's `num_requests`, up to `batch_requests` run at once. `cache_tokens_asked` is what was set, else what
    those need. `tokens_that_fit` are within `memory_fraction` of what is left of `free_bytes` after the weights, with a
    step's buffers; `requests_that_fit` run at once there, were they the longest. `advice` is empty when all fit.
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
    batch_requests: int
    cache_tokens_asked: int
    memory_fraction: float
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
            (
                "cache asked",
                f"{self._describe_cache(self.cache_tokens_asked)}, for {self.batch_requests:,} requests at once",
            ),
            (
                "cache fits",
                f"{self._describe_cache(self.tokens_that_fit)}, with a step's buffers in {self.memory_fraction:g} of "
                "what the weights leave",
            ),
            ("at once", f"{self.requests_that_fit:,} of the {self.num_requests:,} requests of a round"),
            *(("to lower", line) for line in self.advice),
            *(("warning", line) for line in self.warnings),
        ]

    def _describe_cache(self, num_tokens: int) -> str:
        return f"{num_tokens:,} tokens, {format_gib(num_tokens * self.kv_bytes_per_token)}"


def summarize_dry_run(config: ExperimentConfig) -> DryRunReport:
    """Return what `config` would take here; loads no weight and no prompt.

    Raises as `build_plan`, but for memory, which the report is about.
    """
    plan = resolve_plan(_without_hub(config))
    lengths, is_assumed = _prompt_lengths(config)
    need = measure_need(group_lengths(plan, lengths), plan.architecture, round_settings(plan, lengths))
    free_bytes = free_memory_bytes(plan.device)
    # A size that was set is held against what the engine takes at most.
    fraction = config.cache.max_memory_fraction if plan.cache_tokens is None else MAX_MEMORY_FRACTION
    tokens_that_fit = _tokens_that_fit(
        plan, need.batch_tokens, (free_bytes - plan.weights.num_bytes) * fraction
    )
    num_requests = len(lengths) * config.dataset.num_generations
    asked = plan.cache_tokens or need.num_blocks * plan.page_size
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
        longest_request_tokens=math.ceil((max(full_lengths(plan, lengths)) - 1) / plan.page_size)
        * plan.page_size,
        is_prompt_length_assumed=is_assumed,
        num_requests=num_requests,
        batch_requests=min(num_requests, plan.max_requests_per_batch),
        cache_tokens_asked=asked,
        memory_fraction=fraction,
        tokens_that_fit=tokens_that_fit,
        requests_that_fit=_count_fitting(
            plan, lengths, min(num_requests, plan.max_requests_per_batch), min(asked, tokens_that_fit)
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


def _tokens_that_fit(plan: RunPlan, batch_tokens: int, budget_bytes: float) -> int:
    if not plan.kind.has_paged_cache:
        return max(0, int(budget_bytes // plan.kv_bytes_per_token))
    settings, max_requests = plan.settings, plan.max_requests_per_batch
    cost = estimate_cache_cost(plan.architecture, plan.dtype, settings, batch_tokens, max_requests)
    return cost.tokens_within(budget_bytes) // plan.page_size * plan.page_size


def _count_fitting(plan: RunPlan, prompt_lengths: Sequence[int], num_requests: int, num_tokens: int) -> int:
    """How many of `num_requests` `num_tokens` hold at full length, the longest first."""
    blocks_of = partial(
        count_blocks,
        group_lengths(plan, prompt_lengths),
        plan.layout,
        plan.page_size,
        shares_blocks=plan.block_sharing,
    )
    possible = range(1, num_requests + 1)
    return bisect_right(possible, num_tokens // plan.page_size, key=lambda n: blocks_of(max_rows=n))


def _describe_sliding_layers(plan: RunPlan) -> str | None:
    layout = plan.layout
    if layout.num_sliding_layers == 0:
        return None
    return f"{layout.num_sliding_layers} of {layout.num_layers}, which keep the last {layout.sliding_window:,} tokens"


def _advise(plan: RunPlan, report: DryRunReport) -> list[str]:
    excess_bytes = report.weight_bytes - report.free_bytes
    if excess_bytes > 0:
        return [f"the model: its weights alone exceed the free memory by {format_gib(excess_bytes)}"]
    advice = []
    if plan.cache_tokens is not None and plan.cache_tokens > report.tokens_that_fit:
        advice.append(f"cache.num_tokens={plan.cache_tokens} to {report.tokens_that_fit} at most")
    if report.requests_that_fit == 0:
        advice.append("sampling.max_new_tokens or the prompts' lengths: not one request fits at full length")
    elif report.requests_that_fit < report.batch_requests:
        raised = "; or raise cache.max_memory_fraction" if plan.cache_tokens is None else ""
        advice.append(
            f"only to run {report.batch_requests} requests at once ({report.requests_that_fit} do, the others wait): "
            f"dataset.num_prompts, dataset.num_generations or sampling.max_new_tokens{raised}"
        )
    return advice
