"""One job: load, build, warm up, run the timed rounds, and write down every round before the next one starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from cbexp import metrics
from cbexp.artifacts import RunDirectory
from cbexp.dataset.prompts import PromptSet, load_prompts
from cbexp.display import ProgressDisplay
from cbexp.engine import RolloutDriver
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.types import Sampling
from cbexp.environment import reset_peak_memory
from cbexp.errors import RequestsFailedError, RescoringError
from cbexp.factory import build_driver, resolve_stop_ids
from cbexp.metrics import RequestRecord, RooflineInputs, RoundRecord, RunDescription
from cbexp.model.loading import LoadedModel, describe_model, load_model, load_tokenizer
from cbexp.planning.compile_cache import compile_environment, describe_compile_cache, explaining_full_cache
from cbexp.planning.plan import RunPlan
from cbexp.planning.roofline import measure_roofline
from cbexp.rescoring import (
    RescoringSample,
    choose_sample,
    describe_none,
    describe_rescoring,
    list_details,
)
from cbexp.rounds import RoundResult, RoundRunner, describe_failures, measure_round_memory
from cbexp.run_description import describe_run
from cbexp.tracking import Tracker

T = TypeVar("T")


class Job:
    """Runs one configuration and keeps what the summary needs. Use as a context manager: leaving it closes the driver.

    `durations_s` has the seconds of loading, warming up and rescoring, which no round's clock includes.
    """

    def __init__(
        self,
        plan: RunPlan,
        directory: RunDirectory,
        tracker: Tracker,
        display: ProgressDisplay,
    ) -> None:
        self._config = plan.config
        self._plan = plan
        self._directory = directory
        self._tracker = tracker
        self._display = display
        self._resources = ExitStack()
        self._runner: RoundRunner | None = None
        self._rounds: list[RoundRecord] = []
        self._requests: list[RequestRecord] = []
        self._num_written = 0
        self._last_completions: Sequence[dict[str, Any]] = []
        self._sample = RescoringSample(())
        self._roofline: RooflineInputs | None = None
        self._compile_cache: dict[str, Any] | None = None
        self.durations_s: dict[str, float] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._runner = None
        with deferring_interrupts():
            self._resources.close()

    def run(self) -> dict[str, Any]:
        """Do all of it; returns the summary. Rounds that have ended are on disk by then, whatever happens later.

        Raises:
            RequestsFailedError: a request failed or was lost, so that throughput would be of unequal work.
            RescoringError: what was generated is not what the model's own forward makes of the prompts.
        """
        config = self._config
        tokenizer = self._timed("load_tokenizer", lambda: self._load_tokenizer())
        # Text is read before the weights, so that a bad file costs seconds. Random ids keep clear of special ones, and
        # only the loaded model tells those.
        prompts = self._load_prompts(tokenizer) if tokenizer is not None else None
        loaded = self._timed("load_model", self._load_model)
        if prompts is None:
            prompts = self._load_prompts(None, loaded.special_token_ids)
        if loaded.device.type == "cuda":
            self._roofline = self._timed(
                "measure_bandwidth", lambda: measure_roofline(self._plan, loaded.model)
            )
        driver = self._set_up_driver(loaded, prompts, tokenizer)
        for index in range(config.num_warmup_rounds + config.num_rounds):
            self._run_round(index, loaded, driver)
        self._write_engine(driver)
        self._tracker.log_completions(self._last_completions)
        description = describe_run(self._plan, loaded, prompts, driver.resolved)
        rescoring = self._rescore(loaded, prompts, driver)
        return self._summarize(description, driver, rescoring)

    def save_interrupted_round(self) -> int:
        """Write down what a broken-off round had produced; returns how many of its requests had finished."""
        result = self._runner.collect_partial() if self._runner is not None else None
        if result is None:
            return 0
        index = self._num_written
        requests = _summarize_requests(index, result)
        self._directory.append_interrupted_round(requests, _completion_rows(index, result))
        return sum(request.is_finished for request in requests)

    def _load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Random token ids need no tokenizer, so that a synthetic run needs no files at all."""
        if self._config.dataset.kind == "synthetic":
            return None
        return load_tokenizer(self._config.model)

    def _load_model(self) -> LoadedModel:
        """Without weights for a driver that loads them itself: the device's memory is to be all its own."""
        config = self._config
        if self._plan.kind.own_process:
            return describe_model(config.model)
        model = replace(config.model, attn_implementation=self._plan.attention.implementation)
        return load_model(model, config.adapter, config.seed)

    def _load_prompts(
        self, tokenizer: PreTrainedTokenizerBase | None, special_ids: Collection[int] = ()
    ) -> PromptSet:
        config, vocab_size = self._config, int(self._plan.architecture.vocab_size)
        return self._timed(
            "load_prompts",
            lambda: load_prompts(config.dataset, tokenizer, vocab_size, config.seed, special_ids),
        )

    def _set_up_driver(
        self, loaded: LoadedModel, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase | None
    ) -> RolloutDriver:
        """Build the driver, and let it compile and capture before the first round."""
        config, plan = self._config, self._plan
        if plan.uses_compile_cache:
            self._resources.enter_context(compile_environment(config.compile, plan.compile_mode))
        driver = self._timed("build_driver", lambda: self._build_driver(loaded, prompts, tokenizer))
        self._runner = RoundRunner(
            driver,
            prompts,
            tokenizer,
            plan.limits,
            config.dataset.num_generations,
            loaded.device,
            plan.kind.process_of(driver),
        )
        self._sample = RescoringSample(
            choose_sample(config.rescore, config.num_rounds, self._runner.num_requests, config.seed)
        )
        with explaining_full_cache(config.compile) if plan.uses_compile_cache else nullcontext():
            self._timed("driver_warmup", driver.warmup)
        self._compile_cache = describe_compile_cache() if plan.uses_compile_cache else None
        self._display.print_set_up(driver.compile_stats, self._compile_cache)
        return driver

    def _build_driver(
        self, loaded: LoadedModel, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase | None
    ) -> RolloutDriver:
        eos_token_ids, pad_token_id = resolve_stop_ids(self._config, tokenizer, loaded)
        self._display.print_stop_ids(eos_token_ids, pad_token_id)
        driver = build_driver(
            self._plan,
            loaded,
            prompts,
            eos_token_ids,
            pad_token_id,
            tokenizer=tokenizer,
            on_step=self._display.on_step if self._display.is_live else None,
            log_path=self._directory.path / f"{self._plan.kind.name}.log",
            on_progress=self._display.show_progress,
        )
        self._resources.callback(driver.close)
        self._display.print_cache(driver.resolved)
        self._write_engine(driver)
        return driver

    def _run_round(self, index: int, loaded: LoadedModel, driver: RolloutDriver) -> None:
        assert self._runner is not None  # built just before; for the type checker
        is_warmup = index < self._config.num_warmup_rounds
        reset_peak_memory(loaded.device)
        with self._display.showing_round(index, is_warmup, self._runner.num_requests):
            result = self._runner.run()
        requests = _summarize_requests(index, result)
        record = metrics.summarize_round(
            index,
            is_warmup,
            result.start_s,
            result.end_s,
            requests,
            driver.steps,
            measure_round_memory(self._plan.kind.process_of(driver), loaded.device),
        )
        self._rounds.append(record)
        self._requests += requests
        steps = metrics.step_rows(index, result.start_s, driver.steps)
        rows = _completion_rows(index, result)
        with deferring_interrupts():
            self._directory.append_round(record, requests, steps, rows)
            self._runner.forget()
            self._num_written += 1
        self._tracker.log_round(record, driver.steps)
        self._last_completions = rows
        self._display.print_round(record)
        failure = describe_failures(result)
        if failure is not None:
            raise RequestsFailedError(f"Round {index}: {failure}.")
        self._sample.keep(index - self._config.num_warmup_rounds, index, result)

    def _rescore(self, loaded: LoadedModel, prompts: PromptSet, driver: RolloutDriver) -> dict[str, Any]:
        """What the model's own forward says of a sample of the completions, for the summary; closes the driver."""
        config = self._config
        if self._plan.kind.own_process:
            return describe_none(f"driver={config.driver.name} has the model in a process of its own")
        if not self._sample.kept:
            return describe_none(f"rescore.completions={config.rescore.completions}")
        sampling = Sampling(**driver.resolved["sampling"])
        driver.close()  # there must be memory for a forward, and its cache may have it
        rescoring = self._timed(
            "rescore",
            lambda: self._sample.rescore(
                loaded, prompts.prompt_ids, config.dataset.num_generations, sampling
            ),
        )
        summary = describe_rescoring(rescoring, config.driver.name)
        self._directory.write_rescoring(list_details(rescoring, summary))
        problem = rescoring.find_problem()
        if problem is not None:
            raise RescoringError(f"Rescoring: {problem} The run's records are kept, with rescoring.json.")
        return summary

    def _write_engine(self, driver: RolloutDriver) -> None:
        values: dict[str, Any] = {"plan": self._plan.to_dict(), "driver": driver.resolved}
        values |= {"compile_stats": driver.compile_stats, "compile_cache": self._compile_cache}
        self._directory.write_engine(values)

    def _summarize(
        self, description: RunDescription, driver: RolloutDriver, rescoring: dict[str, Any]
    ) -> dict[str, Any]:
        cache_bytes = None if self._compile_cache is None else self._compile_cache["num_bytes"]
        return metrics.summarize_run(
            description,
            self._rounds,
            self._requests,
            self.durations_s,
            self._roofline,
            self._plan.warnings,
            driver.compile_stats | {"compile_cache_bytes": cache_bytes},
            [asdict(setting) for setting in self._plan.idle],
            rescoring,
        )

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        start_s = time.perf_counter()
        with self._display.showing_phase(name):
            result = work()
        self.durations_s[name] = time.perf_counter() - start_s
        return result


def _summarize_requests(index: int, result: RoundResult) -> list[RequestRecord]:
    return metrics.summarize_requests(
        index, result.completions, result.request_ids, result.verdicts, result.limits
    )


def _completion_rows(index: int, result: RoundResult) -> Sequence[dict[str, Any]]:
    return metrics.summarize_completions(
        index, result.completions, result.request_ids, result.texts, result.verdicts
    )
