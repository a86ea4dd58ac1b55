"""Tries a model on a paged cache before anything is asked of it: many architectures accept one on paper only."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedModel

from cbexp.engine.batch_shapes import BatchShapes
from cbexp.engine.cb_internals import EngineSettings
from cbexp.engine.decoder import DecodeSettings
from cbexp.engine.paged_engine import PagedEngine
from cbexp.engine.requests import PromptGroup
from cbexp.engine.types import CBSyncConfig, UnsupportedModelError

ONE_ROW = DecodeSettings(
    shapes=BatchShapes("full", (1,)),
    max_burst=1,
    eos_token_ids=(),
    mode="eager",
    region="model",
    recompile_limit=None,
    fusion="none",
    self_check=False,
)


def probe_paged_forward(
    model: PreTrainedModel, config: CBSyncConfig, attn_implementation: str, num_blocks: int
) -> None:
    """Generate two tokens in a cache of `num_blocks` blocks, one request's worth; nothing of it stays.

    Raises `UnsupportedModelError` when the model's forward fails on a paged cache. Running out of memory is no such
    failure and passes through.
    """
    settings = EngineSettings(
        page_size=config.page_size,
        num_blocks=num_blocks,
        max_batch_tokens=config.page_size,
        max_requests_per_batch=1,
        allow_block_sharing=False,
        scheduler="fifo",
        attn_implementation=attn_implementation,
    )
    engine = PagedEngine(model, settings, ONE_ROW if config.has_engine_attention else None)
    engine.submit(PromptGroup(("probe",), (0,), 2, (), time.perf_counter()))
    try:
        engine.begin()
        while engine.step(model) is not None:
            pass
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be driven: its forward fails on a paged cache "
            f"({type(error).__name__}: {error})."
        ) from error
    finally:
        engine.close()
