"""The work that rollout benchmarks compare, as every system gets it: prompts, their limits, the requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmark_setup import compose, write_json

from cbexp.config import ExperimentConfig
from cbexp.dataset.prompts import load_prompts
from cbexp.metrics import workload_hash
from cbexp.model.architecture import causal_model_class
from cbexp.planning.plan import RunPlan, build_plan


class UnlikeWorkError(Exception):
    """A system did other work than was asked for, so that its time says nothing."""


@dataclass(frozen=True)
class Workload:
    """`prompt_ids` and `max_new_tokens` have one entry a request, in the order of submission."""

    name: str
    prompt_ids: list[list[int]]
    max_new_tokens: list[int]
    max_requests_per_batch: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompt_ids))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_new_tokens)

    @property
    def digest(self) -> str:
        return workload_hash(self.prompt_ids, self.max_new_tokens, {"ignore_eos": True})

    def write(self, path: Path) -> None:
        """Write what `vllm_rollout.py` reads."""
        write_json(path, asdict(self))

    def check_lengths(self, system: str, rounds: Sequence[Sequence[int]]) -> None:
        """Raise `UnlikeWorkError` unless in each round every request got as many tokens as it was to get."""
        for index, lengths in enumerate(rounds):
            if list(lengths) != self.max_new_tokens:
                raise UnlikeWorkError(
                    f"{system}, {self.name}, round {index}: {len(lengths)} requests with {sum(lengths)} tokens, and "
                    f"{len(self.max_new_tokens)} with {self.num_output_tokens} were asked for (each its own number)."
                )


def build_workload(name: str, overrides: Sequence[str]) -> tuple[Workload, ExperimentConfig, RunPlan]:
    """The workload of the experiment `name`, with the configuration and the plan that it comes from."""
    config = compose([f"experiment={name}", "driver=sync", *overrides])
    if not config.sampling.ignore_eos:
        raise UnlikeWorkError(f"{name} ends at EOS: systems compare on sampling.ignore_eos=true alone.")
    plan = build_plan(config)
    architecture, num_generations = plan.architecture, config.dataset.num_generations
    eos = architecture.eos_token_id
    special_ids = {
        architecture.bos_token_id,
        architecture.pad_token_id,
        *(eos if isinstance(eos, list) else [eos]),
    }
    prompts = load_prompts(config.dataset, None, architecture.vocab_size, config.seed, special_ids - {None})
    workload = Workload(
        name=name,
        prompt_ids=[ids for ids in prompts.prompt_ids for _ in range(num_generations)],
        max_new_tokens=[limit for limit in plan.limits for _ in range(num_generations)],
        max_requests_per_batch=plan.max_requests_per_batch,
    )
    return workload, config, plan


def write_model_folder(folder: Path, config: ExperimentConfig, plan: RunPlan) -> None:
    """Write the config.json of a model with random weights, its rotary settings in the form that all versions read."""
    values: dict[str, Any] = dict(config.model.architecture)
    rotary = dict(values.pop("rope_parameters", None) or {})
    theta = rotary.pop("rope_theta", None)
    if theta is not None:
        values["rope_theta"] = theta
    values["rope_scaling"] = None if rotary.get("rope_type", "default") == "default" else rotary
    values["architectures"] = [causal_model_class(plan.architecture).__name__]
    values["torch_dtype"] = str(plan.dtype).removeprefix("torch.")
    write_json(folder / "config.json", values)
