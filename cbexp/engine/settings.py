"""Checks of `CBSyncConfig`, and the decoding settings that follow from it and from a generation config."""

from __future__ import annotations

import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from cbexp.engine.requests import as_plain, check_sampling
from cbexp.engine.types import COMPILE_MODES, GREEDY, CBSyncConfig, EngineError, Sampling

if TYPE_CHECKING:
    from transformers import GenerationConfig

# What the kernels are made and tested for; static buffers hold all of it.
MAX_BUCKET = 1024
MAX_BURST = 4096
MAX_SEED = 2**64 - 1
# Share of the free memory that a cache may take with its buffers: upstream's own figure without logits processors.
MAX_MEMORY_FRACTION = 0.9
MINIMUMS = {
    "page_size": 4,  # upstream's bound
    **dict.fromkeys(("max_batch_tokens", "max_burst", "num_blocks", "max_requests_per_batch"), 1),
    **dict.fromkeys(("max_new_tokens", "recompile_limit"), 1),
}
# Read by the engine's own decode steps alone.
DECODE_SETTINGS = (
    "compile_mode",
    "fusion",
    "batch_shape",
    "buckets",
    "max_burst",
    "recompile_limit",
    "self_check",
    "fp32_head",
)

# What counts of the model's own generation config, what of one that is passed, and what says nothing about how a given
# prompt is completed. Any other field is refused in one that is passed, and does not apply in the model's own.
MODEL_FIELDS = ("eos_token_id", "pad_token_id")
# Field of a generation config -> the field of `Sampling` that says the same. The first ones count with do_sample alone.
DRAWING_FIELDS = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
CHOICE_FIELDS = {name: name for name in ("repetition_penalty", "min_new_tokens", "stop_strings")} | {
    "suppress_tokens": "suppress_token_ids"
}
HONOURED_FIELDS = (*MODEL_FIELDS, "max_new_tokens", *CHOICE_FIELDS)
DRAWN_FIELDS = (*HONOURED_FIELDS, "do_sample", *DRAWING_FIELDS)
# What `generate` does where `do_sample` is set and nothing else.
DRAWING_DEFAULTS = {"temperature": 1.0, "top_k": 50}
SILENT_FIELDS = ("bos_token_id", "decoder_start_token_id", "transformers_version")
# Values with which a field changes nothing, besides None and the defaults of `generate`.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "cache_implementation": ("hybrid",),  # from old hub files; transformers drops it too
    "guidance_scale": (1,),
    "num_assistant_tokens": (5,),  # these two: as transformers before 4.45 wrote them
    "num_assistant_tokens_schedule": ("heuristic",),
    "penalty_alpha": (0,),
    "top_k": (0,),
}
# No neutral value of a limit is known: 20 is the default of `generate`, and a limit of 20 where it is set.
FIELDS_WITHOUT_DEFAULT = ("max_length",)
# What a refusal says of a field beyond its value.
ADVICE = {
    **dict.fromkeys(DRAWING_FIELDS, "without do_sample=True it has no effect"),
    "max_length": "the limit is max_new_tokens",
    "num_return_sequences": "the number of completions is num_generations of add_requests",
}


@dataclass(frozen=True)
class DecodingSettings:
    """`max_new_tokens` None: each request must bring its own. No EOS ids: requests end at their limit alone.

    `unused_model_defaults`: what the model's own generation config sets, and does not apply.
    """

    max_new_tokens: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    sampling: Sampling
    unused_model_defaults: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """As they run, as plain JSON values."""
        lists = {
            name: list(value) for name, value in asdict(self.sampling).items() if isinstance(value, tuple)
        }
        return asdict(self) | {
            "eos_token_ids": list(self.eos_token_ids),
            "sampling": asdict(self.sampling) | lists,
        }


def check_config(config: CBSyncConfig) -> None:
    """Check each setting and their combinations, whatever the model and the device.

    Raises:
        TypeError: a value is of another type: "off" would count as true.
        ValueError: a value makes no sense.
        EngineError: this driver does not do it, or a setting is without effect in this combination.
    """
    check_values(config)
    _check_recompile_limit(config)
    if config.buckets is not None:
        _check_use_of_buckets(config.buckets, config)
    if not config.has_engine_attention:
        _check_without_engine_attention(config)


def check_values(config: CBSyncConfig) -> None:
    """Check each setting by itself; raises `TypeError` and `ValueError` as `check_config`."""
    if not isinstance(config, CBSyncConfig):
        raise TypeError(f"config={config!r} is a {type(config).__name__}: pass a CBSyncConfig.")
    for name, hint in get_type_hints(CBSyncConfig).items():
        _check_type(name, getattr(config, name), hint)
    for name, minimum in MINIMUMS.items():
        if getattr(config, name) is not None:
            _check_at_least(name, getattr(config, name), minimum)
    if not 0 < config.max_memory_fraction <= MAX_MEMORY_FRACTION:
        raise ValueError(
            f"max_memory_fraction={config.max_memory_fraction} must be in (0, {MAX_MEMORY_FRACTION}]: the rest is for "
            "what a step computes."
        )
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"seed={config.seed} must be from 0 to {MAX_SEED}.")
    if config.max_burst > MAX_BURST:
        raise ValueError(f"max_burst={config.max_burst} is too large: at most {MAX_BURST} steps.")
    if not isinstance(config.compile_mode, str) or config.compile_mode not in COMPILE_MODES:
        raise _not_a_choice("compile_mode", config.compile_mode, tuple(COMPILE_MODES))
    buckets = config.buckets
    if buckets is not None and not _are_batch_sizes(buckets):
        raise ValueError(
            f"buckets={list(buckets)} must be batch sizes from 1 to {MAX_BUCKET} in ascending order, as in [1, 8, 32]."
        )


