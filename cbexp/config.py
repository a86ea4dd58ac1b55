"""Names, defaults, units and checks of every setting; the one place where defaults live."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from cbexp.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
INITS = ("pretrained", "random")
ADAPTER_KINDS = ("none", "lora")
DATASET_KINDS = ("arithmetic", "hub", "jsonl", "synthetic")
VERIFIERS = ("none", "arithmetic", "gsm8k", "math")
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
DRIVERS = ("sync", "manager", "generate")
SCHEDULERS = ("fifo", "prefill_first")
BLOCK_SHARING = ("auto", "on", "off")
TRACKING_MODES = ("auto", "online", "offline", "disabled")


def check_choice(key: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`; the message names the key and a near match."""
    allowed = tuple(allowed)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{key}={value!r} is not a choice.{hint} Allowed: {', '.join(allowed)}.")


def check_at_least(key: str, value: float | None, minimum: float) -> None:
    """Raise `ConfigError` when `value` is set and below `minimum`."""
    if value is not None and value < minimum:
        raise ConfigError(f"{key}={value} is too small: it must be at least {minimum}.")


@dataclass
class ModelConfig:
    """What generates. `architecture` holds transformers' own config values and serves `init=random` alone."""

    name: str = "hf"
    name_or_path: str | None = None
    revision: str | None = None
    init: str = "pretrained"
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    default_max_new_tokens: int = 512
    architecture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("model.init", self.init, INITS)
        check_choice("model.dtype", self.dtype, DTYPES)
        check_at_least("model.default_max_new_tokens", self.default_max_new_tokens, 1)
        if self.name_or_path is None and self.init == "pretrained":
            raise ConfigError(
                "model.name_or_path is not set: give a hub id or a folder, as in model.name_or_path=org/name."
            )
        if self.init == "random" and not self.architecture:
            raise ConfigError(
                f"model.init=random needs model.architecture, and model={self.name} has none: "
                "choose a model whose yaml describes its architecture, or write one."
            )


@dataclass
class AdapterConfig:
    """A LoRA adapter: a PEFT folder or hub id in `path`, or, with `path` unset, a random one of rank `rank`."""

    kind: str = "none"
    path: str | None = None
    revision: str | None = None
    rank: int = 16
    alpha: int = 32
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    merged: bool = False

    def __post_init__(self) -> None:
        check_choice("adapter.kind", self.kind, ADAPTER_KINDS)
        check_at_least("adapter.rank", self.rank, 1)


@dataclass
class DatasetConfig:
    """Where prompts come from. `min_length`, `max_length` and `lengths_file` are prompt lengths in tokens (synthetic)."""

    name: str = "arithmetic"
    kind: str = "arithmetic"
    path: str | None = None
    config_name: str | None = None
    revision: str | None = None
    split: str | None = None
    shuffle_seed: int | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    verifier: str = "none"
    num_prompts: int = 32
    num_generations: int = 1
    system_prompt: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    min_length: int | None = None
    max_length: int | None = None
    lengths_file: str | None = None

    def __post_init__(self) -> None:
        check_choice("dataset.kind", self.kind, DATASET_KINDS)
        check_choice("dataset.verifier", self.verifier, VERIFIERS)
        check_at_least("dataset.num_prompts", self.num_prompts, 1)
        check_at_least("dataset.num_generations", self.num_generations, 1)


@dataclass
class SamplingConfig:
    """How tokens are chosen. Greedy for now. `eos_token_ids` None: the union of tokenizer and model."""

    name: str = "greedy"
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    eos_token_ids: list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_at_least("sampling.max_new_tokens", self.max_new_tokens, 1)


@dataclass
class CacheConfig:
    """The paged KV cache. Sizes in tokens; `num_tokens` None: what a round needs, within `max_memory_fraction` of the
    free memory. `page_size` None: 256, or 32 with block sharing."""

    name: str = "auto"
    num_tokens: int | None = None
    page_size: int | None = None
    max_batch_tokens: int = 8192
    max_requests_per_batch: int | None = None
    block_sharing: str = "auto"
    scheduler: str = "fifo"
    max_memory_fraction: float = 0.8

    def __post_init__(self) -> None:
        check_choice("cache.block_sharing", self.block_sharing, BLOCK_SHARING)
        check_choice("cache.scheduler", self.scheduler, SCHEDULERS)
        check_at_least("cache.num_tokens", self.num_tokens, 1)
        check_at_least("cache.page_size", self.page_size, 4)
        check_at_least("cache.max_batch_tokens", self.max_batch_tokens, 1)
        check_at_least("cache.max_requests_per_batch", self.max_requests_per_batch, 1)
        if not 0 < self.max_memory_fraction <= 1:
            raise ConfigError(f"cache.max_memory_fraction={self.max_memory_fraction} must be in (0, 1].")


@dataclass
class CompileConfig:
    """How the forward is compiled and captured; `cache_dir` keeps compiled code between runs."""

    mode: str = "auto"
    recompile_limit: int = 256
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        check_choice("compile.mode", self.mode, COMPILE_MODES)
        check_at_least("compile.recompile_limit", self.recompile_limit, 1)


@dataclass
class DriverConfig:
    """Who generates: the synchronous driver, transformers' threaded manager, or transformers' `generate`."""

    name: str = "sync"

    def __post_init__(self) -> None:
        check_choice("driver.name", self.name, DRIVERS)


@dataclass
class TrackingConfig:
    """Weights & Biases. `max_logged_completions` bounds the completions table (rows)."""

    mode: str = "auto"
    project: str = "cbexp"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    log_completions: bool = False
    max_logged_completions: int = 100

    def __post_init__(self) -> None:
        check_choice("tracking.mode", self.mode, TRACKING_MODES)
        check_at_least("tracking.max_logged_completions", self.max_logged_completions, 1)


@dataclass
class ArtifactsConfig:
    """What the run directory keeps. `completions`: all, none, or the number of completions kept a round."""

    completions: str = "all"

    def __post_init__(self) -> None:
        if self.completions not in ("all", "none") and not self.completions.isdigit():
            raise ConfigError(f"artifacts.completions={self.completions!r} must be all, none or a number of rows.")


@dataclass
class ExperimentConfig:
    """One job, whole. `stats_path`: a further place for the summary, relative to the launch folder."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name_or_path="builtin:tiny"))
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    driver: DriverConfig = field(default_factory=DriverConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)
    name: str = "default"
    seed: int = 0
    num_warmup_rounds: int = 1
    num_rounds: int = 5
    stats_path: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        check_at_least("num_warmup_rounds", self.num_warmup_rounds, 0)
        check_at_least("num_rounds", self.num_rounds, 1)

    @property
    def max_new_tokens(self) -> int:
        """The limit a request has: the sampling group's, else the model's default."""
        return self.sampling.max_new_tokens or self.model.default_max_new_tokens


def register_schema() -> None:
    """Register the schema in Hydra's ConfigStore under the name that `conf/config.yaml` starts from."""
    ConfigStore.instance().store(name="cbexp_schema", node=ExperimentConfig)
