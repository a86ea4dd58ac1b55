"""Names, defaults, units and checks of every setting; the one place where defaults live."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from cbexp.checks import check_at_least, check_choice, check_is_set
from cbexp.errors import ConfigError

MAX_SEED = 2**63 - 1  # PyTorch's
DTYPES = ("auto", "bfloat16", "float16", "float32")
INITS = ("pretrained", "random")
BUILTIN_PREFIX = "builtin:"
ADAPTER_KINDS = ("none", "lora")
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
COMPILE_REGIONS = ("model", "layer")
# A layer compiled on its own has no graph that spans the model, and without a compiler there is none at all.
COMPILE_MODES_WITH_LAYER_REGION = ("default", "max_autotune_no_cudagraphs", "compiled_cuda_graph")
FUSIONS = ("auto", "none", "projections", "layers")
BATCH_SHAPES = ("natural", "buckets", "full")
DRIVERS = ("sync", "manager", "generate", "vllm")
SCHEDULERS = ("fifo", "prefill_first")
BLOCK_SHARING = ("auto", "on", "off")
ISOLATIONS = ("process", "none")
TRACKING_MODES = ("auto", "online", "offline", "disabled")

_CHAT_FIELDS = {"system_prompt", "chat_template", "chat_template_kwargs"}
_ROW_FIELDS = {"path", "shuffle_seed", "prompt_field", "answer_field", "verifier"} | _CHAT_FIELDS
_LENGTH_FIELDS = {"min_length", "max_length", "lengths_seed", "lengths_file"}
_FIELDS_OF_ALL_KINDS = {"name", "kind", "num_prompts", "num_generations"}
# Of the engine (cbexp.engine.settings), which this module does not import.
MAX_BUCKET, MAX_BURST = 1024, 4096
MAX_SIGMA = 10.0
# How the cells of a sweep are run, which changes nothing of what one of them does.
SWEEP_SETTINGS = ("isolation", "cell_timeout_s", "resume", "resume_force")
DATASET_FIELDS_BY_KIND: dict[str, set[str]] = {
    "arithmetic": {"verifier"} | _CHAT_FIELDS,
    "hub": {"config_name", "revision", "split"} | _ROW_FIELDS,
    "jsonl": _ROW_FIELDS,
    "synthetic": _LENGTH_FIELDS,
}
DATASET_KINDS = tuple(DATASET_FIELDS_BY_KIND)


@dataclass
class ModelConfig:
    """What generates. `architecture` holds transformers' own config values and serves `init=random` alone.

    `num_threads`: threads of one operation on a CPU; None takes PyTorch's default, a thread a core.
    """

    name: str = "hf"
    name_or_path: str | None = None
    revision: str | None = None
    init: str = "pretrained"
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str = "auto"
    trust_remote_code: bool = False
    num_threads: int | None = None
    default_max_new_tokens: int = 512
    architecture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("model.init", self.init, INITS)
        check_choice("model.dtype", self.dtype, DTYPES)
        check_at_least("model.default_max_new_tokens", self.default_max_new_tokens, 1)
        check_at_least("model.num_threads", self.num_threads, 1)
        if self.num_threads is not None and self.num_threads > (os.cpu_count() or 1):
            raise ConfigError(
                f"model.num_threads={self.num_threads} is too large: this machine has {os.cpu_count()} cores."
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(
                f"model.device={self.device} is not a device. Allowed: auto, cpu, cuda, cuda:INDEX."
            )
        if self.init == "pretrained":
            check_is_set(
                "model.name_or_path",
                self.name_or_path,
                "give a hub id or a folder, as in model.name_or_path=org/name",
            )
        elif not self.architecture:
            raise ConfigError(
                f"model.init=random needs model.architecture, and model={self.name} has none: "
                "choose a model whose yaml describes its architecture, or write one."
            )
        if self.revision is not None and self.is_builtin:
            raise ConfigError(
                f"model.revision={self.revision} has no effect: {self.name_or_path} comes with cbexp and has no "
                "revisions. Remove it."
            )

    @property
    def is_builtin(self) -> bool:
        """Whether the weights come with the package (`builtin:tiny`)."""
        return (self.name_or_path or "").startswith(BUILTIN_PREFIX)


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
        check_at_least("adapter.alpha", self.alpha, 1)
        if not self.target_modules:
            raise ConfigError(
                "adapter.target_modules=[] names no module: give at least one, as in [q_proj,v_proj]."
            )


@dataclass
class DatasetConfig:
    """Where prompts come from. Each kind reads the fields that `DATASET_FIELDS_BY_KIND` names, and refuses the others.

    `min_length`, `max_length` and `lengths_file` (one length a line, or a JSON list) are prompt lengths in tokens;
    lengths are drawn from `lengths_seed` (None: the root `seed`), the token ids from the root `seed`. `answer_field`
    is read for a verifier alone.
    """

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
    lengths_seed: int | None = None
    lengths_file: str | None = None

    def __post_init__(self) -> None:
        check_choice("dataset.kind", self.kind, DATASET_KINDS)
        check_choice("dataset.verifier", self.verifier, VERIFIERS)
        check_at_least("dataset.num_prompts", self.num_prompts, 1)
        check_at_least("dataset.num_generations", self.num_generations, 1)
        self._refuse_fields_of_other_kinds()
        if self.kind == "synthetic":
            self._check_lengths()
        elif self.kind in ("hub", "jsonl"):
            self._check_rows()

    def _refuse_fields_of_other_kinds(self) -> None:
        used = _FIELDS_OF_ALL_KINDS | DATASET_FIELDS_BY_KIND[self.kind]
        idle = [key for key in list_changed_fields(self) if key not in used]
        if idle:
            raise ConfigError(
                f"dataset.{idle[0]}={getattr(self, idle[0])} has no effect with dataset={self.name} "
                f"(kind {self.kind}), which reads: {', '.join(sorted(used - {'name', 'kind'}))}."
            )

    def _check_lengths(self) -> None:
        if self.lengths_file is not None:
            if not self.min_length == self.max_length == self.lengths_seed is None:
                raise ConfigError(
                    "dataset.lengths_file excludes min_length, max_length and lengths_seed: choose "
                    f"dataset=synthetic_file dataset.lengths_file={self.lengths_file}."
                )
            return
        example = (
            "give a range in tokens, as in dataset.min_length=100 dataset.max_length=300, or a lengths_file"
        )
        check_is_set("dataset.min_length", self.min_length, example)
        check_is_set("dataset.max_length", self.max_length, example)
        check_at_least("dataset.min_length", self.min_length, 1)
        check_at_least("dataset.max_length", self.max_length, self.min_length or 1)

    def _check_rows(self) -> None:
        what = "a dataset's hub id" if self.kind == "hub" else "a file with one JSON object a line"
        check_is_set("dataset.path", self.path, f"name {what}")
        check_is_set("dataset.prompt_field", self.prompt_field, "name the field that holds the prompt")
        if self.kind == "hub":
            check_is_set("dataset.split", self.split, "name the split, as in dataset.split=train")
        if self.verifier != "none":
            check_is_set(
                "dataset.answer_field",
                self.answer_field,
                f"name the field that holds the answer (dataset.verifier={self.verifier} compares with it)",
            )


@dataclass
class SamplingConfig:
    """How tokens are chosen, and how many. Greedy for now. `eos_token_ids` None: the union of tokenizer and model.

    `max_new_tokens` is every request's limit. Each prompt gets a limit of its own from `max_new_tokens_file` (a JSON
    list of whole numbers), or one drawn log-normally around `median_new_tokens`, of which `max_new_tokens` is the
    longest: `sigma_new_tokens` is the deviation of their logarithm, `new_tokens_seed` None the root `seed`.
    """

    name: str = "greedy"
    max_new_tokens: int | None = None
    max_new_tokens_file: str | None = None
    median_new_tokens: int | None = None
    sigma_new_tokens: float = 1.0
    new_tokens_seed: int | None = None
    ignore_eos: bool = False
    eos_token_ids: list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_at_least("sampling.max_new_tokens", self.max_new_tokens, 1)
        check_at_least("sampling.sigma_new_tokens", self.sigma_new_tokens, 0)
        if not self.sigma_new_tokens <= MAX_SIGMA:
            raise ConfigError(
                f"sampling.sigma_new_tokens={self.sigma_new_tokens} must be a number from 0 to {MAX_SIGMA}."
            )
        check_at_least("sampling.new_tokens_seed", self.new_tokens_seed, 0)
        if self.median_new_tokens is not None:
            self._check_drawn_limits(self.median_new_tokens)
        if self.max_new_tokens_file is not None and self.max_new_tokens is not None:
            raise ConfigError(
                f"sampling.max_new_tokens={self.max_new_tokens} and sampling.max_new_tokens_file exclude each other: "
                "the file has every prompt's limit. Set one of them to null."
            )
        check_at_least("sampling.pad_token_id", self.pad_token_id, 0)
        for token_id in self.eos_token_ids or []:
            check_at_least("sampling.eos_token_ids", token_id, 0)
        if self.eos_token_ids == []:
            raise ConfigError("sampling.eos_token_ids=[] ends nothing: say sampling.ignore_eos=true instead.")

    @property
    def has_limits_per_prompt(self) -> bool:
        """Whether each prompt has a limit of its own."""
        return self.max_new_tokens_file is not None or self.median_new_tokens is not None

    def _check_drawn_limits(self, median: int) -> None:
        check_at_least("sampling.median_new_tokens", median, 1)
        if self.max_new_tokens_file is not None:
            raise ConfigError(
                f"sampling.median_new_tokens={median} and sampling.max_new_tokens_file exclude each other: limits are "
                "drawn or read. Set one of them to null."
            )
        example = f"give the longest limit that sampling.median_new_tokens={median} may draw, as in 8192"
        check_is_set("sampling.max_new_tokens", self.max_new_tokens, example)
        if self.max_new_tokens is not None and self.max_new_tokens < median:
            raise ConfigError(
                f"sampling.max_new_tokens={self.max_new_tokens} is the longest limit that may be drawn: "
                f"it must be at least {median}, sampling.median_new_tokens."
            )


@dataclass
class CacheConfig:
    """The paged KV cache, sizes in tokens.

    `num_tokens` None: what a round needs, within `max_memory_fraction` of the free memory. `page_size` None: 256, or
    32 with block sharing; vLLM's is 16.
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
        check_at_least("cache.num_tokens", self.num_tokens, self.page_size or 1)
        check_at_least("cache.max_requests_per_batch", self.max_requests_per_batch, 1)
        check_at_least("cache.max_batch_tokens", self.max_batch_tokens, self.max_requests_per_batch or 1)
        if not 0 < self.max_memory_fraction <= 1:
            raise ConfigError(f"cache.max_memory_fraction={self.max_memory_fraction} must be in (0, 1].")


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