def check_count(name: str, value: Any) -> None:
    """Raise `TypeError` or `ValueError`, by name, unless `value` is an int of at least 1."""
    _check_whole_number(name, value)
    _check_at_least(name, value, 1)


def check_device(config: CBSyncConfig, device_type: str) -> None:
    """Raise `EngineError` when the settings need CUDA and the model is elsewhere."""
    if device_type == "cuda":
        return
    on_cuda = {
        f"compile_mode={config.compile_mode!r}": COMPILE_MODES[config.compile_mode].graphs is not None,
        "fusion='layers'": config.fusion == "layers",
    }
    elsewhere = [repr(name) for name, mode in COMPILE_MODES.items() if mode.graphs is None]
    for setting, is_set in on_cuda.items():
        if is_set:
            raise EngineError(
                f"{setting} needs a CUDA device, and the model is on {device_type}: compile_mode "
                f"{', '.join(elsewhere[:-1])} and {elsewhere[-1]} run there, with fusion 'none' or 'projections'."
            )


def resolve_decoding(
    config: CBSyncConfig,
    generation_config: GenerationConfig | None,
    model_defaults: GenerationConfig | None,
    vocab_size: int,
    *,
    reads_text: bool = False,
) -> DecodingSettings:
    """Settings of `config`, else of `generation_config`, else EOS and pad of the model's own one.

    `reads_text`: whether there is a tokenizer. What `generation_config` leaves open when it sets `do_sample` is as in
    `generate`: a temperature of 1, and top-k with 50.
    Raises `EngineError`, naming each field, when `generation_config` asks for more than is done here; `TypeError` or
    `ValueError`, naming the setting, for a value that is read and makes no sense. A pad token may be any number:
    nothing reads it, and there are configs with -1.
    """
    if generation_config is not None:
        _refuse_other_fields(generation_config)
    passed = {"": config, "generation_config.": generation_config}
    of_all = passed | {"model.generation_config.": model_defaults}
    name, eos = _first_set("eos_token_id", of_all)
    # Upstream's batching leaves -1 in a config that has no EOS.
    eos_token_ids = tuple(i for i in _as_ids(eos) if i != -1 or name == "eos_token_id")
    for token_id in eos_token_ids:
        _check_token_id(name, token_id, vocab_size)
    name, pad_token_id = _first_set("pad_token_id", of_all)
    if config.pad_token_id is not None:
        _check_token_id(name, pad_token_id, vocab_size)
    if pad_token_id is not None:
        _check_whole_number(name, pad_token_id)
    name, max_new_tokens = _first_set("max_new_tokens", passed)
    if max_new_tokens is not None:
        check_count(name, max_new_tokens)
    sampling = config.sampling
    if sampling is None:
        sampling = GREEDY if generation_config is None else _read_sampling(generation_config)
        check_sampling("generation_config", sampling, vocab_size, reads_text)
    else:
        check_sampling("sampling", sampling, vocab_size, reads_text)
    unused = {} if model_defaults is None else _find_other_fields(model_defaults, MODEL_FIELDS)
    return DecodingSettings(
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        sampling=sampling,
        unused_model_defaults={name: _as_json(value) for name, value in unused.items()},
    )


def _refuse_other_fields(generation_config: GenerationConfig) -> None:
    fields = _find_other_fields(
        generation_config, DRAWN_FIELDS if generation_config.do_sample else HONOURED_FIELDS
    )
    if fields:
        # One line, however long a list of tokens is.
        shown = [f"{name}={' '.join(reprlib.repr(value).split())}" for name, value in fields.items()]
        advice = "".join(f"; {ADVICE[name]}" for name in fields if name in ADVICE)
        raise EngineError(
            f"generation_config sets {', '.join(shown)}, which this driver does not do: leave that out{advice}."
        )


def _read_sampling(generation_config: GenerationConfig) -> Sampling:
    """What it says of the choice of tokens; None says nothing."""
    fields = CHOICE_FIELDS | (DRAWING_FIELDS if generation_config.do_sample else {})
    values = {own: as_plain(getattr(generation_config, name, None)) for name, own in fields.items()}
    if generation_config.do_sample:
        values = {
            name: DRAWING_DEFAULTS.get(name) if value is None else value for name, value in values.items()
        }
    if isinstance(values["stop_strings"], str):
        values["stop_strings"] = [values["stop_strings"]]
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
    return Sampling(**given)


