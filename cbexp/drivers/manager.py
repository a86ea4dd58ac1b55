"""The driver that feeds transformers' own continuous-batching manager, which generates on its own thread."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from cbexp.drivers.inputs import DriverInputs
from cbexp.drivers.manager_settings import build_batching_config
from cbexp.drivers.peer_sampling import generation_fields, logprob_columns
from cbexp.drivers.random_numbers import own_random_numbers
from cbexp.drivers.registry import DRIVERS
from cbexp.engine.model_driver import ModelDriver
from cbexp.engine.requests import PromptGroup, RequestBook, RequestLimits
from cbexp.engine.types import CBSyncConfig
from cbexp.planning.cache_sizing import full_lengths

if TYPE_CHECKING:
    from cbexp.drivers.manager_session import ManagerSession


def build(inputs: DriverInputs) -> ManagerDriver:
    """Return the driver."""
    longest = max(full_lengths(inputs.plan, inputs.prompt_lengths))
    return ManagerDriver(inputs.model, inputs.settings, max_request_tokens=longest)


class ManagerDriver(ModelDriver):
    """Transformers' threaded manager with its best settings; implements `RolloutDriver`.

    Its log-probabilities are taken in the distribution that a token was drawn from: they fill `logprob_columns`.
    One manager stays started over all drives, cache, compiled code and graphs warm; between drives its thread
    idles and the model is as the caller left it. `warmup` (or the first `add_requests`) builds it. After an
    error or Ctrl-C it is stopped, and the next round builds a new one. See `manager_settings` for what the
    compile modes mean, and for `max_request_tokens`.

    Raises at construction, besides what a `ModelDriver` raises, `EngineError` for captures on a device without
    CUDA, and for a config without `num_blocks`.
    """

    kind = DRIVERS["manager"]

    def __init__(self, model: Any, config: CBSyncConfig, max_request_tokens: int | None = None) -> None:
        self.kind.check_compile_mode(config.compile_mode)
        super().__init__(model, config)
        self.kind.check_sampling(self._decoding.sampling, config.logprobs)
        # Only now: another version of transformers may lack the names that the session imports.
        from cbexp.drivers.manager_session import require_manageable

        require_manageable(self._model.config)
        self._max_request_tokens = max_request_tokens
        self._attention = self._model.config._attn_implementation
        self._session: ManagerSession | None = self._build_session()

    @property
    def resolved(self) -> dict[str, Any]:
        """Settings as upstream has resolved them, as plain JSON values; final once the cache is built."""
        attention = "paged|eager" if self._attention == "eager" else self._attention
        return (
            super().resolved
            | self._described
            | {"compile_mode": self._config.compile_mode, "attn_implementation": attention}
        )

    def warmup(self) -> None:
        """Build the cache, compile and capture, and start the thread."""
        super().warmup()
        self._started_session()

    def close(self) -> None:
        """Stop and join the thread, free cache and graphs; the model is already as it was. Safe to repeat."""
        super().close()
        self._drop_session()

    def _request_limits(self) -> RequestLimits:
        limits = super()._request_limits()
        stored = self._started_session().max_request_tokens
        return replace(limits, max_stored_tokens=stored, has_own_sampling=False)

    def _drive(self, groups: list[PromptGroup], book: RequestBook) -> None:
        session = self._started_session()
        with session.lent(), own_random_numbers(self._config.seed, groups[0].submission):
            try:
                session.submit_round(groups)
                self._described = session.describe()
                self._collect(session, sum(len(group.request_ids) for group in groups), book)
            except BaseException:
                self._drop_session()
                self._keep_leftovers(session, book)
                raise

    def _started_session(self) -> ManagerSession:
        if self._session is None:
            self._session = self._build_session()
        if not self._session.is_started:
            try:
                self._session.start()
            except BaseException:
                self._drop_session()
                raise
            self._described = self._session.describe()
        return self._session

    def _drop_session(self) -> None:
        if self._session is not None:
            self._session = None
            self._stop_session()

    def _build_session(self) -> ManagerSession:
        from cbexp.drivers.manager_session import ManagerSession

        session = ManagerSession(
            self._model,
            # No EOS is -1 to upstream; None would make it write that into the config, with a warning.
            GenerationConfig(
                max_new_tokens=self._decoding.max_new_tokens,
                eos_token_id=list(self._decoding.eos_token_ids) or -1,
                pad_token_id=self._decoding.pad_token_id,
                **generation_fields(self._decoding.sampling),
            ),
            build_batching_config(
                self._config, self._model.config, self._model.device, self._max_request_tokens
            ),
        )
        # Called by `_drop_session`, and for a driver that is dropped without close().
        self._stop_session = weakref.finalize(self, session.stop)
        self._described = session.describe()
        return session

    def _collect(self, session: ManagerSession, num_requests: int, book: RequestBook) -> None:
        for _ in range(num_requests):
            ended = session.next_output()
            if ended is None:
                return
            request_id, output = ended
            self._record(request_id, output, book)
            # A thread that dies fails its requests first.
            if output.error is not None:
                session.check_thread()

    def _keep_leftovers(self, session: ManagerSession, book: RequestBook) -> None:
        for request_id, output in session.take_outputs():
            if output.error is None:
                self._record(request_id, output, book)
            else:
                self._unfinished[request_id] = tuple(output.generated_tokens)

    def _record(self, request_id: str, output: Any, book: RequestBook) -> None:
        """Enter upstream's `GenerationOutput` in the book; after an eviction its first times are unknown."""
        if len(output.timestamps) == len(output.generated_tokens):
            if output.lifespan[0] >= 0:
                book.mark_scheduled([request_id], output.lifespan[0])
            if output.timestamps:
                book.mark_tokens([request_id], output.timestamps[0])
        if self._config.logprobs:
            columns = logprob_columns(self._decoding.sampling, processed=True)
            book.set_logprobs(request_id, dict.fromkeys(columns, tuple(output.logprobs)))
        book.finish(request_id, tuple(output.generated_tokens), output.error, output.lifespan[1])