@dataclass
class TrackingConfig:
    """Weights & Biases. `max_logged_completions` bounds the completions table (rows).

    `per_cell` false: a sweep is one run with a table of its cells. `max_memory_gib` is a search's limit: the objective
    of a run whose peak memory is above it is 0.
    """

    mode: str = "auto"
    project: str = "cbexp"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    per_cell: bool = True
    max_memory_gib: float | None = None
    log_completions: bool = False
    max_logged_completions: int = 100

    def __post_init__(self) -> None:
        check_choice("tracking.mode", self.mode, TRACKING_MODES)
        check_is_set(
            "tracking.project", self.project, "give the project's name, as in tracking.project=cbexp"
        )
        check_at_least("tracking.max_logged_completions", self.max_logged_completions, 1)
        if self.max_memory_gib is not None and not self.max_memory_gib > 0:
            raise ConfigError(
                f"tracking.max_memory_gib={self.max_memory_gib} must be a number above 0 (GiB)."
            )


@dataclass
class ArtifactsConfig:
    """What the run directory keeps. `completions`: all, none, or the number of completions kept a round."""

    completions: str = "all"

    def __post_init__(self) -> None:
        if self.completions not in ("all", "none") and not re.fullmatch("[0-9]+", self.completions):
            raise ConfigError(
                f"artifacts.completions={self.completions} must be all, none or a number of rows."
            )


