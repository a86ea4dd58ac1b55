"""The settings of one job, whole, with the checks between groups."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_type_hints

from cbexp.checks import check_at_least, check_choice, check_is_set
from cbexp.config.engine import CacheConfig, CompileConfig, DriverConfig
from cbexp.config.idle_settings import find_reasons
from cbexp.config.model import AdapterConfig, ModelConfig
from cbexp.config.records import ArtifactsConfig, RescoreConfig, TrackingConfig
from cbexp.config.workload import DatasetConfig, SamplingConfig
from cbexp.drivers.registry import DRIVERS, DriverKind
from cbexp.engine.requests import check_sampling
from cbexp.engine.settings import check_config, check_values
from cbexp.engine.types import ENGINE_ATTENTION, CBSyncConfig, EngineError
from cbexp.errors import ConfigError

MAX_SEED = 2**63 - 1  # PyTorch's
ANY_VOCABULARY = 2**31  # ids are held against the model's once that is known, by the plan
ISOLATIONS = ("process", "none")
# A setting with the name of one of the engine's goes there as it is.
ENGINE_SETTINGS = {
    item.name: f"{group}.{item.name}"
    for group, settings in (("compile", CompileConfig), ("cache", CacheConfig), ("sampling", SamplingConfig))
    for item in dataclasses.fields(settings)
    if item.name in {field.name for field in dataclasses.fields(CBSyncConfig)}
}


@dataclass
class ExperimentConfig:
    """One job, whole. `stats_path`: a further place for the summary, relative to the launch folder.

    Of a sweep (`cbexp.cell_settings`): `isolation` says whether each cell runs in a process of its own, which
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
    rescore: RescoreConfig = field(default_factory=RescoreConfig)
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
        if self.adapter.kind != "none" and not self.driver_kind.takes_adapter:
            raise ConfigError(
                f"adapter={self.adapter.kind} does not work with driver={self.driver.name}, which runs the model "
                "without one: use adapter=none, or another driver."
            )
        self._check_engine_settings()
        if self.driver_kind.has_paged_cache:
            self._check_cache()

    @property
    def max_new_tokens(self) -> int:
        """The limit of a request, or the longest that is drawn: the sampling group's, else the model's default.

        The limits of a file are not known here, but to the plan.
        """
        limit = self.sampling.max_new_tokens
        return self.model.default_max_new_tokens if limit is None else limit

    @property
    def driver_kind(self) -> DriverKind:
        """What the driver can do."""
        return DRIVERS[self.driver.name]

    def engine_settings(self, compile_mode: str, attention: str, **resolved: Any) -> CBSyncConfig:
        """Return the engine's settings that these mean with a resolved compile mode and attention.

        What has no effect stays at the engine's defaults. `resolved` has fields that the machine or the round decides.
        """
        idle = find_reasons(self, compile_mode)
        given = {name: attrgetter(key)(self) for name, key in ENGINE_SETTINGS.items() if key not in idle}
        given |= {"max_new_tokens": self.max_new_tokens, "attn_implementation": attention}
        given |= {
            "sampling": self.sampling.choice,
            "seed": self.seed,
            "compile_mode": compile_mode,
            **resolved,
        }
        return CBSyncConfig(**{name: value for name, value in given.items() if value is not None})

    def _check_engine_settings(self) -> None:
        """Have the engine check what it would be given, as far as that is known by now."""
        mode = "eager" if self.compile.mode == "auto" else self.compile.mode
        attention, kind = self.model.attn_implementation, self.driver_kind
        if attention == "auto" or kind.own_attention != ENGINE_ATTENTION:
            attention = ENGINE_ATTENTION
        # A batch holds at least the requests of a prompt.
        max_requests = self.cache.max_requests_per_batch
        resolved = {"max_requests_per_batch": self.dataset.num_generations} if max_requests is None else {}
        given = {name: attrgetter(key)(self) for name, key in ENGINE_SETTINGS.items()}
        try:
            # What has no effect here is checked by itself all the same.
            check_values(CBSyncConfig(**{name: value for name, value in given.items() if value is not None}))
            check_config(self.engine_settings(mode, attention, **resolved))
            check_sampling("sampling", self.sampling.choice, ANY_VOCABULARY, reads_text=True)
            kind.check_sampling(self.sampling.choice, self.sampling.logprobs)
        except (EngineError, ValueError) as error:
            raise ConfigError(name_settings(str(error))) from error
        if self.sampling.stop_strings and self.dataset.kind == "synthetic":
            raise ConfigError(
                f"sampling.stop_strings are looked for in text, and dataset={self.dataset.name} has token ids alone: "
                "take a dataset of text, or sampling.stop_token_ids."
            )

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


@dataclass(frozen=True)
class SweepInfo:
    """Where a job stands in its sweep, counted from 0; `group` names the sweep."""

    group: str
    num_jobs: int
    job_index: int


def name_settings(message: str) -> str:
    """Return an error of the engine's, which begins with the name of one of its settings, with the name of ours."""
    names = ENGINE_SETTINGS | {"compile_mode": "compile.mode"}
    message = re.sub(r"^sampling: (?=\w)", "sampling.", message)
    return re.sub(r"^\w+", lambda name: names.get(name[0], name[0]), message)


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
