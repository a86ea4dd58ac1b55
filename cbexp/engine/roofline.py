"""The memory roofline of a decode step: how fast this device reads, and the bytes that a step has to read."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from cbexp.engine.sizing import kv_bytes_per_token
from cbexp.engine.types import EngineError

BUFFER_BYTES = 2 * 2**30
# Several times the last-level cache of any card, which would otherwise be what is measured.
MIN_BUFFER_BYTES = 2**30 // 2
NUM_WARMUP_LAUNCHES = 3
MIN_LAUNCHES = 5
MAX_LAUNCHES = 500
# The rows of the buffer that torch's sum reduces, so that it runs as many programs as it likes.
NUM_SUM_ROWS = 2**13

EMBEDDING_NAMES = ("embed_tokens.weight", "embed_in.weight", "word_embeddings.weight", "wte.weight")
EXPERT_MARK = ".experts."  # routed ones: shared experts are in `shared_expert(s)`
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads at least: each weight once, and the keys and values of every row."""

    weight_bytes: int
    kv_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.weight_bytes + self.kv_bytes


@torch.no_grad()
def measure_read_bandwidth(device: torch.device, seconds: float = 0.2) -> float:
    """Return the bytes per second at which `device` streams through its memory, in about `seconds` of reading.

    It stands for one limit alone: reading once, in order, far more than any cache holds, with nothing to compute and
    nothing to write (the figure of a data sheet is higher, that of a copy may be). The best of several read kernels
    counts, by the median of its launches between device events; without Triton it is torch's sum. The buffer takes
    2 GiB or a quarter of the free memory, and is given back.

    Raises:
        EngineError: `device` is not a CUDA device, or has no memory left to measure with.
    """
    if device.type != "cuda":
        raise EngineError(f"memory bandwidth is measured with CUDA events, and the device is {device}.")
    with torch.cuda.device(device):
        buffer = _allocate_buffer(device)
        try:
            launches = list(_read_launches(buffer))
            medians_s = [_time_launch(launch, seconds / len(launches)) for launch in launches]
        finally:
            num_bytes = buffer.nbytes
            launches = []
            del buffer
            torch.cuda.empty_cache()
    return num_bytes / min(medians_s)


def decode_step_bytes(
    config: PreTrainedConfig, params: Mapping[str, Tensor], batch: int, context: int
) -> StepBytes:
    """Return the bytes that a decode step of `batch` rows must read when each attends to `context` tokens.

    `params` are the model's named parameters, tied ones once (on the meta device, too). Writes and activations are not
    counted: at these batch sizes they stay in caches.

    Raises:
        EngineError: the model has experts and its config does not say how many, or no embedding is found.
    """
    by_parameter = weight_bytes_by_parameter(config, params, batch)
    return StepBytes(
        weight_bytes=round(sum(by_parameter.values())),
        kv_bytes=batch * sum(kv_bytes_by_layer(config, _embedding(params).dtype, context)),
    )


def weight_bytes_by_parameter(
    config: PreTrainedConfig, params: Mapping[str, Tensor], batch: int
) -> dict[str, float]:
    """Return parameter name -> bytes of it that a decode step of `batch` rows reads; raises as `decode_step_bytes`.

    An embedding that is not tied to the head is read for the rows' tokens alone. Of experts those count that `batch`
    tokens are expected to reach when each takes `num_experts_per_tok` of them at random: n * (1 - (1 - k / n)^batch).
    """
    shares = dict.fromkeys(params, 1.0)
    if not config.tie_word_embeddings:
        name = _embedding_name(params)
        shares[name] = min(1.0, batch / params[name].shape[0])
    experts = [name for name in params if EXPERT_MARK in name]
    if experts:
        shares |= dict.fromkeys(experts, _touched_share(config, batch))
    return {name: shares[name] * tensor.numel() * tensor.element_size() for name, tensor in params.items()}


def kv_bytes_by_layer(config: PreTrainedConfig, dtype: torch.dtype, context: int) -> list[int]:
    """Return the bytes of keys and values that one row attending to `context` tokens reads in each layer."""
    token_bytes = kv_bytes_per_token(config, dtype) // config.num_hidden_layers
    return [token_bytes * min(context, window) for window in _layer_windows(config, context)]


def _layer_windows(config: PreTrainedConfig, context: int) -> list[int]:
    """Tokens that each layer can attend to; without `layer_types`, a sliding window holds for all layers."""
    window = getattr(config, "sliding_window", None) or context
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else context for kind in layer_types]


def _touched_share(config: PreTrainedConfig, batch: int) -> float:
    num_experts = next((n for key in NUM_EXPERTS_KEYS if (n := getattr(config, key, None))), None)
    num_chosen = getattr(config, "num_experts_per_tok", None)
    if num_experts is None or num_chosen is None:
        raise EngineError(
            f"{config.model_type} has experts, and its config lacks num_experts_per_tok or their number "
            f"({', '.join(NUM_EXPERTS_KEYS)}): what a decode step reads is not known."
        )
    return float(1 - (1 - num_chosen / num_experts) ** batch)


def _embedding_name(params: Mapping[str, Tensor]) -> str:
    name = next((name for name in params if name.endswith(EMBEDDING_NAMES)), None)
    if name is None:
        raise EngineError(f"no parameter is an embedding: none is named {' or '.join(EMBEDDING_NAMES)}.")
    return name


def _embedding(params: Mapping[str, Tensor]) -> Tensor:
    return params[_embedding_name(params)]


def _allocate_buffer(device: torch.device) -> Tensor:
    """Random float32 values (zeros cost less power, and are read faster on some cards), of a generator of its own."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    num_bytes = min(BUFFER_BYTES, free_bytes // 4)
    if num_bytes < MIN_BUFFER_BYTES:
        raise EngineError(
            f"measuring the bandwidth of {device} takes {MIN_BUFFER_BYTES / 2**30} GiB, at most a quarter of "
            f"the free memory, and {free_bytes / 2**30:.2f} GiB are free: measure before the cache is built."
        )
    num_columns = num_bytes // (4 * NUM_SUM_ROWS) // 1024 * 1024
    generator = torch.Generator(device)
    return torch.randn(NUM_SUM_ROWS, num_columns, generator=generator, dtype=torch.float32, device=device)


def _read_launches(buffer: Tensor) -> Iterator[Callable[[], object]]:
    """Ways to read all of `buffer`, whose size is a multiple of every tile's chunk."""
    yield partial(buffer.sum, dim=1)
    if importlib.util.find_spec("triton") is None:
        return
    from cbexp.engine.kernels.read_stream import READ_TILES, sum_chunks

    num_sums = buffer.numel() // min(tile.chunk_size for tile in READ_TILES)
    sums = torch.empty(num_sums, dtype=buffer.dtype, device=buffer.device)
    for tile in READ_TILES:
        yield partial(sum_chunks, buffer, sums, tile)


def _time_launch(launch: Callable[[], object], seconds: float) -> float:
    """Return the median seconds of a launch, over as many launches as fit in `seconds`."""
    _record_launches(launch, NUM_WARMUP_LAUNCHES)
    estimate_s = min(_record_launches(launch, NUM_WARMUP_LAUNCHES))
    num_launches = max(MIN_LAUNCHES, min(MAX_LAUNCHES, round(seconds / estimate_s)))
    return statistics.median(_record_launches(launch, num_launches))


def _record_launches(launch: Callable[[], object], num_launches: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(num_launches)
    ]
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in events]
