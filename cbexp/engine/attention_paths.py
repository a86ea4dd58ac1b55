"""Which attention serves a prefill step: chosen by name, once for a device, a dtype and what the model asks for."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

AttentionPath = Literal["varlen", "per_sequence", "reference"]

# What torch's FlashAttention kernels serve.
VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_MIN_CAPABILITY = (8, 0)
VARLEN_MAX_HEAD_DIM = 256
VARLEN_HEAD_DIM_MULTIPLE = 8

# No field of a config tells that the heads have a learned sink.
MODEL_TYPES_WITH_SINKS = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa"})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def choose_attention_path(
    device: torch.device, dtype: torch.dtype, head_dim: int, has_softcap: bool, has_sinks: bool
) -> AttentionPath:
    """The path of a prefill or mixed step.

    "varlen": torch's variable-length attention, one kernel for all sequences (CUDA, half precision, capability >= 8.0).
    "per_sequence": torch's scaled dot-product attention, sequence by sequence (CPU, fp32, older cards).
    "reference": matrix products and a softmax, sequence by sequence (soft cap or attention sinks).
    """
    return _choose(device, dtype, head_dim, has_softcap, has_sinks)


@functools.cache
def _choose(
    device: torch.device, dtype: torch.dtype, head_dim: int, has_softcap: bool, has_sinks: bool
) -> AttentionPath:
    if has_softcap or has_sinks:
        return "reference"
    serves_shape = head_dim <= VARLEN_MAX_HEAD_DIM and head_dim % VARLEN_HEAD_DIM_MULTIPLE == 0
    if device.type != "cuda" or dtype not in VARLEN_DTYPES or not serves_shape:
        return "per_sequence"
    is_recent = torch.cuda.get_device_capability(device) >= VARLEN_MIN_CAPABILITY
    return "varlen" if is_recent else "per_sequence"


def describe_attention_path(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> AttentionPath:
    """The path that prefill and mixed steps of a model with `config` take, for the record of resolved settings."""
    path: AttentionPath = choose_attention_path(
        device,
        dtype,
        _head_dim(config),
        has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        has_sinks=config.model_type in MODEL_TYPES_WITH_SINKS,
    )
    return path


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
