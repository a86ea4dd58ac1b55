"""What the engine takes and gives: configuration, completions, step records, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

FinishReason = Literal["eos", "stop", "length", "failed"]
StepKind = Literal["prefill", "mixed", "decode"]
BatchShape = Literal["natural", "buckets", "full"]
Fusion = Literal["auto", "none", "projections", "layers"]
Scheduler = Literal["fifo", "prefill_first"]
# The engine's own attention, as a value of `CBSyncConfig.attn_implementation`.
ENGINE_ATTENTION = "cbexp"


@dataclass(frozen=True)
class CompileMode:
    """What a mode does to the forward of a decode step.

    `torch_mode` is torch.compile's name of the mode; None: nothing is compiled. `graphs` says who records CUDA graphs:
    the engine ("engine"), torch.compile itself ("torch"), or nobody (None).
    """

    torch_mode: str | None = None
    graphs: Literal["engine", "torch"] | None = None


# Every compile mode, by the name that it has from the command line to the summary.
COMPILE_MODES = {
    "eager": CompileMode(),
    "default": CompileMode("default"),
    "reduce_overhead": CompileMode("reduce-overhead", graphs="torch"),
    "max_autotune": CompileMode("max-autotune", graphs="torch"),
    "max_autotune_no_cudagraphs": CompileMode("max-autotune-no-cudagraphs"),
    "cuda_graph": CompileMode(graphs="engine"),
    "compiled_cuda_graph": CompileMode("default", graphs="engine"),
}


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the message says why and what would work."""


class UnsupportedModelError(EngineError):
    """The model's architecture or placement is not supported by continuous batching."""


class CacheMemoryError(EngineError, MemoryError):
    """The KV cache asked for, with its buffers, does not fit in the free memory; the message says what to lower."""


class UnsupportedTransformersError(EngineError):
    """The installed transformers version is outside the supported range."""


@dataclass(frozen=True)
class RequestTimings:
    """Host times of one request, in seconds on the `time.perf_counter` clock; they survive eviction.

    `scheduled_s`, `first_token_s` and `finished_s` are None when the request did not get that far.
    """

    submitted_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen, and what ends it besides EOS and its limit. Defaults change nothing.

    In this order, as in transformers: `repetition_penalty` (of tokens in prompt and completion), `suppress_token_ids`
    (never chosen), `min_new_tokens` (nothing ends the completion before); `temperature` (0: the most likely token);
    `top_k` (0 and -1: off); `top_p` of what is left then; `min_p`, a share of the largest probability. Tokens with
    equal logits are kept or dropped together.
    The token of `stop_token_ids` that ends a completion is its last one; so is the one that completes one of
    `stop_strings`, which are looked for in the text of the completion and need the driver's tokenizer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    suppress_token_ids: Sequence[int] = ()

    @property
    def in_effect(self) -> dict[str, Any]:
        """The settings that change anything, as plain JSON values, sets of ids and strings in ascending order."""
        idle = {"top_k"} if self.top_k <= 0 else set()
        if self.temperature == 0:
            idle |= {"top_k", "top_p", "min_p"}
        values = {
            name: value if isinstance(value, int | float) else sorted(set(value))
            for name, value in vars(self).items()
            if name not in idle
        }
        return {name: value for name, value in values.items() if value not in (getattr(GREEDY, name), [])}


GREEDY = Sampling()


@dataclass(frozen=True)
class Completion(Sequence[int]):
    """The generated token ids of one request. `len(completion)` is their number (EOS or stop token included).

    `stop_reason`: the stop token or stop string that ended it (`finish_reason` "stop"). `versions`: which policy made
    its tokens, as runs of (version, number of tokens).

    Natural logarithms of each token's probability, float32 values; empty unless `CBSyncConfig.logprobs` is set:
    `logprobs_model` over the whole vocabulary at the sampling temperature, as trainers compute it; `logprobs_raw` at
    temperature 1; `logprobs_sampled` in the distribution that the token was drawn from, after penalty, suppression,
    top-k, top-p and min-p. `kept_mass` is no logarithm: the probability, as for `logprobs_model`, of all tokens that
    could have been drawn. At temperature 0 the first is the second, and `logprobs_sampled` is 0.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: RequestTimings
    error: str | None = None
    stop_reason: int | str | None = None
    logprobs_model: tuple[float, ...] = ()
    logprobs_sampled: tuple[float, ...] = ()
    logprobs_raw: tuple[float, ...] = ()
    kept_mass: tuple[float, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.completion_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.completion_ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.completion_ids)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a given completion's tokens, over the whole vocabulary: at a temperature, and at 1."""

    logprobs_model: tuple[float, ...]
    logprobs_raw: tuple[float, ...]


