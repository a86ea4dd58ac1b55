"""Settings of who generates and how: driver, cache, compilation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from cbexp.checks import check_at_least, check_choice
from cbexp.errors import ConfigError

COMPILE_MODES = (
    "auto",
    "eager",
    "default",
    "reduce_overhead",
    "max_autotune",
    "max_autotune_no_cudagraphs",
    "cuda_graph",
    "compiled_cuda_graph",
)
COMPILE_REGIONS = ("model", "layer")
# A layer compiled on its own has no graph that spans the model, and without a compiler there is none at all.
COMPILE_MODES_WITH_LAYER_REGION = ("default", "max_autotune_no_cudagraphs", "compiled_cuda_graph")
FUSIONS = ("auto", "none", "projections", "layers")
BATCH_SHAPES = ("natural", "buckets", "full")
DRIVERS = ("sync", "manager", "generate", "vllm")
SCHEDULERS = ("fifo", "prefill_first")
BLOCK_SHARING = ("auto", "on", "off")
# Of the engine (cbexp.engine.settings, cb_internals), which this module does not import.
MAX_BUCKET, MAX_BURST = 1024, 4096
MAX_MEMORY_FRACTION = 0.9


@dataclass
class CacheConfig:
    """The paged KV cache, sizes in tokens.

    `num_tokens` is rounded up to whole pages; None: what a round needs, within `max_memory_fraction` of the free
    memory. `page_size` None: 256, or 32 with block sharing; vLLM's is 16.
    """

    name: str = "auto"
    num_tokens: int | None = None
    page_size: int | None = None
    max_batch_tokens: int = 16_384
    max_requests_per_batch: int | None = None
    block_sharing: str = "auto"
    scheduler: str = "fifo"
    max_memory_fraction: float = 0.8

    def __post_init__(self) -> None:
        check_choice("cache.block_sharing", self.block_sharing, BLOCK_SHARING)
        check_choice("cache.scheduler", self.scheduler, SCHEDULERS)
        check_at_least("cache.page_size", self.page_size, 4)
        check_at_least("cache.num_tokens", self.num_tokens, 1)
        check_at_least("cache.max_requests_per_batch", self.max_requests_per_batch, 1)
        check_at_least("cache.max_batch_tokens", self.max_batch_tokens, self.max_requests_per_batch or 1)
        if not 0 < self.max_memory_fraction <= MAX_MEMORY_FRACTION:
            raise ConfigError(
                f"cache.max_memory_fraction={self.max_memory_fraction} must be in (0, {MAX_MEMORY_FRACTION}]: the "
                "rest is for what a step computes."
            )


@dataclass
class CompileConfig:
    """How the decode forward is compiled, captured and batched.

    `region`: what torch.compile takes at once. `fusion`: matrix products of projections, or whole decoder layers, as
    one. `batch_shape`: the rows a decode step computes: those it has, the next of `buckets` (None: powers of two up to
    the largest batch), or always the largest. `max_burst`: decode steps between two looks of the host. `self_check`:
    compare each bucket's forward with the eager one before it is used. `cache_dir` keeps compiled code between runs
    (None: PyTorch's own folder, which a reboot empties); TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR go before it.
    """

    mode: str = "auto"
    region: str = "model"
    fusion: str = "auto"
    batch_shape: str = "buckets"
    buckets: list[int] | None = None
    max_burst: int = 128
    self_check: bool = True
    recompile_limit: int = 256
    cache_dir: str | None = "~/.cache/cbexp/compile"

    def __post_init__(self) -> None:
        check_choice("compile.mode", self.mode, COMPILE_MODES)
        check_choice("compile.region", self.region, COMPILE_REGIONS)
        check_choice("compile.fusion", self.fusion, FUSIONS)
        check_choice("compile.batch_shape", self.batch_shape, BATCH_SHAPES)
        check_at_least("compile.max_burst", self.max_burst, 1)
        check_at_least("compile.recompile_limit", self.recompile_limit, 1)
        if self.max_burst > MAX_BURST:
            raise ConfigError(f"compile.max_burst={self.max_burst} is too large: at most {MAX_BURST} steps.")
        if self.cache_dir == "":
            raise ConfigError("compile.cache_dir is empty: give a folder, or null for PyTorch's own.")
        if self.buckets is not None:
            self._check_buckets(self.buckets)
        if self.mode != "auto":
            check_region(self.region, self.mode)
        if self.region == "layer" and self.fusion == "layers":
            raise ConfigError(
                "compile.region=layer and compile.fusion=layers exclude each other: one compiles the model's own "
                "layers, the other runs fused ones instead. Set compile.region=model, or compile.fusion=projections."
            )

    def _check_buckets(self, buckets: list[int]) -> None:
        is_ascending = all(a < b for a, b in itertools.pairwise(buckets))
        if not buckets or buckets[0] < 1 or not is_ascending or buckets[-1] > MAX_BUCKET:
            shown = ",".join(map(str, buckets))
            raise ConfigError(
                f"compile.buckets=[{shown}] must be batch sizes of at least 1 in ascending order, as in [1,8,32], "
                f"and of at most {MAX_BUCKET}."
            )


def check_region(region: str, mode: str) -> None:
    """Raise `ConfigError` unless the (resolved) compile mode can compile by `region`."""
    if region == "layer" and mode not in COMPILE_MODES_WITH_LAYER_REGION:
        reason = (
            "compiles nothing" if mode in ("eager", "cuda_graph") else "needs the whole model for its graphs"
        )
        raise ConfigError(
            f"compile.region=layer does not work with compile.mode={mode}, which {reason}: use "
            f"compile={' or '.join(COMPILE_MODES_WITH_LAYER_REGION)}, or compile.region=model."
        )


@dataclass
class DriverConfig:
    """Who generates: the synchronous driver, transformers' threaded manager, transformers' `generate`, or vLLM.

    The rest is vLLM's, which runs in a process of its own: under the interpreter `python` (None: this one), with
    `pythonpath` as its whole PYTHONPATH (None: none). `start_timeout_s` bounds its start, compiling and capturing
    included. `request_times` has it keep each request's times, for which it works a little more.
    """

    name: str = "sync"
    python: str | None = None
    pythonpath: str | None = None
    start_timeout_s: float = 1200.0
    request_times: bool = False

    def __post_init__(self) -> None:
        check_choice("driver.name", self.name, DRIVERS)
        if not self.start_timeout_s > 0:
            raise ConfigError(f"driver.start_timeout_s={self.start_timeout_s} must be more than 0 seconds.")
