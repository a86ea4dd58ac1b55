"""vLLM's offline engine as a driver: it runs in a worker process, where the round's clock runs too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbexp.drivers.inputs import DriverInputs
from cbexp.drivers.peer_sampling import logprob_columns, vllm_fields, vllm_takes_processed
from cbexp.drivers.registry import DRIVERS
from cbexp.drivers.vllm.device_memory import read_used_bytes
from cbexp.drivers.vllm.failures import describe_failure, describe_strange_answer, require_event
from cbexp.drivers.vllm.process import WorkerEndedError, WorkerMessageError, WorkerProcess
from cbexp.drivers.vllm.settings import build_vllm_config
from cbexp.drivers.vllm.start import VllmConfig, start_engine
from cbexp.engine.requests import PromptGroup, RequestBook, RequestLimits
from cbexp.engine.rollout_driver import RolloutDriver
from cbexp.engine.settings import resolve_decoding
from cbexp.engine.types import Completion, EngineError

WORKER = Path(__file__).with_name("worker.py")
NOT_MEASURED = {
    "steps": "vLLM does not show its steps to the caller of its offline engine",
    "roofline": "the fraction needs the times of steps, and measuring bandwidth would take memory beside vLLM",
    "allocated_memory": "vLLM allocates in processes of its own; peak_reserved_gib is what it took of the GPU in all",
}
NO_REQUEST_TIMES = (
    "vLLM keeps no times of requests unless asked to (driver.request_times=true), and gives all results at once: each "
    "latency is the round's"
)


def build(inputs: DriverInputs) -> VllmDriver:
    """Return the driver, whose `warmup` starts vLLM.

    Raises:
        ConfigError: vLLM's interpreter or path is not there, or the longest request exceeds the cache.
        ModelError: the model's files are not there and cannot be fetched.
    """
    return VllmDriver(build_vllm_config(inputs), inputs.on_progress)


class VllmDriver(RolloutDriver):
    """vLLM's `LLM.generate`, all requests of a drive at once; implements `RolloutDriver`.

    `warmup` (or the first drive) starts the worker, which takes minutes; one engine stays warm over all drives. With
    prefix caching it forgets the prompts of earlier drives before each one, as the synchronous driver does. After an
    error or Ctrl-C the worker is ended, and the next drive starts another. `on_progress` gets lines about a slow start.

    Raises, when it starts: `ConfigError` when vLLM or its interpreter is not there, `NotApplicableError` when vLLM
    finds no device of the kind, `MemoryBudgetError` when model or cache do not fit, `EngineError` for all else.
    """

    lost_error = "vLLM lost the request"

    def __init__(self, config: VllmConfig, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self._decoding = resolve_decoding(
            config.settings,
            None,
            config.model_defaults,
            config.request_limits.vocab_size,
            reads_text=config.request_limits.reads_text,
        )
        sampling = self._decoding.sampling
        DRIVERS["vllm"].check_sampling(sampling, config.settings.logprobs)
        super().__init__(self._decoding.max_new_tokens, self._decoding.eos_token_ids, sampling)
        self._columns = logprob_columns(sampling, processed=vllm_takes_processed(sampling))
        self._config = config
        self._on_progress = on_progress
        self._worker: WorkerProcess | None = None
        self._facts: dict[str, Any] = {}
        self._round_span_s = (0.0, 0.0)
        self._used_before_bytes: int | None = None
        self._device_bytes: int | None = None

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON; versions and what vLLM chose are there once it has started."""
        not_measured = dict(NOT_MEASURED)
        if not self._config.has_request_times:
            not_measured["request_times"] = NO_REQUEST_TIMES
        return {
            "python": self._config.python,
            "engine_arguments": dict(self._config.engine),
            "variables": self._config.vllm_variables,
            "compile_mode": self._config.settings.compile_mode,
            "attn_implementation": "vllm",
            **self._decoding.describe(),
            **({"logprob_fields": list(self._columns)} if self._config.settings.logprobs else {}),
            "log": str(self._config.log_path),
            "not_measured": not_measured,
            **self._facts,
        }

    @property
    def round_span_s(self) -> tuple[float, float]:
        """Start and end of the last drive, as the worker took them; see `OwnProcess`."""
        return self._round_span_s

    @property
    def device_bytes(self) -> int | None:
        """What more of the GPU is in use than before vLLM started, at the end of a drive; None on a CPU."""
        return self._device_bytes

    def warmup(self) -> None:
        """Start vLLM: import it, load the weights, compile and capture."""
        super().warmup()
        self._started_worker()

    def drive_until_empty(self) -> dict[str, Completion]:
        """See `RolloutDriver`; requests count as submitted when the worker's clock started."""
        completions = super().drive_until_empty()
        start_s = self._round_span_s[0]
        return {
            request_id: replace(completion, timings=replace(completion.timings, submitted_s=start_s))
            for request_id, completion in completions.items()
        }

    def close(self) -> None:
        """End vLLM, which frees the device. Safe to call twice."""
        super().close()
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.stop()

    def _request_limits(self) -> RequestLimits:
        return self._config.request_limits

    def _drive(self, groups: list[PromptGroup], book: RequestBook) -> None:
        worker, sampling = self._started_worker(), self._decoding.sampling
        requests = [(request_id, group) for group in groups for request_id in group.request_ids]
        sent_s = time.perf_counter()
        with self._ending_on_error(worker, "generating"):
            worker.send(
                {
                    "command": "round",
                    "prompts": [group.prompt_ids for _, group in requests],
                    "limits": [group.max_new_tokens for _, group in requests],
                    "sampling": {
                        **vllm_fields(sampling, self._config.settings.logprobs),
                        "stop_token_ids": [*self._decoding.eos_token_ids, *sampling.stop_token_ids],
                    },
                }
            )
            answer = require_event(worker.receive(), "round", "generating", self._config.log_path)
            self._round_span_s = _checked_span(sent_s, answer, time.perf_counter())
            for (request_id, group), output in zip(requests, answer["outputs"], strict=True):
                if output["logprobs"] is not None:
                    book.set_logprobs(request_id, dict.fromkeys(self._columns, tuple(output["logprobs"])))
                _record(request_id, group, output, book, self._round_span_s[1])
        self._device_bytes = self._measure_device_bytes()

    def _started_worker(self) -> WorkerProcess:
        if self._worker is None:
            config = self._config
            if config.gpu is not None and self._used_before_bytes is None:
                self._used_before_bytes = read_used_bytes(config.gpu)
            worker = WorkerProcess([config.python, str(WORKER)], config.environment, config.log_path)
            with self._ending_on_error(worker, "starting"):
                self._facts = start_engine(worker, config, self._on_progress)
            self._worker = worker
        return self._worker

    def _measure_device_bytes(self) -> int | None:
        used_bytes = None if self._config.gpu is None else read_used_bytes(self._config.gpu)
        if used_bytes is None or self._used_before_bytes is None:
            return None
        return max(0, used_bytes - self._used_before_bytes)

    @contextmanager
    def _ending_on_error(self, worker: WorkerProcess, doing: str) -> Iterator[None]:
        """End the worker on any error, Ctrl-C too: what it would answer next is not known."""
        try:
            yield
        except BaseException as error:
            self._worker = None
            worker.kill()
            if isinstance(error, WorkerEndedError):
                raise describe_failure(doing, f"its process ended: {error}", self._config.log_path) from error
            if isinstance(error, WorkerMessageError):
                raise describe_strange_answer(doing, str(error), self._config.log_path) from error
            raise


