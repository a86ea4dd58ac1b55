"""Shared by the benchmark scripts: configurations composed like the command line's, and drivers for timing steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cbexp.cli.command_line import conf_dir
from cbexp.cli.composer import parse_arguments, register_job_folder
from cbexp.cli.preflight import check_command
from cbexp.config import ExperimentConfig, register_schema
from cbexp.dataset.prompts import load_prompts
from cbexp.engine import CBSyncConfig, SyncCBDriver
from cbexp.engine.roofline import StepBytes, decode_step_bytes, measure_read_bandwidth
from cbexp.environment import release_memory
from cbexp.factory import build_driver
from cbexp.model.device import resolve_device
from cbexp.model.loading import LoadedModel, load_model
from cbexp.planning.compile_cache import compile_environment
from cbexp.planning.plan import RunPlan, build_plan

PAGE_SIZE = CBSyncConfig.page_size


@dataclass(frozen=True)
class StepSetUp:
    """A loaded model and its driver, ready to time steps; `bandwidth_bytes_per_s` is None on a CPU."""

    plan: RunPlan
    loaded: LoadedModel
    driver: SyncCBDriver
    bandwidth_bytes_per_s: float | None

    def count_bytes(self, batch: int, context: int) -> StepBytes:
        """The bytes that a step must read."""
        params = dict(self.loaded.model.named_parameters())
        return decode_step_bytes(self.loaded.architecture, params, batch, context)

    def floor_s(self, batch: int, context: int) -> float | None:
        """Seconds of a step at the memory limit; None where the bandwidth is not known."""
        if self.bandwidth_bytes_per_s is None:
            return None
        return self.count_bytes(batch, context).total_bytes / self.bandwidth_bytes_per_s


def compose(overrides: Sequence[str]) -> ExperimentConfig:
    """The configuration that `python -m cbexp OVERRIDES` would run."""
    register_schema()
    register_job_folder()
    return check_command(parse_arguments(list(overrides)), conf_dir()).jobs[0].config


@contextmanager
def opened_for_steps(
    model: str,
    compile_mode: str,
    shapes: Sequence[tuple[int, int]],
    num_steps: int,
    overrides: Sequence[str],
) -> Iterator[StepSetUp]:
    """A driver with a bucket for each batch and a cache for the largest of `shapes` (batch, context)."""
    config = compose(_step_overrides(model, compile_mode, shapes, num_steps) + list(overrides))
    plan = _plan_with_notice(config)
    with ExitStack() as resources:
        resources.callback(release_memory)
        loaded = load_model(config.model, config.adapter, config.seed)
        vocab_size, special_ids = loaded.vocab_size, loaded.special_token_ids
        bandwidth = measure_read_bandwidth(plan.device) if plan.device.type == "cuda" else None
        prompts = load_prompts(config.dataset, None, vocab_size, config.seed, special_ids)
        if plan.uses_compile_cache:
            resources.enter_context(compile_environment(config.compile, plan.compile_mode))
        driver = build_driver(plan, loaded, prompts, (), 0)
        resources.callback(driver.close)
        assert isinstance(driver, SyncCBDriver)
        yield StepSetUp(plan, loaded, driver, bandwidth)


def _plan_with_notice(config: ExperimentConfig) -> RunPlan:
    """The plan; on a CPU after a warning that large models take long there."""
    if resolve_device(config.model.device).type == "cpu":
        print(
            "no CUDA device: steps run on the CPU, where the models named here take minutes and more memory than most "
            "have; --override model.architecture.num_hidden_layers=2 makes a small one",
            file=sys.stderr,
            flush=True,
        )
    return build_plan(config)


def _step_overrides(
    model: str, compile_mode: str, shapes: Sequence[tuple[int, int]], num_steps: int
) -> list[str]:
    """Settings with room for each shape. The prompts only set the number of requests and never run."""
    batches = sorted({batch for batch, _ in shapes})
    longest = max(context for _, context in shapes) + num_steps
    num_pages = max(batch * -(-(context + num_steps) // PAGE_SIZE) for batch, context in shapes)
    return [
        *("driver=sync", f"model={model}", "model.init=random", f"compile={compile_mode}"),
        *("dataset=synthetic_short", "dataset.min_length=1", "dataset.max_length=1"),
        *(f"dataset.num_prompts={batches[-1]}", f"sampling.max_new_tokens={longest}"),
        *("sampling.ignore_eos=true", "cache.block_sharing=off", f"cache.page_size={PAGE_SIZE}"),
        f"cache.num_tokens={(num_pages + 1) * PAGE_SIZE}",
        f"cache.max_requests_per_batch={batches[-1]}",
        f"compile.buckets={batches}".replace(" ", ""),
        f"compile.max_burst={num_steps}",
    ]


def is_asked_for(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether `name` matches one of the patterns of `--only` (as file names do: *, ?), or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def write_json(path: Path, content: Any) -> None:
    """Write the whole file at once, so that an interruption leaves the last state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)
