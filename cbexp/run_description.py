"""What ran, for the summary: the configuration, as plan and driver have resolved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbexp import metrics
from cbexp.dataset.prompts import PromptSet
from cbexp.metrics import RunDescription
from cbexp.model.loading import LoadedModel
from cbexp.planning.plan import RunPlan


def describe_run(
    plan: RunPlan, loaded: LoadedModel, prompts: PromptSet, resolved: Mapping[str, Any]
) -> RunDescription:
    """Return the description of a run whose driver says `resolved` of its settings."""
    config = plan.config
    return RunDescription(
        name=config.name,
        model=config.model.name_or_path or config.model.name,
        dataset=config.dataset.name,
        backend=config.driver.name,
        device=str(plan.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        compile_mode=plan.compile_mode,
        fusion=str(resolved["fusion"]) if plan.has_engine_steps else None,
        batch_shape=plan.settings.batch_shape if plan.has_engine_steps else None,
        attn_impl=str(resolved["attn_implementation"]),
        lora_adapter=loaded.lora_adapter,
        num_prompts=len(prompts.prompt_ids),
        num_generations=config.dataset.num_generations,
        max_new_tokens=plan.max_new_tokens,
        has_limits_per_prompt=config.sampling.has_limits_per_prompt,
        is_fixed_length=config.sampling.is_fixed_length,
        do_sample=config.sampling.temperature > 0,
        sampling=_describe_sampling(plan),
        workload_hash=_hash_workload(plan, prompts, resolved),
    )


def _describe_sampling(plan: RunPlan) -> dict[str, Any]:
    sampling = plan.config.sampling
    return sampling.choice.in_effect | ({"logprobs": True} if sampling.logprobs else {})


def _hash_workload(plan: RunPlan, prompts: PromptSet, resolved: Mapping[str, Any]) -> str:
    config = plan.config
    sampling = {
        "do_sample": config.sampling.temperature > 0,
        **_describe_sampling(plan),
        "eos_token_ids": list(resolved["eos_token_ids"]),
        "num_generations": config.dataset.num_generations,
    }
    limits = plan.limits if config.sampling.has_limits_per_prompt else plan.max_new_tokens
    return metrics.workload_hash(prompts.prompt_ids, limits, sampling)