def _checked_span(sent_s: float, answer: Mapping[str, Any], received_s: float) -> tuple[float, float]:
    """The round's start and end, which must lie between ours: `perf_counter` is one clock for all processes."""
    start_s, end_s = answer["start_s"], answer["end_s"]
    if not sent_s <= start_s < end_s <= received_s:
        raise EngineError(
            f"vLLM's worker timed the round from {start_s} to {end_s} s, which is not within {sent_s} to {received_s} "
            "s, when it was asked and had answered: its clock is another than ours."
        )
    return start_s, end_s


def _record(
    request_id: str, group: PromptGroup, output: Mapping[str, Any], book: RequestBook, end_s: float
) -> None:
    """Enter an output in the book; all outputs arrive at once, so that none is finished later than `end_s`."""
    token_ids = tuple(output["token_ids"])
    for mark, name in ((book.mark_scheduled, "scheduled_s"), (book.mark_tokens, "first_token_s")):
        if output[name] is not None:
            mark([request_id], output[name])
    stop = output["stop_reason"] if isinstance(output["stop_reason"], str) else None
    error = _find_fault(group, token_ids, output["finish_reason"], stop)
    book.finish(request_id, token_ids, error, output["finished_s"] or end_s, stop)


def _find_fault(
    group: PromptGroup, token_ids: tuple[int, ...], finish_reason: str | None, stop_string: str | None
) -> str | None:
    """Why an output is not what was asked for: it ends at a stop id or string or at its limit, and nowhere else."""
    stop_ids = (*group.eos_token_ids, *group.sampling.stop_token_ids)
    has_stopped = bool(token_ids) and (
        token_ids[-1] in stop_ids or stop_string in group.sampling.stop_strings
    )
    if finish_reason == "stop" and has_stopped and len(token_ids) <= group.max_new_tokens:
        return None
    if finish_reason == "length" and len(token_ids) == group.max_new_tokens:
        return None
    return f"vLLM ended it with {len(token_ids)} of {group.max_new_tokens} tokens, finish reason {finish_reason!r}"
