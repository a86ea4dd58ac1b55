"""The decode side of the engine: static buffers on the cache's pages, a forward over them, bursts of decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbexp.engine.attention import describe_attention_path
from cbexp.engine.buffers import (
    NOT_FINITE,
    DecodeBuffers,
    DecodeRow,
    PagePool,
    RowUpload,
    allocate_buffers,
    allocate_sampling,
)
from cbexp.engine.decode.runners import build_runner
from cbexp.engine.decode.self_check import SelfCheckResult, check_bucket, summarize_errors
from cbexp.engine.decode.shapes import build_batch_shapes, choose_burst_length
from cbexp.engine.decode.step import CompileStats, StepRunner
from cbexp.engine.decode.timing import DeviceIdle, time_decode_steps
from cbexp.engine.forward import Forward, ForwardChoice
from cbexp.engine.interrupts import deferring_interrupts
from cbexp.engine.requests import RowTokens
from cbexp.engine.row_sampling import DriveSampling
from cbexp.engine.sampling import HeadInputs
from cbexp.engine.types import COMPILE_MODES, CBSyncConfig, EngineError


@dataclass
class DecodeRecord:
    """One for all decoders of a driver. `checks`: every self-check that was passed, in order."""

    counts: CompileStats = field(default_factory=CompileStats)
    idle: DeviceIdle = field(default_factory=DeviceIdle)
    checks: list[SelfCheckResult] = field(default_factory=list)

    def summarize(self) -> dict[str, Any]:
        """`CompileStats`, `device_idle_share`, and what self-checks found.

        The idle share is of drives, between bursts and batches of prompts, `on_step` included. It is None without a
        GPU, and in modes without graphs: there the device also waits inside a burst, which is not measured.
        `mean_logprob_error`, `max_logprob_error` (of the forward run eagerly), `mean_logit_error` and `max_logit_error`
        (of steps as they run) are over the rows of all self-checks (None: nothing was checked).
        """
        return asdict(self.counts) | {"device_idle_share": self.idle.share} | summarize_errors(self.checks)


class _Steps:
    """Steps of one kind, greedy or sampled, on their buffers: the runner, and the batch sizes that it is ready for."""

    def __init__(self, buffers: DecodeBuffers) -> None:
        self.buffers = buffers
        self.upload = RowUpload(buffers)
        self.runner: StepRunner | None = None
        self.prepared: set[int] = set()

    def drop(self) -> None:
        """Drop what was compiled or captured."""
        self.prepared.clear()
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()


class Decoder:
    """Decodes rows on `pools` in bursts, between `begin` and `end` of each drive; one burst at a time.

    The model must run the engine's attention whenever something runs. Everything is put on the current stream, in
    order; only `run` waits for the device. `max_requests_per_batch` is set in `settings`. `max_positions` bounds the
    positions that steps reach. `record`: that of the decoders before (None: a new one).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pools: dict[str, PagePool],
        settings: CBSyncConfig,
        eos_token_ids: tuple[int, ...],
        max_positions: int,
        record: DecodeRecord | None = None,
    ) -> None:
        assert settings.max_requests_per_batch is not None
        self.record = record or DecodeRecord()
        self._model = model
        self._settings = settings
        self._max_positions = max_positions
        self._has_eos = bool(eos_token_ids)
        self._ends_early = self._has_eos
        self._shapes = build_batch_shapes(
            settings.batch_shape, settings.buckets, settings.max_requests_per_batch
        )
        self._buffers = allocate_buffers(
            pools,
            # One more than the largest batch has, see `CompiledSteps`.
            max_rows=self._shapes.max_rows + 1,
            max_burst=settings.max_burst,
            eos_token_ids=eos_token_ids,
            device=model.device,
        )
        self._forward = self._choose_forward()
        self._is_cuda = model.device.type == "cuda"
        self._fetched = torch.empty_like(self._buffers.outputs, device="cpu", pin_memory=self._is_cuda)
        self._greedy = _Steps(self._buffers)
        # Those that sample are made when a drive first needs them.
        self._sampled: _Steps | None = None
        self._fetched_logprobs: Tensor | None = None
        self._steps = self._greedy
        # The model's between `begin` and `end`, where steps are compiled; outside the caller may replace them.
        self._parameters: list[nn.Parameter] = []
        self._has_graphs = COMPILE_MODES[settings.compile_mode].graphs is not None

    @property
    def max_rows(self) -> int:
        """Requests of the largest batch."""
        return self._shapes.max_rows

    def size_for(self, num_rows: int) -> int:
        """Rows that a step computes for a batch of `num_rows` requests."""
        return self._shapes.size_for(num_rows)

    def choose_burst_length(self, remaining: Sequence[int], is_queue_empty: bool) -> int:
        """Steps of a burst over rows that may each produce `remaining` more tokens."""
        return choose_burst_length(
            remaining,
            self._shapes,
            max_burst=self._settings.max_burst,
            has_eos=self._ends_early,
            is_queue_empty=is_queue_empty,
            is_on_cpu=not self._is_cuda,
        )

    def begin(self, sampling: DriveSampling) -> None:
        """Take the model over for a drive whose rows are chosen by `sampling`."""
        self.record.idle.begin()
        self._steps = self._steps_for(sampling)
        self._ends_early = self._has_eos or sampling.ends_early
        self._take(is_new=True)

    def resume(self) -> None:
        """Take the model over again within a drive, after `end`; the time since then counts as idle."""
        self._take(is_new=False)

    def _take(self, *, is_new: bool) -> None:
        """What was compiled or captured from weights that have moved is dropped."""
        if COMPILE_MODES[self._settings.compile_mode].torch_mode is not None:
            self._parameters[:] = self._model.parameters()
        with deferring_interrupts():  # between the two, the runner would be of weights that are gone
            if self._forward.begin(is_new=is_new):
                self._drop_runners()
        if self._steps.runner is None:
            self._steps.runner = build_runner(
                self._forward.forward,
                self._steps.buffers,
                self._settings.compile_mode,
                stats=self.record.counts,
                recompile_limit=self._settings.recompile_limit,
                parameters=self._parameters,
            )

    def end(self) -> None:
        """Give the modules back to the caller, and let go of the weights. Safe to call twice."""
        self._forward.end()
        self._parameters.clear()

    def prepare(self) -> None:
        """Compile, capture and check every batch size, the largest first: smaller ones then fit in its memory."""
        for bucket in reversed(self._shapes.sizes):
            self._prepared_runner(bucket)

    def run(self, rows: Sequence[DecodeRow], num_steps: int) -> list[RowTokens]:
        """Run `num_steps` decode steps over `rows` and wait for them; what each row has made.

        A row that ends goes inactive and stays so.
        """
        bucket = self.size_for(len(rows))
        runner = self._prepared_runner(bucket)
        steps, sampling = self._steps, self._steps.buffers.sampling
        steps.upload.upload(rows)
        with self._timing() as end:
            runner.run(bucket, num_steps)
            self._fetched[:num_steps].copy_(steps.buffers.outputs[:num_steps], non_blocking=True)
            if self._fetched_logprobs is not None and sampling is not None:
                self._fetched_logprobs[:num_steps].copy_(sampling.logprobs[:num_steps], non_blocking=True)
        if end is not None:
            end.synchronize()
        token_ids = self._fetched[:num_steps, : len(rows)].T.contiguous().numpy()
        # A row is active from the first step until it ends.
        counts = (token_ids >= 0).sum(axis=1).tolist()
        is_finite = (token_ids != NOT_FINITE).all(axis=1).tolist()
        if self._fetched_logprobs is None or sampling is None:
            logprobs = [None] * len(rows)
        else:
            logprobs = list(self._fetched_logprobs[:num_steps, : len(rows)].transpose(0, 1).numpy().copy())
        return [
            RowTokens(token_ids[row, :count].tolist(), of_row, is_finite[row])
            for row, (count, of_row) in enumerate(zip(counts, logprobs, strict=True))
        ]

    @contextmanager
    def timing_batch(self) -> Iterator[None]:
        """Count what the body puts on the current stream, a batch that is no burst, as the device's busy time."""
        with self._timing():
            yield

    def prefill(self, batch: dict[str, Any], num_rows: int) -> Tensor | HeadInputs:
        """Run transformers' packed batch, as `Forward.prefill`."""
        self._forward.read()
        return self._forward.forward.prefill(batch, num_rows)

    @contextmanager
    def reading(self) -> Iterator[Forward]:
        """A forward of the model as it is now, for batches of prompts alone; outside of `begin` and `end`.

        What was compiled or captured stays valid for the model as it was: the adapter may be off now, for one.
        """
        choice = self._choose_forward()
        try:
            choice.begin()
            yield choice.forward
        finally:
            choice.close()

    def time_steps(self, bucket: int, context: int, num_steps: int, num_bursts: int) -> list[float]:
        """Mean seconds of a step in each of some bursts, as `time_decode_steps`; the cache must be idle."""
        if bucket not in self._shapes.sizes:
            sizes = ", ".join(map(str, self._shapes.sizes))
            raise EngineError(f"batch={bucket} is no batch size of this engine: {sizes}.")
        return time_decode_steps(
            self._prepared_runner(bucket),
            self._steps.buffers,
            bucket=bucket,
            context=context,
            num_steps=num_steps,
            num_bursts=num_bursts,
            vocab_size=self._model.config.vocab_size,
            max_positions=self._max_positions,
        )

    def describe(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values. Of each batch size the last self-check of the record is there."""
        model, pages = self._model, self._buffers.layers[0].pages
        return {
            "decode_mode": self._settings.compile_mode,
            "batch_shape": self._shapes.policy,
            "buckets": list(self._shapes.buckets),
            "max_burst": self._settings.max_burst,
            "prefill_attention": describe_attention_path(model.config, pages.device, pages.dtype),
            "self_check": self._has_check,
            "self_check_results": list(
                {check.bucket: asdict(check) for check in self.record.checks}.values()
            ),
        } | self._forward.describe()

    def close(self) -> None:
        """Drop what was captured, and let go of the model."""
        self._drop_runners()
        self._forward.close()

    @property
    def _has_check(self) -> bool:
        """Whether batch sizes are checked: what is neither compiled, captured nor fused is the reference itself."""
        is_reference = (self._settings.compile_mode, self._forward.fusion) == ("eager", "none")
        return self._settings.self_check and not is_reference

    def _prepared_runner(self, bucket: int) -> StepRunner:
        """The runner, with `bucket` compiled or captured, and checked; live rows are left as they are."""
        steps = self._steps
        assert steps.runner is not None, "between begin and end"
        if bucket not in steps.prepared or COMPILE_MODES[self._settings.compile_mode].graphs != "engine":
            self._forward.read()
        if bucket not in steps.prepared:
            steps.runner.prepare(bucket)
            if self._has_check:
                result = check_bucket(
                    steps.runner,
                    self._forward.forward,
                    self._forward.plain_logits,
                    steps.buffers,
                    bucket=bucket,
                    mode=self._settings.compile_mode,
                    vocab_size=self._model.config.vocab_size,
                    max_positions=self._max_positions,
                )
                self.record.checks.append(result)
            steps.prepared.add(bucket)
        return steps.runner

    def _choose_forward(self) -> ForwardChoice:
        settings = self._settings
        return ForwardChoice(
            self._model,
            self._buffers.layers,
            settings.fusion,
            self._max_positions,
            fp32_head=settings.fp32_head,
        )

    def _steps_for(self, sampling: DriveSampling) -> _Steps:
        if not sampling.needs_sampling:
            return self._greedy
        if self._sampled is None:
            buffers = self._buffers
            own = allocate_sampling(
                max_rows=buffers.max_rows,
                max_burst=buffers.max_burst,
                vocab_size=self._model.config.vocab_size,
                device=buffers.device,
                fp32_head=self._settings.fp32_head,
            )
            self._sampled = _Steps(replace(buffers, sampling=own))
            if self._settings.logprobs:
                self._fetched_logprobs = torch.empty_like(
                    own.logprobs, device="cpu", pin_memory=self._is_cuda
                )
        self._sampled.upload.begin_drive(sampling.token_sets, sampling.key)
        return self._sampled

    def _drop_runners(self) -> None:
        for steps in filter(None, (self._greedy, self._sampled)):
            steps.drop()

    @contextmanager
    def _timing(self) -> Iterator[torch.cuda.Event | None]:
        """Time the body on the device; gives the event that is recorded at its end (None: no GPU)."""
        if not self._is_cuda:
            yield None
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield end
        end.record()
        if self._has_graphs:
            self.record.idle.add(start, end)