@dataclass
class ExperimentConfig:
    """One job, whole. `stats_path`: a further place for the summary, relative to the launch folder.

    Of a sweep (`SWEEP_SETTINGS`): `isolation` says whether each cell runs in a process of its own, which
    `cell_timeout_s` ends; `resume` names the sweep of which to run what is missing (a folder, or `latest`), and
    `resume_force` does so over another commit or other versions.
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name="tiny", name_or_path="builtin:tiny"))
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
    isolation: str = "process"
    cell_timeout_s: float | None = None
    resume: str | None = None
    resume_force: bool = False

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)
        if self.seed > MAX_SEED:
            raise ConfigError(f"seed={self.seed} is too large: it must be at most {MAX_SEED}.")
        check_at_least("num_warmup_rounds", self.num_warmup_rounds, 0)
        check_at_least("num_rounds", self.num_rounds, 1)
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ConfigError(
                f"name={self.name!r} names a folder of outputs: use letters, digits, '_', '-' and '.', and start with "
                "a letter or digit."
            )
        self._check_sweep_settings()
        if self.driver.name == "vllm" and self.adapter.kind != "none":
            raise ConfigError(
                f"adapter={self.adapter.kind} does not work with driver=vllm, which runs the model without one: use "
                "adapter=none, or another driver."
            )
        if self.has_paged_cache:
            self._check_cache()
        if self.driver.name == "sync" and self.compile.buckets and self.compile.batch_shape != "natural":
            self._check_largest_bucket(self.compile.buckets[-1])

    @property
    def max_new_tokens(self) -> int:
        """The limit of a request, or the longest that is drawn: the sampling group's, else the model's default.

        The limits of a file are not known here, but to the plan.
        """
        return self.sampling.max_new_tokens or self.model.default_max_new_tokens

    @property
    def has_paged_cache(self) -> bool:
        """Whether the driver has a paged cache, transformers' or vLLM's; `generate` has none."""
        return self.driver.name != "generate"

    def _check_sweep_settings(self) -> None:
        check_choice("isolation", self.isolation, ISOLATIONS)
        if self.cell_timeout_s is not None:
            if not self.cell_timeout_s > 0:
                raise ConfigError(
                    f"cell_timeout_s={self.cell_timeout_s} must be a number of seconds above 0."
                )
            if self.isolation == "none":
                raise ConfigError(
                    f"cell_timeout_s={self.cell_timeout_s} has no effect with isolation=none, which runs cells in the "
                    "sweep's own process: remove one of them."
                )
        if self.resume is not None:
            check_is_set("resume", self.resume, "give a sweep's folder, or resume=latest")
            if self.dry_run:
                raise ConfigError(
                    f"resume={self.resume} has no effect with dry_run=true: remove one of them."
                )
        elif self.resume_force:
            raise ConfigError("resume_force=true has no effect without resume: give resume=FOLDER or latest.")

    def _check_cache(self) -> None:
        max_requests, num_generations = self.cache.max_requests_per_batch, self.dataset.num_generations
        if max_requests is not None and max_requests < num_generations:
            raise ConfigError(
                f"cache.max_requests_per_batch={max_requests} is too small: it must hold the "
                f"dataset.num_generations={num_generations} requests of a prompt."
            )
        if self.sampling.has_limits_per_prompt:  # the plan, which knows them, checks them
            return
        num_needed = (self.dataset.max_length or 1) + self.max_new_tokens
        if self.cache.num_tokens is not None and self.cache.num_tokens < num_needed:
            raise ConfigError(
                f"cache.num_tokens={self.cache.num_tokens} is too small: one request needs {num_needed} (its prompt "
                f"and max_new_tokens={self.max_new_tokens})."
            )

    def _check_largest_bucket(self, largest: int) -> None:
        batch = max(self.cache.max_requests_per_batch or 1, self.dataset.num_generations)
        if largest < batch:
            raise ConfigError(
                f"compile.buckets ends at {largest}, and a batch may have {batch} requests "
                "(cache.max_requests_per_batch or dataset.num_generations): add a bucket that holds them."
            )


@dataclass(frozen=True)
class SweepInfo:
    """Where a job stands in its sweep, counted from 0; `group` names the sweep."""

    group: str
    num_jobs: int
    job_index: int


def to_plain_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Return every setting as nested plain dicts and lists, ready for JSON."""
    return dataclasses.asdict(config)


