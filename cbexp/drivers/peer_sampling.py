"""What of a request's sampling transformers' own generation is told, and which of our log-probabilities others give."""

from __future__ import annotations

from typing import Any

from cbexp.engine.types import Sampling

# These end a completion; all other settings change the distribution that tokens are drawn from.
_ENDS = {"stop_token_ids", "stop_strings"}


def generation_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a `GenerationConfig` that choose tokens alike, each set: unset ones have other defaults."""
    fields: dict[str, Any] = {
        "do_sample": sampling.temperature > 0,
        "repetition_penalty": float(sampling.repetition_penalty),
        "min_new_tokens": sampling.min_new_tokens or None,
        "suppress_tokens": list(sampling.suppress_token_ids) or None,
    }
    if sampling.temperature > 0:
        fields |= {
            "temperature": float(sampling.temperature),
            "top_k": max(0, sampling.top_k),
            "top_p": float(sampling.top_p),
            "min_p": float(sampling.min_p) or None,
        }
    return fields


def vllm_fields(sampling: Sampling, logprobs: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` that choose tokens alike, and the ends that are not EOS.

    No seed of a request's own: with one, vLLM draws its rows one by one.
    """
    return {
        "temperature": float(sampling.temperature),
        "top_k": max(0, sampling.top_k),
        "top_p": float(sampling.top_p),
        "min_p": float(sampling.min_p),
        "repetition_penalty": float(sampling.repetition_penalty),
        "min_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop_strings),
        "detokenize": bool(sampling.stop_strings),
        "logprobs": 0 if logprobs else None,
    }


def vllm_takes_processed(sampling: Sampling) -> bool:
    """Return which logits vLLM's log-probabilities are to be of: the raw ones serve trainers where they can."""
    return sampling.temperature not in (0, 1)


def logprob_columns(sampling: Sampling, *, processed: bool) -> tuple[str, ...]:
    """Return the fields of a `Completion` that equal a driver's one log-probability of each token.

    It is taken of the raw logits, or, `processed`, in the distribution that the token was drawn from; of logits without
    a temperature where that is 0.
    """
    is_only_scaled = not set(sampling.in_effect) - _ENDS - {"temperature"}
    has_no_scale = sampling.temperature in (0, 1)
    equal = {
        "logprobs_model": is_only_scaled if processed else has_no_scale,
        "logprobs_sampled": sampling.temperature > 0 and (processed or (is_only_scaled and has_no_scale)),
        "logprobs_raw": not processed or (is_only_scaled and has_no_scale),
    }
    return tuple(name for name, is_equal in equal.items() if is_equal)
