"""The decode side of an engine: static buffers on the cache's pages, the model's forward over them, bursts of steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from cbexp.engine.attention_paths import describe_attention_path
from cbexp.engine.batch_shapes import BatchShapes
from cbexp.engine.burst import Burst, BurstRunner
from cbexp.engine.cb_internals import PagedAttentionCache, build_page_pools
from cbexp.engine.compile_modes import GRAPH_MODES, StepRunner, build_step_runner
from cbexp.engine.compile_stats import CompileStats
from cbexp.engine.buffers import allocate_buffers
from cbexp.engine.decode_model import DecodeModel
from cbexp.engine.fused_forward import FusedForward
from cbexp.engine.buffers import DecodeRow
from cbexp.engine.self_check import SelfCheckResult, check_bucket, summarize_errors
from cbexp.engine.step_timing import time_decode_steps
from cbexp.engine.types import CompileRegion, EngineError, Fusion


@dataclass(frozen=True)
class DecodeSettings:
    """How an engine decodes in bursts; `mode` as named by `settings.compile_mode_name`, the rest as `CBSyncConfig`."""

    shapes: BatchShapes
    max_burst: int
    eos_token_ids: tuple[int, ...]
    mode: str
    region: CompileRegion
    recompile_limit: int | None
    fusion: Fusion
    self_check: bool


class Decoder:
    """Decodes rows on `cache`, between `begin` and `end` of each drive.

    The model must run the engine's attention whenever something runs.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedAttentionCache, settings: DecodeSettings) -> None:
        self.settings = settings
        max_positions = getattr(model.config, "max_position_embeddings", None) or cache.max_tokens_read
        self._pools = build_page_pools(cache, max_positions)
        self._buffers = allocate_buffers(
            self._pools,
            # One more than any batch has: a batch of all rows would be a program of its own (see `CompiledStep`).
            max_rows=settings.shapes.max_rows + 1,
            max_burst=settings.max_burst,
            eos_token_ids=settings.eos_token_ids,
            device=model.device,
        )
        self._callers_model = model
        self._model = DecodeModel(
            model,
            self._buffers.layers,
            settings.fusion,
            max_positions,
            allows_layers=settings.region != "layer",
        )
        self._checks: dict[int, SelfCheckResult] = {}
        self._bursts = BurstRunner(self._buffers, self._pools, settings.shapes)
        self._runner: StepRunner | None = None

    def begin(self) -> None:
        """Take the model over for a drive; what was compiled or captured from weights that have moved is dropped."""
        self._bursts.idle.begin()
        if self._model.begin():
            self._drop_runner()
        if self._runner is None:
            self._runner = self._build_runner()
            self._bursts.use(self._runner, self._check_size)

    def end(self) -> None:
        """Give the modules back to the caller. Safe to call twice."""
        self._model.end()

    def prepare(self) -> None:
        """Compile and capture for every batch size."""
        self._bursts.prepare()

    def submit(self, rows: Sequence[DecodeRow], num_steps: int) -> Burst:
        """Start a burst over `rows`."""
        return self._bursts.submit(rows, num_steps)

    def collect(self, burst: Burst) -> list[list[int]]:
        """Wait for a burst; the tokens that each of its rows has made."""
        return self._bursts.collect(burst)

    def timing_batch(self) -> AbstractContextManager[None]:
        """Count what the body runs, a batch that is no burst, as the device's work."""
        return self._bursts.timing_batch()

    def prefill(self, batch: dict[str, Any], num_rows: int) -> Tensor | None:
        """Next tokens of transformers' packed batch by fused kernels; None where the model's own code has to run it."""
        forward = self._model.forward
        return forward.prefill(batch, num_rows) if isinstance(forward, FusedForward) else None

    def time_steps(self, batch: int, context: int, num_steps: int, num_bursts: int) -> list[float]:
        """Mean seconds of a step in each of some bursts, as `time_decode_steps`; the cache must be idle."""
        if batch not in self.settings.shapes.sizes:
            sizes = ", ".join(map(str, self.settings.shapes.sizes))
            raise EngineError(f"batch={batch} is no batch size of this engine: {sizes}.")
        assert self._runner is not None
        self._bursts.prepare_size(batch)
        return time_decode_steps(
            self._runner,
            self._buffers,
            self._pools,
            bucket=batch,
            context=context,
            num_steps=num_steps,
            num_bursts=num_bursts,
        )

    @property
    def is_on_cpu(self) -> bool:
        """Whether the host itself computes the steps."""
        return self._buffers.positions.device.type == "cpu"

    def describe(self) -> dict[str, Any]:
        """Settings as they run, as plain JSON values."""
        settings, model = self.settings, self._callers_model
        return {
            "decode_mode": settings.mode,
            "compile_region": settings.region,
            "batch_shape": settings.shapes.policy,
            "buckets": list(settings.shapes.buckets),
            "max_burst": settings.max_burst,
            "prefill_attention": describe_attention_path(model.config, model.device, model.dtype),
            "self_check": self._has_check,
            "self_check_results": [asdict(result) for result in self._checks.values()],
        } | self._model.describe()

    @property
    def stats(self) -> dict[str, Any]:
        """`CompileStats` for the weights as they lie now, and the `device_idle_share`.

        That is of drives, between bursts and batches of prompts; None without a GPU, and where the host launches each
        kernel of a burst: the device then waits within bursts, which their events do not tell.
        `mean_logprob_error`, `max_logprob_error` (of the forward run eagerly), `mean_logit_error` and `max_logit_error`
        (of steps as they run) are over the rows of all self-checks (None: nothing was checked).
        """
        stats = CompileStats() if self._runner is None else self._runner.stats
        idle_share = self._bursts.idle.share if self.settings.mode in GRAPH_MODES else None
        return asdict(stats) | {"device_idle_share": idle_share} | summarize_errors(self._checks.values())

    def close(self) -> None:
        """Drop what was captured, and give every parameter its own storage back."""
        self._drop_runner()
        self._model.close()
        # It calls back: a cycle would keep the cache until the next garbage collection.
        del self._bursts

    @property
    def _has_check(self) -> bool:
        """Whether batch sizes are checked: what is neither compiled, captured nor fused is the reference itself."""
        return self.settings.self_check and (self.settings.mode, self._model.fusion) != ("eager", "none")

    def _check_size(self, bucket: int) -> None:
        if not self._has_check:
            return
        assert self._runner is not None
        self._checks[bucket] = check_bucket(
            self._runner,
            self._model.forward,
            self._model.plain_logits,
            self._buffers,
            self._pools,
            bucket=bucket,
            mode=self.settings.mode,
        )

    def _drop_runner(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _build_runner(self) -> StepRunner:
        settings = self.settings
        if settings.region == "layer" and self._model.fusion == "layers":
            raise EngineError(
                "compile_region='layer' compiles the model's own decoder layers, and fusion='layers' runs others in "
                "their place: use compile_region='model', or fusion='none' or 'projections'."
            )
        return build_step_runner(
            self._model.forward,
            self._buffers,
            settings.mode,
            region=settings.region,
            recompile_limit=settings.recompile_limit,
            model=self._callers_model,
        )
