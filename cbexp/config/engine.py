"""Settings of who generates and how: driver, cache, compilation. What the engine takes, it checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from cbexp.checks import check_at_least, check_choice
from cbexp.drivers.registry import DRIVERS
from cbexp.engine.types import COMPILE_MODES, BatchShape, CBSyncConfig, Fusion, Scheduler
from cbexp.errors import ConfigError

BLOCK_SHARING = ("auto", "on", "off")


@dataclass
class CacheConfig:
    """The paged KV cache, sizes in tokens.

    `num_tokens` is rounded up to whole pages; None: what the requests of a round need that run at once, within
    `max_memory_fraction` of the free memory. `page_size` None: 256, or 32 with block sharing; vLLM's is 16.
    """

    name: str = "auto"
    num_tokens: int | None = None
    page_size: int | None = None
    max_batch_tokens: int = CBSyncConfig.max_batch_tokens
    max_requests_per_batch: int | None = None
    block_sharing: str = "auto"
    scheduler: str = CBSyncConfig.scheduler
    max_memory_fraction: float = CBSyncConfig.max_memory_fraction

    def __post_init__(self) -> None:
        check_choice("cache.block_sharing", self.block_sharing, BLOCK_SHARING)
        check_choice("cache.scheduler", self.scheduler, get_args(Scheduler))
        check_at_least("cache.num_tokens", self.num_tokens, 1)
        if self.max_requests_per_batch is not None:
            check_at_least("cache.max_batch_tokens", self.max_batch_tokens, self.max_requests_per_batch)


@dataclass
class CompileConfig:
    """How the decode forward is compiled, captured and batched.

    `fusion`: matrix products of projections, or whole decoder layers, as one. `batch_shape`: the rows a decode step
    computes: those it has, the next of `buckets` (None: powers of two up to the largest batch), or always the largest.
    `max_burst`: decode steps between two looks of the host. `self_check`: compare each bucket's forward with the eager
    one before it is used. `cache_dir` keeps compiled code between runs (None: PyTorch's own folder, which a reboot
    empties); TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR go before it.
    """

    mode: str = "auto"
    fusion: str = CBSyncConfig.fusion
    batch_shape: str = CBSyncConfig.batch_shape
    buckets: list[int] | None = None
    max_burst: int = CBSyncConfig.max_burst
    self_check: bool = CBSyncConfig.self_check
    recompile_limit: int = 256
    cache_dir: str | None = "~/.cache/cbexp/compile"

    def __post_init__(self) -> None:
        check_choice("compile.mode", self.mode, ("auto", *COMPILE_MODES))
        check_choice("compile.fusion", self.fusion, get_args(Fusion))
        check_choice("compile.batch_shape", self.batch_shape, get_args(BatchShape))
        if self.cache_dir == "":
            raise ConfigError("compile.cache_dir is empty: give a folder, or null for PyTorch's own.")


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
