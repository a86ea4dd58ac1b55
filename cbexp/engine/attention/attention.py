"""The engine's attention: paged decode, and packed prefill or mixed steps, each by what the device can do.

Set `model.config._attn_implementation = ATTENTION_NAME` directly: transformers' setter would look for a flash package.
No mask function is registered with it, which is transformers' sign that no mask is to be built.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig

from cbexp.engine.attention.reference import (
    attend_plainly,
    attend_with_sdpa,
    paged_decode_reference,
    read_spans,
)
from cbexp.engine.buffers import LayerPages
from cbexp.engine.operators import operator
from cbexp.engine.sizing import describe_cache_layout
from cbexp.engine.types import EngineError, UnsupportedModelError

# transformers' batching wants "flash" in the name of a maskless attention, and takes a digit after it for a version.
ATTENTION_NAME = "cbexp_flash"

AttentionPath = Literal["varlen", "per_sequence", "reference"]

# What torch's FlashAttention kernels serve.
VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_MIN_CAPABILITY = (8, 0)
VARLEN_MAX_HEAD_DIM = 256
VARLEN_HEAD_DIM_MULTIPLE = 8

# No field of a config tells that the heads have a learned sink.
MODEL_TYPES_WITH_SINKS = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa"})

# torch 2.11 has no flag for fewer key heads than query heads, and takes them.
_GQA_FLAG: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class PackedLengths(NamedTuple):
    """Sequences side by side: cumulative lengths (int32 [num_sequences + 1], from 0) and the longest of each kind."""

    cumulative_q: Tensor
    cumulative_k: Tensor
    max_q: int
    max_k: int


@operator(paged_decode_reference, mutates_args={"pages"})
def paged_decode_attention(*inputs: Any) -> Tensor:
    """As `paged_decode_reference`, in one kernel.

    An operator, since a compiler that sees it declares one mutation of `pages` instead of copying the cache.
    """
    from cbexp.engine.kernels import paged_attention  # late: needs Triton

    return paged_attention.paged_decode_attention(*inputs)


def attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged_layer: LayerPages | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention with the signature of transformers' interface; no mask is needed, and none is read.

    With `paged_layer` and `positions`, which the decode cache adds: one new token a row, written to its page as well;
    query [rows, num_heads, 1, head_dim], result [rows, 1, num_heads, head_dim]. Otherwise `cu_seq_lens_q`,
    `cu_seq_lens_k`, `max_length_q` and `max_length_k` describe packed sequences, in each of which the queries are the
    last positions of the keys; query [1, num_heads, total_q, head_dim], result [1, total_q, num_heads, head_dim].
    """
    window = sliding_window or 0
    if paged_layer is not None:
        _check_window(window, paged_layer.window)
        decoded: Tensor = paged_decode_attention(
            query.squeeze(2),
            key.squeeze(2),
            value.squeeze(2),
            paged_layer.pages,
            paged_layer.block_table,
            kwargs["positions"],
            paged_layer.page_offset,
            scaling,
            window,
            softcap or 0.0,
            s_aux,
        )
        return decoded.unsqueeze(1), None
    lengths = packed_lengths(kwargs, "sliding_attention" if window else "full_attention")
    packed = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    output = attend_packed(*packed, lengths, scaling, window, softcap, s_aux)
    return output.unsqueeze(0), None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: PackedLengths,
    scaling: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention over sequences side by side: query [num_heads, total_q, head_dim], result with heads second."""
    path = choose_attention_path(
        query.device, query.dtype, query.shape[-1], softcap is not None, sinks is not None
    )
    if path == "varlen":
        return _attend_varlen(query, key, value, lengths, scaling, window)
    spans = read_spans(lengths.cumulative_q, lengths.cumulative_k)
    if path == "per_sequence":
        return attend_with_sdpa(query, key, value, spans, scaling=scaling, window=window)
    return attend_plainly(
        query, key, value, spans, scaling=scaling, window=window, softcap=softcap or 0.0, sinks=sinks
    )


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, lengths: PackedLengths, scaling: float, window: int
) -> Tensor:
    """One kernel for all sequences, without a look at the lengths by the host."""
    output = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        lengths.cumulative_q,
        lengths.cumulative_k,
        lengths.max_q,
        lengths.max_k,
        scale=scaling,
        window_size=(window - 1, 0) if window else (-1, 0),
        **_GQA_FLAG,
    )
    return cast(Tensor, output)


def _check_window(window: int, cache_window: int) -> None:
    """Some models window their attention through masks alone, which would be lost here without a word."""
    if window != cache_window:
        raise UnsupportedModelError(
            f"A layer of this model attends over {_describe_window(window)}, while its cache, built from the config's "
            f"sliding_window and layer_types, keeps {_describe_window(cache_window)}: the model cannot be driven."
        )


def _describe_window(window: int) -> str:
    return f"a window of {window} tokens" if window else "all tokens"


def packed_lengths(kwargs: Mapping[str, Any], layer_type: str) -> PackedLengths:
    """The lengths that transformers hands to a layer; those of the keys are one value, or one for each layer type."""
    if "cu_seq_lens_q" not in kwargs:
        raise EngineError(
            f"attn_implementation={ATTENTION_NAME!r} runs inside SyncCBDriver alone: the model was called without a "
            "paged cache. Set another implementation, such as sdpa, for other calls."
        )
    cumulative_k, max_k = (
        value[layer_type] if isinstance(value, Mapping) else value
        for value in (kwargs["cu_seq_lens_k"], kwargs["max_length_k"])
    )
    return PackedLengths(kwargs["cu_seq_lens_q"], cumulative_k, kwargs["max_length_q"], max_k)


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
        describe_cache_layout(config).head_dim,
        has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        has_sinks=config.model_type in MODEL_TYPES_WITH_SINKS,
    )
    return path


AttentionInterface.register(ATTENTION_NAME, attend)
