"""What the arguments of TRL's trainer mean to the engine; what it does not do is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cbexp.engine import CBSyncConfig, EngineError, Sampling

# Names in `GRPOConfig.generation_kwargs`, which are transformers', and those of the engine.
GENERATION_KWARGS = {
    "min_new_tokens": "min_new_tokens",
    "stop_strings": "stop_strings",
    "suppress_tokens": "suppress_token_ids",
}
# Where the trainer reads it too: the loss, or what counts as an end.
SET_ELSEWHERE = {
    **{
        name: f"GRPOConfig.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    },
    "max_new_tokens": "GRPOConfig.max_completion_length",
    "eos_token_id": "eos_token_id of the model's generation config",
}
# Settings of the engine that follow from the trainer's.
SET_BY_TRAINER = {
    "max_new_tokens": "GRPOConfig.max_completion_length",
    "eos_token_id": "the model's generation config and the tokenizer",
    "pad_token_id": "the tokenizer",
    "sampling": "GRPOConfig",
    "seed": "GRPOConfig.seed",
    "logprobs": "correction and num_rescored",
}
# Other ways to generate, which would do nothing here, and when they are off.
OTHER_GENERATION = {
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "cache_implementation": None,
}


def check_arguments(args: Any, engine_config: CBSyncConfig | None, correction: bool) -> None:
    """Check a `GRPOConfig` before a trainer loads anything for it.

    Raises:
        EngineError: a setting that has no effect here, or that the engine does not have; the message says what works.
    """
    for name, off in OTHER_GENERATION.items():
        value = getattr(args, name)
        if value != off:
            raise EngineError(f"GRPOConfig.{name}={value!r} has no effect: the engine generates. Remove it.")
    read_sampling(args)
    if correction and not args.vllm_importance_sampling_correction:
        raise EngineError(
            "correction=True and GRPOConfig.vllm_importance_sampling_correction=False exclude each other: it is this "
            "correction that is turned on. Remove one of them."
        )
    mode = args.vllm_importance_sampling_mode
    if correction and args.loss_type == "vespo" and not mode.startswith("token_"):
        raise EngineError(
            f"correction=True with loss_type='vespo' needs vllm_importance_sampling_mode 'token_truncate' or "
            f"'token_mask', not {mode!r}, as TRL has it with vLLM."
        )
    for name, owner in SET_BY_TRAINER.items():
        if engine_config is not None and getattr(engine_config, name) != getattr(CBSyncConfig, name):
            raise EngineError(f"engine_config.{name} follows from {owner}: leave it out.")


def read_sampling(args: Any) -> Sampling:
    """How a `GRPOConfig` asks for tokens to be chosen; raises `EngineError` for what the engine does not have."""
    asked: dict[str, Any] = {}
    for name, value in (args.generation_kwargs or {}).items():
        if name in SET_ELSEWHERE:
            raise EngineError(
                f"GRPOConfig.generation_kwargs[{name!r}]={value!r}: set {SET_ELSEWHERE[name]}, which TRL reads too."
            )
        if name not in GENERATION_KWARGS:
            raise EngineError(
                f"GRPOConfig.generation_kwargs[{name!r}]={value!r} is not supported by the engine, which takes "
                f"{', '.join(GENERATION_KWARGS)}."
            )
        if value is not None:
            asked[GENERATION_KWARGS[name]] = value
    if isinstance(asked.get("stop_strings"), str):
        asked["stop_strings"] = (asked["stop_strings"],)
    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        **asked,
    )


def build_engine_config(
    args: Any,
    engine_config: CBSyncConfig | None,
    logprobs: bool,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    model: Any,
) -> CBSyncConfig:
    """The engine's settings for a trainer: `engine_config`, or what suits the model's device, and what TRL decides."""
    if engine_config is None:
        # A group's prompt is read and kept once, by whole pages; layers with a sliding window share none.
        can_share = "sliding_attention" not in (getattr(model.config, "layer_types", None) or ())
        engine_config = CBSyncConfig(
            compile_mode="cuda_graph" if model.device.type == "cuda" else "eager",
            allow_block_sharing=can_share,
            page_size=32 if can_share else CBSyncConfig.page_size,
        )
    return replace(
        engine_config,
        max_new_tokens=args.max_completion_length,
        eos_token_id=list(eos_token_ids),
        pad_token_id=pad_token_id,
        sampling=read_sampling(args),
        seed=args.seed,
        logprobs=logprobs,
        fp32_head=engine_config.fp32_head or args.cast_lm_head_to_fp32,
    )
