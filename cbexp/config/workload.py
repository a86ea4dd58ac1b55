"""Settings of the workload: prompts, how many tokens each may get, when a completion ends."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from cbexp.checks import check_at_least, check_choice, check_is_set
from cbexp.config.defaults import list_changed_fields
from cbexp.engine.types import CBSyncConfig, Sampling
from cbexp.errors import ConfigError

VERIFIERS = ("none", "arithmetic", "gsm8k", "math")
_CHAT_FIELDS = {"system_prompt", "chat_template", "chat_template_kwargs"}
_ROW_FIELDS = {"path", "shuffle_seed", "prompt_field", "answer_field", "verifier"} | _CHAT_FIELDS
_LENGTH_FIELDS = {"min_length", "max_length", "lengths_seed", "lengths_file"}
_FIELDS_OF_ALL_KINDS = {"name", "kind", "num_prompts", "num_generations"}
MAX_SIGMA = 10.0
DATASET_FIELDS_BY_KIND: dict[str, set[str]] = {
    "arithmetic": {"verifier"} | _CHAT_FIELDS,
    "hub": {"config_name", "revision", "split"} | _ROW_FIELDS,
    "jsonl": _ROW_FIELDS,
    "synthetic": _LENGTH_FIELDS,
}
DATASET_KINDS = tuple(DATASET_FIELDS_BY_KIND)


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
    """How tokens are chosen, as the engine's `Sampling` says, and how many.

    `logprobs`: completions have log-probabilities. `eos_token_ids` None: the union of tokenizer and model.

    `max_new_tokens` is every request's limit. Each prompt gets a limit of its own from `max_new_tokens_file` (a JSON
    list of whole numbers), or one drawn log-normally around `median_new_tokens`, of which `max_new_tokens` is the
    longest: `sigma_new_tokens` is the deviation of their logarithm, `new_tokens_seed` None the root `seed`.
    """

    name: str = "greedy"
    temperature: float = Sampling.temperature
    top_k: int = Sampling.top_k
    top_p: float = Sampling.top_p
    min_p: float = Sampling.min_p
    repetition_penalty: float = Sampling.repetition_penalty
    min_new_tokens: int = Sampling.min_new_tokens
    stop_token_ids: list[int] = field(default_factory=list)
    stop_strings: list[str] = field(default_factory=list)
    suppress_token_ids: list[int] = field(default_factory=list)
    logprobs: bool = CBSyncConfig.logprobs
    max_new_tokens: int | None = None
    max_new_tokens_file: str | None = None
    median_new_tokens: int | None = None
    sigma_new_tokens: float = 1.0
    new_tokens_seed: int | None = None
    ignore_eos: bool = False
    eos_token_ids: list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
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
    def choice(self) -> Sampling:
        """What the engine takes of it."""
        values: dict[str, Any] = {}
        for item in fields(Sampling):
            value = getattr(self, item.name)
            values[item.name] = tuple(value) if isinstance(value, list) else value
        return Sampling(**values)

    @property
    def is_fixed_length(self) -> bool:
        """Whether nothing ends a request but its limit."""
        return self.ignore_eos and not self.stop_token_ids and not self.stop_strings

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