@dataclass(frozen=True)
class StepInfo:
    """One host-visible step: an ordinary step (`num_steps` = 1) or a burst of `num_steps` decode steps.

    `num_tokens` counts the tokens that an ordinary step reads and those that a burst makes. `bucket` is the number of
    rows that each step of a burst computes (None: an ordinary step); `num_padding` counts those of them, over all
    steps, that belong to no request or to one that has ended.
    `start_s` and `end_s` are host times (perf_counter); `cache_used_fraction` is in [0, 1].
    """

    kind: StepKind
    num_steps: int
    num_requests: int
    num_tokens: int
    num_padding: int
    bucket: int | None
    start_s: float
    end_s: float
    num_waiting: int
    num_finished: int
    cache_used_fraction: float

    @property
    def duration_s(self) -> float:
        """Host seconds of this step or burst."""
        return self.end_s - self.start_s


OnStep = Callable[[int, StepInfo], None]


@dataclass(frozen=True)
class CBSyncConfig:
    """Settings of `SyncCBDriver`. None means "not set here": the generation config or the model decides.

    `max_new_tokens` and `sampling` (None: that of the generation config, else greedy) are overridden by a request's
    own. `eos_token_id`: one id or several; an empty sequence ignores EOS.
    `pad_token_id` is recorded only: rows that pad a batch hold no token. EOS and pad may be the model's, no limit is.
    `seed` (of 64 bits), the process's rank and the place of a token among all that the driver makes give the random
    numbers that it is drawn with. `logprobs`: completions have log-probabilities. `fp32_head`: the language-model
    head sums up and gives its logits in float32.

    `page_size`, `max_batch_tokens` are in tokens.
    `num_blocks` None sizes the cache for the requests of the largest round so far that run at once, within
    `max_memory_fraction` of the memory that is free then: the rest is for a trainer's backward, and requests for which
    there is no room wait. A round that needs more rebuilds the cache before it starts.
    `max_requests_per_batch` None: as many as the largest bucket, else up to 256.

    `attn_implementation`: the engine's own attention, with decode steps in bursts; or, by its name, the implementation
    that the model was loaded with, for which every step is a batch of transformers' own (nothing compiled or fused).
    `compile_mode` is a name of `COMPILE_MODES`. `recompile_limit` None: PyTorch's own.
    `batch_shape`: a decode step computes the rows it has ("natural"), the next of `buckets` (None: 1, 2, 4, ... up to
    the largest batch, which is included) or always the largest ("full"). `max_burst`: decode steps that may run without
    the host. `fusion`: "projections" computes q/k/v and gate/up as one product each, "layers" runs decoder layers as
    fused kernels. `self_check` compares the forward of each bucket with the eager one before it is used.

    `on_step(step_index, info)` is called on the host after each step; the index counts steps over the driver's life.
    """

    max_new_tokens: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    sampling: Sampling | None = None
    seed: int = 0
    logprobs: bool = False
    fp32_head: bool = False
    attn_implementation: str = ENGINE_ATTENTION
    compile_mode: str = "eager"
    recompile_limit: int | None = None
    batch_shape: BatchShape = "buckets"
    buckets: Sequence[int] | None = None
    max_burst: int = 128
    fusion: Fusion = "auto"
    self_check: bool = True
    page_size: int = 256
    num_blocks: int | None = None
    max_memory_fraction: float = 0.5
    max_batch_tokens: int = 16_384
    max_requests_per_batch: int | None = None
    allow_block_sharing: bool = False
    scheduler: Scheduler = "fifo"
    on_step: OnStep | None = None

    @property
    def has_engine_attention(self) -> bool:
        """Whether the engine's own attention runs, and with it bursts."""
        return self.attn_implementation == ENGINE_ATTENTION
