"""Reads a Llama-like model as what fused kernels need of it, or says why it cannot be read so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbexp.engine.fused_weights import FusedProjection, FusedWeights
from cbexp.engine.projection_groups import find_projection_groups

# Models whose decoder layer is: norm, q/k/v, (norm of each head,) rotary embedding, attention, o, residual; norm, gated
# SiLU, residual. Told by class: a like name with another order of norms, or a scaled residual, would be wrong.
FUSED_MODEL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Rotary embeddings whose angle depends on the position alone, not on the length of the sequence.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.ModuleList)
BIASED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
SIZE_MULTIPLE = 16


@dataclass(frozen=True)
class FusedLayer:
    """Weights of one decoder layer, sharing the caller's memory: [out_features, in_features], norms [hidden]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    post_attention_norm: Tensor
    next_norm: Tensor


@dataclass(frozen=True)
class FusedModel:
    """What a forward of fused kernels reads. `next_norm` of a layer is the norm before the next one, or the last.

    `cos` and `sin` [max_positions, head_dim] are the model's own rotary tables, in its dtype.
    """

    embedding: Tensor
    first_norm: Tensor
    layers: tuple[FusedLayer, ...]
    head: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    scaling: float


def why_not_fused(model: PreTrainedModel) -> str | None:
    """The reason for which `model` cannot run as fused layers; None when it can."""
    return next(_objections(model), None)


def read_fused_model(model: PreTrainedModel, weights: FusedWeights, max_positions: int) -> FusedModel:
    """Read `model`, whose projections `weights` has fused; to be read again when parameters were re-assigned.

    `max_positions`: length of the rotary tables. `why_not_fused(model)` must be None.
    """
    base: Any = model.model
    config, layers = model.config, list(base.layers)
    attention = layers[0].self_attn
    by_block = {(id(p.group.block), len(p.sizes)): p for p in weights.projections()}
    norms = [layer.input_layernorm.weight.data for layer in layers[1:]] + [base.norm.weight.data]
    cos, sin = _rotary_tables(base, max_positions)
    fused = FusedModel(
        embedding=base.embed_tokens.weight.data,
        first_norm=layers[0].input_layernorm.weight.data,
        layers=tuple(_read_layer(layer, by_block, norm) for layer, norm in zip(layers, norms, strict=True)),
        head=model.lm_head.weight.data,
        cos=cos,
        sin=sin,
        eps=base.norm.variance_epsilon,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scaling=attention.scaling,
    )
    _mark_addresses_static(fused)
    return fused


def _mark_addresses_static(fused: FusedModel) -> None:
    """Tell the compiler what it knows of parameters: otherwise graph trees copy every weight at each replay."""
    for holder in (fused, *fused.layers):
        for value in vars(holder).values():
            if isinstance(value, Tensor):
                torch._dynamo.mark_static_address(value)


def _read_layer(
    layer: Any, projections: dict[tuple[int, int], FusedProjection], next_norm: Tensor
) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = projections[id(attention), 3], projections[id(mlp), 2]
    return FusedLayer(
        qkv=qkv.weight.data,
        qkv_bias=None if qkv.bias is None else qkv.bias.data,
        q_norm=attention.q_norm.weight.data if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight.data if hasattr(attention, "k_norm") else None,
        o=attention.o_proj.weight.data,
        o_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.data,
        gate_up=gate_up.weight.data,
        down=mlp.down_proj.weight.data,
        post_attention_norm=layer.post_attention_layernorm.weight.data,
        next_norm=next_norm,
    )


@torch.no_grad()
def _rotary_tables(base: Any, max_positions: int) -> tuple[Tensor, Tensor]:
    like = base.embed_tokens.weight
    positions = torch.arange(max_positions, device=like.device)[None]
    cos, sin = base.rotary_emb(like, positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _objections(model: PreTrainedModel) -> Iterator[str]:
    """In an order in which each may rely on those before it."""
    name = type(model).__name__
    if name not in FUSED_MODEL_CLASSES or type(model).__module__.split(".")[0] != "transformers":
        yield f"{name} is not one of {', '.join(FUSED_MODEL_CLASSES)}"
    yield from _module_objections(model)
    yield from _config_objections(model)
    yield from _parameter_objections(model)


def _module_objections(model: PreTrainedModel) -> Iterator[str]:
    own_modules = (type(model).__module__, "transformers.activations")
    for path, module in model.named_modules():
        kind = type(module)
        if kind not in PLAIN_MODULES and kind.__module__ not in own_modules:
            qualified_name = f"{kind.__module__}.{kind.__qualname__}"
            yield f"{path} is a {qualified_name} (an adapter, or quantised weights), not the model's own"
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            yield f"{path or 'the model'} has a hook or a replaced forward, which fused kernels would not run"


def _config_objections(model: PreTrainedModel) -> Iterator[str]:
    config, base = model.config, cast(Any, model.model)
    rope_type = base.rotary_emb.rope_type
    if rope_type not in STATIC_ROPE_TYPES:
        yield f"its rotary embedding (rope_type={rope_type}) changes with the length of the sequence"
    if config.hidden_act != "silu":
        yield f"its activation is {config.hidden_act}, not silu"
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": base.layers[0].self_attn.head_dim,
    }
    for name, size in sizes.items():
        # Rows of such weights would begin at unaligned addresses.
        if size % SIZE_MULTIPLE:
            yield f"its {name} ({size}) is not a multiple of {SIZE_MULTIPLE}"


def _parameter_objections(model: PreTrainedModel) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            yield f"{name} is a {type(parameter).__name__}, not a plain parameter"
        if name.endswith("bias") and name.split(".")[-2] not in BIASED_PROJECTIONS:
            yield f"{name} is a bias where fused kernels add none"
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        yield f"its parameters differ in dtype: {', '.join(sorted(dtypes))}"
    if model.dtype == torch.float64:
        yield "its dtype is torch.float64, and fused kernels sum up in float32"
    _, unfused = find_projection_groups(model)
    for name, reason in unfused.items():
        yield f"{name} cannot be one product: {reason}"