def from_plain_dict(values: Mapping[str, Any]) -> ExperimentConfig:
    """Return the configuration that `to_plain_dict` made `values` of; the schema's own checks run.

    Raises:
        ConfigError: a combination is impossible.
        TypeError: a key is not of this version's schema.
    """
    types = get_type_hints(ExperimentConfig)
    return ExperimentConfig(
        **{
            key: types[key](**value) if dataclasses.is_dataclass(types.get(key)) else value
            for key, value in values.items()
        }
    )


def register_schema() -> None:
    """Register the schema in Hydra's ConfigStore under the name that `conf/config.yaml` starts from.

    What a model or dataset yaml must say itself is left open there, so that none inherits the built-in model's name.
    """
    schema = OmegaConf.structured(ExperimentConfig)
    schema.model.name = schema.dataset.name = MISSING
    schema.model.name_or_path = None
    ConfigStore.instance().store(name="cbexp_schema", node=schema)


def list_changed_fields(settings: Any) -> list[str]:
    """Return the names of a settings dataclass's fields that differ from their default, in the order of the schema."""
    return [
        item.name
        for item in dataclasses.fields(settings)
        if getattr(settings, item.name) != _default_of(item)
    ]


def _default_of(item: dataclasses.Field[Any]) -> Any:
    return item.default_factory() if callable(item.default_factory) else item.default
