"""Serves requests on one paged cache: prompts through transformers' processor, decode steps in bursts.

Requests in, tokens out, and a cache that is empty between drives.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from cbexp.engine.burst_step import run_burst
from cbexp.engine.cache_state import cache_used_fraction, count_referenced_blocks, empty_cache
from cbexp.engine.cb_internals import (
    ContinuousBatchingIOs,
    EngineSettings,
    FutureRequestState,
    RequestState,
    build_processor,
    build_request_state,
    child_id,
    describe_processor,
    generated_ids,
    max_request_tokens,
)
from cbexp.engine.compute_stream import on_compute_stream
from cbexp.engine.decode_requests import start_decoding_last_tokens
from cbexp.engine.decoder import Decoder, DecodeSettings
from cbexp.engine.engine_step import EngineOutput, EngineStep
from cbexp.engine.requests import PromptGroup
from cbexp.engine.scheduler import Admission
from cbexp.engine.types import EngineError, StepKind


class PagedEngine:
    """One processor with its cache, reused over drives; every request lives and dies inside one drive.

    With `decode`, and the engine's own attention in `settings`, decode steps run in bursts; without it every step is
    one of transformers' own. Fixed at construction: `num_blocks`, `max_request_tokens` (what an empty cache holds of
    one request; None: no limit).
    """

    def __init__(
        self, model: PreTrainedModel, settings: EngineSettings, decode: DecodeSettings | None
    ) -> None:
        self._device = model.device
        self._dtype = model.dtype
        self._processor = build_processor(model, settings)
        self._cache = self._processor.cache
        self._scheduler: Any = self._processor.scheduler  # with AdmissionControl
        # One set of buffers, since the processor is built without async batching.
        self._inputs = cast(ContinuousBatchingIOs, self._processor.inputs_and_outputs)
        self._outputs = self._processor.output_router.output_queue
        self._caller_ids: dict[str, str] = {}
        self._last_burst: list[RequestState] = []
        with self._on_compute_stream():
            self._decoder = None if decode is None else Decoder(model, self._cache, decode)
        self._reset_slots()
        self.num_blocks = int(self._cache.num_blocks)
        self.max_request_tokens = max_request_tokens(self._cache)
        self._described = describe_processor(self._processor)

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values."""
        return self._described | ({} if self._decoder is None else self._decoder.describe())

    @property
    def compile_stats(self) -> dict[str, Any]:
        """What compiling and capturing came to so far, and the device's idle share; empty without bursts."""
        return {} if self._decoder is None else self._decoder.stats

    @property
    def cache_used_fraction(self) -> float:
        """Share of the cache that requests reference, in [0, 1]; blocks kept for prefix matches count as free."""
        return cache_used_fraction(self._cache)

    @property
    def num_referenced_blocks(self) -> int:
        """Block-table entries of live requests over all attention types; 0 when the cache is empty."""
        return count_referenced_blocks(self._cache)

    @property
    def read_trash(self) -> torch.Tensor:
        """Sector 0 of the cache (bytes), which padding reads: it stays zero."""
        trash: torch.Tensor = self._cache.cache_tensor[: self._cache.bytes_per_sector]
        return trash

    def set_safety_margin(self, margin: float) -> None:
        """Share of the cache, in [0, 1], to keep free of new prompts so that admitted requests can grow."""
        self._scheduler.safety_margin = margin
        self._described["safety_margin"] = margin

    def suits(self, model: PreTrainedModel) -> bool:
        """Whether the cache is where the model is now, in its dtype."""
        return (self._device, self._dtype) == (model.device, model.dtype)

    def submit(self, group: PromptGroup) -> None:
        """Queue a prompt; its generations beyond the first are forked from it once its prompt is in the cache."""
        parent_id, *child_ids = group.request_ids
        # A prompt takes the slots of all its generations at once.
        self._scheduler.num_slots = max(self._scheduler.num_slots, len(group.request_ids))
        self._caller_ids[parent_id] = parent_id
        self._caller_ids.update((child_id(parent_id, i), caller_id) for i, caller_id in enumerate(child_ids))
        self._scheduler.add_waiting_request(
            build_request_state(
                parent_id, group.prompt_ids, group.max_new_tokens, group.eos_token_ids, len(child_ids)
            )
        )

    def begin(self) -> None:
        """Take the model over for a drive, which `reset` ends."""
        if self._decoder is not None:
            with self._on_compute_stream():
                self._decoder.begin()

    def prepare(self) -> None:
        """Compile and capture for every batch size that bursts can have; between `begin` and `reset`."""
        if self._decoder is not None:
            with self._on_compute_stream():
                self._decoder.prepare()

    def time_decode_steps(self, batch: int, context: int, num_steps: int, num_bursts: int) -> list[float]:
        """Mean seconds of a decode step in each of `num_bursts` bursts, without requests; between `begin` and `reset`.

        See `step_timing.time_decode_steps`.
        """
        if self._decoder is None:
            raise EngineError("Decode steps alone can be timed with attn_implementation='cbexp' only.")
        with self._on_compute_stream():
            return self._decoder.time_steps(batch, context, num_steps, num_bursts)

    def step(self, model: PreTrainedModel) -> EngineStep | None:
        """Run and account for one batch or burst; None when there is nothing to run. Waits for the device.

        Prompts go first; then what decodes runs in a burst; a cache that is too full for one step of all its rows takes
        an ordinary step of transformers', which evicts.
        """
        with self._on_compute_stream():
            if self._decoder is None:
                return self._run_batch(model, "upstream")
            start_decoding_last_tokens(self._scheduler)
            return (
                self._run_prefill(model) or self._run_burst(self._decoder) or self._run_batch(model, "closed")
            )

    def partial_completions(self) -> dict[str, tuple[int, ...]]:
        """Request id -> tokens so far, of every request that is queued, running, or in the batch of the last step."""
        in_batch = [*(future.state for future in self._inputs.requests_in_batch), *self._last_burst]
        queued = [*self._scheduler.active_requests.values(), *self._scheduler.waiting_requests.values()]
        return {self._caller_ids[state.request_id]: generated_ids(state) for state in [*in_batch, *queued]}

    def reset(self) -> None:
        """Forget every request and free every block, whatever an interrupted step has left behind.

        Blocks kept for prefix matches go too, since the weights may change before the next drive.
        """
        self._wait_for_device()
        if self._decoder is not None:
            self._decoder.end()
        self._take_outputs()
        self._caller_ids.clear()
        self._inputs.requests_in_batch = []
        self._last_burst = []
        self._processor.offloading_manager.reset()
        self._scheduler.reset()
        self._reset_slots()
        empty_cache(self._cache)

    def close(self) -> None:
        """Give the cache's memory back to the device. The engine is unusable afterwards."""
        self._wait_for_device()
        if self._decoder is not None:
            self._decoder.close()
        del self._processor, self._scheduler, self._cache, self._inputs, self._decoder
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run_prefill(self, model: PreTrainedModel) -> EngineStep | None:
        """A batch of prompts alone; None when none is there, or none has a slot and room."""
        return self._run_batch(model, "prefill_only") if self._scheduler.has_prefill_candidates() else None

    def _run_batch(self, model: PreTrainedModel, admission: Admission) -> EngineStep | None:
        """One batch of transformers' own."""
        self._scheduler.admission = admission
        if not self._processor.prepare_next_batch():
            return None
        batch: list[FutureRequestState] = list(self._inputs.requests_in_batch)
        kind, used_fraction = _step_kind(batch), self.cache_used_fraction
        with nullcontext() if self._decoder is None else self._decoder.timing_batch():
            self._run_forward(model)
        self._processor.update_batch()
        return EngineStep(
            kind=kind,
            num_tokens=self._inputs.num_q_tokens,
            request_ids=self._to_caller_ids(future.state for future in batch),
            token_request_ids=self._to_caller_ids(f.state for f in batch if f.has_new_token),
            outputs=self._take_outputs(),
            num_waiting=len(self._scheduler.waiting_requests),
            cache_used_fraction=used_fraction,
        )

    def _run_burst(self, decoder: Decoder) -> EngineStep | None:
        """Decode steps in a burst; None when nothing decodes, and without room for one step of all."""
        burst = run_burst(decoder, self._cache, self._scheduler)
        if burst is None:
            return None
        self._last_burst = burst.states
        burst.account(self._cache, self._scheduler)
        ended = [EngineOutput(self._caller_ids[s.request_id], generated_ids(s), None) for s in burst.finished]
        request_ids = self._to_caller_ids(burst.states)
        return EngineStep(
            kind="decode",
            num_tokens=burst.num_tokens,
            request_ids=request_ids,
            token_request_ids=request_ids,
            outputs=(*self._take_outputs(), *ended),
            num_waiting=len(self._scheduler.waiting_requests),
            cache_used_fraction=burst.cache_used_fraction,
            num_steps=burst.num_steps,
            num_padding=burst.num_padding,
            bucket=burst.bucket,
        )

    def _run_forward(self, model: PreTrainedModel) -> None:
        """Run the prepared batch, of which some rows may have no token.

        A parent keeps its last prompt token for its forks. With a one-token prompt, or after a prefix match, that
        leaves it nothing to run; a batch of such parents has no forward.
        """
        num_tokens, num_rows = self._inputs.num_q_tokens, self._inputs.num_request_in_batch
        if num_tokens == 0:
            return
        if num_rows > num_tokens:
            # Upstream clears one index a token and reads one a row: an older batch's would point beyond this one.
            self._inputs.logits_indices[num_tokens:num_rows].zero_()
        if self._decoder is None or not self._run_fused_prefill(self._decoder, num_rows):
            self._processor._generation_step(model)

    def _run_fused_prefill(self, decoder: Decoder, num_rows: int) -> bool:
        """Run the prepared batch by fused kernels instead of the model's code; whether there are any."""
        next_ids = decoder.prefill(cast(dict[str, Any], self._inputs.get_model_kwargs()), num_rows)
        if next_ids is None:
            return False
        self._inputs.output_ids[0, :num_rows].copy_(next_ids)
        self._inputs.retrieve_device_outputs()
        return True

    def _reset_slots(self) -> None:
        if self._decoder is not None:
            self._scheduler.num_slots = self._decoder.settings.shapes.max_rows

    def _to_caller_ids(self, states: Iterable[RequestState]) -> tuple[str, ...]:
        return tuple(self._caller_ids[state.request_id] for state in states)

    def _take_outputs(self) -> tuple[EngineOutput, ...]:
        """What transformers has delivered: requests that its own steps have ended or failed."""
        taken = [self._outputs.get_nowait() for _ in range(self._outputs.qsize())]
        return tuple(
            EngineOutput(self._caller_ids[output.request_id], tuple(output.generated_tokens), output.error)
            for output in taken
        )

    def _on_compute_stream(self) -> AbstractContextManager[None]:
        return on_compute_stream(self._inputs.compute_stream, self._device)

    def _wait_for_device(self) -> None:
        stream = self._inputs.compute_stream
        if stream is not None:
            stream.synchronize()


def _step_kind(batch: list[FutureRequestState]) -> StepKind:
    """A row decodes when it has generated before; reading an evicted request again is prefill."""
    num_decoding = sum(bool(future.state.generated_tokens) for future in batch)
    if num_decoding == 0:
        return "prefill"
    return "decode" if num_decoding == len(batch) else "mixed"