def _find_other_fields(generation_config: GenerationConfig, honoured: Sequence[str]) -> dict[str, Any]:
    """What it sets, to more than a neutral value, besides the fields that are honoured."""
    values = {name: as_plain(value) for name, value in vars(generation_config).items()}
    defaults: dict[str, Any] = generation_config._get_default_generation_params()
    known = (*honoured, *SILENT_FIELDS)
    return {
        name: value
        for name, value in values.items()
        # Those with an underscore are transformers' own notes.
        if not name.startswith("_") and name not in known and not _is_neutral(name, value, defaults.get(name))
    }


def _is_neutral(name: str, value: Any, default: Any) -> bool:
    """Whether the field is as good as not set; without a default, so are False and what is empty."""
    if value is None or value in NEUTRAL_VALUES.get(name, ()):
        return True
    if default is not None and name not in FIELDS_WITHOUT_DEFAULT:
        return bool(value == default)
    return value is False or value in ([], (), {}, "")


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return repr(value)


def _check_type(name: str, value: object, hint: Any) -> None:
    if get_origin(hint) is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise _not_a_choice(name, value, get_args(hint))
        return
    kinds = get_args(hint) or (hint,)
    if (value is None and NoneType in kinds) or name == "eos_token_id":  # checked with the model's vocabulary
        return
    is_right, expected = _EXPECTED.get(name) or _EXPECTED_OF_TYPE.get(kinds[0], (lambda _: True, ""))
    if not is_right(value):
        raise TypeError(f"{name}={value!r} must be {expected}.")


def _not_a_choice(name: str, value: object, choices: Sequence[object]) -> ValueError:
    return ValueError(f"{name}={value!r} is not a choice: {', '.join(map(repr, choices))}.")


def _is_int_sequence(value: object) -> bool:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    return is_sequence and all(type(item) is int for item in value)  # type: ignore[attr-defined]


# Setting, or type of settings -> whether a value is right, and what it must be. True is no whole number.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "on_step": (callable, "a function of a step's index and its StepInfo"),
    "sampling": (lambda value: isinstance(value, Sampling), "a Sampling, or None"),
    "buckets": (_is_int_sequence, "a list of whole numbers, or None"),
}
_EXPECTED_OF_TYPE: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: type(value) is bool, "True or False"),
    int: (lambda value: type(value) is int, "a whole number"),
    float: (lambda value: type(value) in (int, float), "a number"),
}


def _check_recompile_limit(config: CBSyncConfig) -> None:
    mode = config.compile_mode
    is_idle = COMPILE_MODES[mode].torch_mode is None and config.has_engine_attention
    if config.recompile_limit is not None and is_idle:
        raise EngineError(
            f"recompile_limit={config.recompile_limit} is without effect when compile_mode={mode!r}, which compiles "
            "nothing: leave it out."
        )


def _are_batch_sizes(buckets: Sequence[int]) -> bool:
    is_ascending = all(a < b for a, b in itertools.pairwise(buckets))
    return bool(buckets) and buckets[0] >= 1 and is_ascending and buckets[-1] <= MAX_BUCKET


def _check_use_of_buckets(buckets: Sequence[int], config: CBSyncConfig) -> None:
    if config.batch_shape == "natural":
        raise EngineError("buckets are without effect when batch_shape='natural': leave them out.")
    largest = config.max_requests_per_batch
    if largest is not None and largest > buckets[-1]:
        raise ValueError(
            f"buckets end at {buckets[-1]}, and a batch may have max_requests_per_batch={largest} requests: add a "
            "bucket that holds them."
        )


def _check_without_engine_attention(config: CBSyncConfig) -> None:
    for name in DECODE_SETTINGS:
        value = getattr(config, name)
        is_default = value == getattr(CBSyncConfig, name)
        if not is_default and (name, value) != ("fusion", "none"):
            raise EngineError(
                f"{name}={value!r} works on the engine's own decode steps: it needs attn_implementation='cbexp', "
                f"not {config.attn_implementation!r}."
            )


def _first_set(name: str, sources: Mapping[str, Any]) -> tuple[str, Any]:
    """The first value that is set, and its full name; `sources` by what goes before the name."""
    for prefix, source in sources.items():
        value = as_plain(getattr(source, name, None))
        if value is not None:
            return prefix + name, value
    return name, None


def _check_whole_number(name: str, value: Any) -> None:
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} must be a whole number.")


def _as_ids(value: Any) -> tuple[Any, ...]:
    """The ids in what configs hold: one, several, or a tensor or array of them; they are not checked yet."""
    value = as_plain(value)
    if value is None:
        return ()
    is_one = isinstance(value, str) or not isinstance(value, Iterable)
    return (value,) if is_one else tuple(map(as_plain, value))


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name}={value} is too small: it must be at least {minimum}.")


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ValueError(
            f"{name} {token_id!r} ({type(token_id).__name__}) is not a token id of this model: a plain int, 0 to "
            f"{vocab_size - 1}."
        )
