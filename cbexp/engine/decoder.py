"""The decode side of an engine: its settings, and the burst runner built from them on a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from cbexp.engine.batch_shapes import BatchShapes
from cbexp.engine.burst import BurstRunner
from cbexp.engine.cb_internals import PagedAttentionCache, build_page_pools
from cbexp.engine.decode_buffers import DecodeBuffers, allocate_decode_buffers
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.sampling import advance
from cbexp.engine.types import CompileRegion, EngineError, Fusion


@dataclass(frozen=True)
class DecodeSettings:
    """How an engine decodes in bursts; `mode` as named by `settings.compile_mode_name`."""

    shapes: BatchShapes
    max_burst: int
    eos_token_ids: tuple[int, ...]
    mode: str
    region: CompileRegion
    fusion: Fusion

    def describe(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return {
            "decode_mode": self.mode,
            "compile_region": self.region,
            "fusion": self.fusion,
            "batch_shape": self.shapes.policy,
            "buckets": list(self.shapes.buckets),
            "max_burst": self.max_burst,
        }


class EagerStepRunner:
    """Decode steps as plain calls."""

    def __init__(self, forward: ModelForward, buffers: DecodeBuffers) -> None:
        self._forward = forward
        self._buffers = buffers

    def prepare(self, bucket: int) -> None:
        """Nothing to prepare."""

    def run(self, bucket: int, num_steps: int) -> None:
        """Run the steps."""
        for _ in range(num_steps):
            advance(
                self._buffers,
                self._forward(self._buffers.token_ids[:bucket], self._buffers.positions[:bucket]),
            )

    def close(self) -> None:
        """Nothing to drop."""


def build_burst_runner(
    model: PreTrainedModel, cache: PagedAttentionCache, settings: DecodeSettings
) -> BurstRunner:
    """Static buffers on the cache's pages, the model's decode forward over them, and what runs its steps."""
    if settings.mode != "eager" or settings.fusion not in ("auto", "none"):
        raise EngineError(
            f"decode mode {settings.mode} with fusion={settings.fusion!r} is not available yet: use compile_mode=None, "
            "cuda_graph=False and fusion='none'."
        )
    pools = build_page_pools(cache, getattr(model.config, "max_position_embeddings", None))
    buffers = allocate_decode_buffers(
        pools,
        max_rows=settings.shapes.max_rows,
        max_burst=settings.max_burst,
        eos_token_ids=settings.eos_token_ids,
        device=torch.device(model.device),
    )
    runner = EagerStepRunner(ModelForward(model, buffers.layers), buffers)
    return BurstRunner(runner, buffers, pools, settings.shapes)
