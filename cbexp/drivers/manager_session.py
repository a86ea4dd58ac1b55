"""One life of transformers' manager, from build to joined thread, and what it changes around it put back."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cbexp.drivers.exit_guard import StopsAtExit
from cbexp.drivers.manager_settings import describe_batching_config
from cbexp.drivers.random_numbers import kept_random_state
from cbexp.engine.borrow import borrowed_for_inference
from cbexp.engine.requests import PromptGroup
from cbexp.engine.sizing import choose_safety_margin, count_blocks, describe_cache_layout
from cbexp.engine.types import CacheMemoryError, EngineError, UnsupportedModelError
from cbexp.engine.upstream import (
    child_id,
    max_request_tokens,
    require_paged_attention,
)

# How long to wait for an output before looking whether the thread is alive and busy; an output wakes at once.
POLL_S = 0.2


def require_manageable(config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModelError` unless upstream's manager computes all of this model's attention."""
    require_paged_attention(config)
    if config._attn_implementation == "eager" and getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be driven by the manager with attn_implementation='eager': its "
            "paged eager attention leaves out the soft cap of the attention logits."
        )


class ManagerSession(StopsAtExit):
    """A manager whose thread is fed from the caller's. `start` builds cache and captures; a stopped one ends.

    Raises at construction `EngineError` when the model carries somebody else's cached manager.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        batching_config: ContinuousBatchingConfig,
    ) -> None:
        self._model = model
        self._callers: dict[str, str] = {}
        self.is_started = False
        self.safety_margin = batching_config.safety_margin
        starter: Any = model
        with _borrowed(model):
            self._manager = starter.init_continuous_batching(
                generation_config=generation_config, continuous_batching_config=batching_config
            )
        if self._manager.generation_config is not generation_config:
            raise EngineError(
                "the model carries a manager that another call has kept on it: "
                "model.destroy_cached_continuous_batching_manager() removes it."
            )

    @property
    def batching_config(self) -> ContinuousBatchingConfig:
        """Upstream's settings as resolved; the cache's are final once started."""
        config: ContinuousBatchingConfig = self._manager.continuous_batching_config
        return config

    def describe(self) -> dict[str, Any]:
        """Settings as upstream runs them, as plain JSON values; those of the cache once started."""
        described = describe_batching_config(self.batching_config) | {"safety_margin": self.safety_margin}
        if self.is_started:
            described["block_sharing"] = self.shares_blocks
            described["max_request_tokens"] = self.max_request_tokens
        return described

    @property
    def max_request_tokens(self) -> int | None:
        """Tokens of one request that an empty cache holds; None without such a limit. Started sessions only."""
        return max_request_tokens(self._processor.cache)

    @property
    def shares_blocks(self) -> bool:
        """Whether identical prefixes are stored once. Started sessions only."""
        return bool(self._processor.cache.use_prefix_sharing)

    def start(self) -> None:
        """Build the cache, compile and capture on the calling thread, then start upstream's.

        Raises `CacheMemoryError` when cache and buffers do not fit in the free memory.
        """
        try:
            with self.lent(), kept_random_state():  # upstream seeds them
                self._manager.warmup()
        except BaseException as error:
            self._manager.batch_processor = None
            _clear_frames(error)
            if isinstance(error, MemoryError):
                raise self._cache_memory_error(error) from error
            raise
        self.stop_at_exit()
        self._manager.start()
        self.is_started = True

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give upstream the model for the body: eval mode, no gradients, paged attention; and take it."""
        with _borrowed(self._model):
            self._manager.switch_to_cb_friendly_attn(self._model, auto_switch_to_flash=False)
            yield

    def submit_round(self, groups: list[PromptGroup]) -> None:
        """Queue a drive's prompts, after dropping what is kept for prefix matches: weights may have changed.

        With block sharing the prompts go in sorted, as upstream's own `add_requests` does for the sake of its
        prefix cache.
        """
        self.check_thread()
        self._callers.clear()
        blocks_needed = count_blocks(
            [group.lengths for group in groups],
            describe_cache_layout(self._model.config),
            self.batching_config.page_size,
            shares_blocks=self.shares_blocks,
        )
        self.safety_margin = choose_safety_margin(blocks_needed, int(self._processor.cache.num_blocks))
        with self._manager.pause():
            self._processor.scheduler.safety_margin = self.safety_margin
            self._processor.cache.evict_cached_blocks()
        if self.shares_blocks:
            groups = sorted(groups, key=lambda group: group.prompt_ids, reverse=True)
        for group in groups:
            self._submit(group)

    def next_output(self) -> tuple[str, Any] | None:
        """Wait for a request to end; its id and upstream's `GenerationOutput`, None when upstream is idle.

        Raises `EngineError` when the thread has died.
        """
        was_idle = False
        while True:
            output = self._manager.get_result(timeout=POLL_S)
            if output is not None:
                return self._callers[output.request_id], output
            self.check_thread()
            # Upstream forgets a request just before it delivers the output: one more wait settles it.
            if was_idle:
                return None
            was_idle = self._manager.input_queue.empty() and not self._processor.has_pending_requests()

    def check_thread(self) -> None:
        """Raise `EngineError` with the original message when the thread has died or is dying."""
        status = self._manager.background_thread_status
        if self._manager.is_running() and status.can_accept_new_requests() is None:
            return
        self.stop()
        cause = status.fatal_error
        reason = "it was stopped from outside" if cause is None else cause
        raise EngineError(f"transformers' generation thread died: {reason}") from cause

    def stop(self) -> None:
        """Stop and join the thread, drop cache and graphs. A step that runs, or a compilation, ends first."""
        self.forget_exit()
        if not self.is_started:
            return
        self.is_started = False
        with _borrowed(self._model):
            self._manager.stop(block=True, hard_stop=True)
            self._manager.destroy()
        _clear_frames(self._manager.background_thread_status.fatal_error)

    def take_outputs(self) -> list[tuple[str, Any]]:
        """What a stopped session has left: requests that had ended, and the others as failed, tokens kept."""
        outputs = []
        while (output := self._manager.get_result(timeout=0)) is not None:
            outputs.append((self._callers[output.request_id], output))
        return outputs

    @property
    def _processor(self) -> Any:
        return self._manager.batch_processor

    def _submit(self, group: PromptGroup) -> None:
        """Queue a prompt's generations: one request that upstream forks, or one each where it cannot fork."""
        num_forks = len(group.request_ids) - 1 if self._can_fork(group) else 0
        parents, forks = group.request_ids[: len(group.request_ids) - num_forks], group.request_ids[1:]
        self._manager.num_return_sequences = 1 + num_forks
        for request_id in parents:
            self._callers[request_id] = request_id
            self._manager.add_request(
                list(group.prompt_ids),
                request_id=request_id,
                max_new_tokens=group.max_new_tokens,
                eos_token_id=[*group.eos_token_ids, *group.sampling.stop_token_ids],
                record_timestamps=True,
            )
        for index in range(num_forks):
            self._callers[child_id(parents[0], index)] = forks[index]

    def _can_fork(self, group: PromptGroup) -> bool:
        """Whether the prompt, less its last token, leaves the parent something to run before it is forked.

        It does not with one token, or when the last one follows on a shared block; upstream fails on a batch
        in which nothing runs.
        """
        num_before_last = len(group.prompt_ids) - 1
        if self.shares_blocks:
            return num_before_last % self.batching_config.page_size != 0
        return num_before_last > 0

    def _cache_memory_error(self, error: MemoryError) -> CacheMemoryError:
        config = self.batching_config
        return CacheMemoryError(
            f"A KV cache of {config.num_blocks} blocks of {config.page_size} tokens, with buffers for "
            f"{config.max_batch_tokens} batch tokens, does not fit in {config.max_memory_percent:.0%} of the "
            f"free memory: lower num_blocks, max_batch_tokens or max_requests_per_batch ({error})."
        )


@contextmanager
def _borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Borrow the model for inference on its own device; afterwards its attention implementation is as it was.

    The device is made current, since upstream measures the free memory of the current one.
    """
    attention = model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(borrowed_for_inference(model, attention))
        if model.device.type == "cuda":
            stack.enter_context(torch.cuda.device(model.device))
        try:
            yield
        finally:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)


def _clear_frames(error: BaseException | None) -> None:
    """Drop the locals of an error's frames; the lines of its traceback stay readable.

    They hold upstream's processor, whose `__del__` prints a traceback when it runs at interpreter exit.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
