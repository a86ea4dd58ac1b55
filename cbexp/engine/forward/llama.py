"""Llama-like models as fused kernels: which models are, what is read of one, its decode steps and its prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbexp.engine.attention import attend_packed, packed_lengths
from cbexp.engine.buffers import LayerPages
from cbexp.engine.forward import ops
from cbexp.engine.forward.plain import Reduce
from cbexp.engine.forward.projections import find_projection_groups
from cbexp.engine.sampling import HeadInputs

# Models whose decoder layer is: norm, q/k/v, (norm of each head,) rotary embedding, attention, o, residual; norm, gated
# SiLU, residual. By their classes: a like name with another order of norms, or a scaled residual, would be wrong.
MODEL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Rotary embeddings whose angle depends on the position alone, not on the length of the sequence.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
PLAIN_MODULES = (nn.Linear, nn.Embedding, nn.ModuleList)
BIASED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
SIZE_MULTIPLE = 16


@dataclass(frozen=True)
class LlamaLayer:
    """The caller's parameters of one decoder layer: [out_features, in_features], biases and norms as vectors.

    `qkv` and `qkv_biases` are of the queries, keys and values; there may be no biases. `next_norm` is the norm before
    the next layer, or the last one.
    """

    qkv: list[Tensor]
    qkv_biases: list[Tensor]
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_attention_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    next_norm: Tensor


@dataclass(frozen=True)
class LlamaModel:
    """What a forward of fused kernels reads of a model."""

    embedding: Tensor
    first_norm: Tensor
    layers: tuple[LlamaLayer, ...]
    head: Tensor
    eps: float
    scaling: float


def read_llama(model: PreTrainedModel) -> LlamaModel:
    """Read `model`, of which `why_not_llama` must be None; to be read again after parameters were re-assigned."""
    base: Any = model.model
    layers = list(base.layers)
    norms = [*(layer.input_layernorm for layer in layers[1:]), base.norm]
    return LlamaModel(
        embedding=_tensor(base.embed_tokens),
        first_norm=_tensor(layers[0].input_layernorm),
        layers=tuple(_read_layer(layer, norm) for layer, norm in zip(layers, norms, strict=True)),
        head=_tensor(cast(nn.Module, model.lm_head)),
        eps=base.norm.variance_epsilon,
        scaling=layers[0].self_attn.scaling,
    )


def _read_layer(layer: Any, next_norm: nn.Module) -> LlamaLayer:
    # Not by getattr, which is slow for a module's children: this runs around every `on_step`.
    modules = layer._modules
    attention, mlp = modules["self_attn"]._modules, modules["mlp"]._modules
    qkv = [attention["q_proj"], attention["k_proj"], attention["v_proj"]]
    o = attention["o_proj"]
    return LlamaLayer(
        qkv=[_tensor(linear) for linear in qkv],
        qkv_biases=[_tensor(linear, "bias") for linear in qkv if linear._parameters["bias"] is not None],
        q_norm=_tensor(attention["q_norm"]) if "q_norm" in attention else None,
        k_norm=_tensor(attention["k_norm"]) if "k_norm" in attention else None,
        o=_tensor(o),
        o_bias=None if o._parameters["bias"] is None else _tensor(o, "bias"),
        post_attention_norm=_tensor(modules["post_attention_layernorm"]),
        gate=_tensor(mlp["gate_proj"]),
        up=_tensor(mlp["up_proj"]),
        down=_tensor(mlp["down_proj"]),
        next_norm=_tensor(next_norm),
    )


def _tensor(module: nn.Module, name: str = "weight") -> Tensor:
    """A parameter's data, as an object of ours: the caller's bears no mark of the compiler's.

    The mark tells what the compiler knows of parameters: otherwise graph trees copy every weight at each replay. It is
    unguarded, since the object is another one in each drive.
    """
    tensor = cast(Tensor, module._parameters[name]).data
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


@torch.no_grad()
def _rotary_tables(base: Any, max_positions: int) -> tuple[Tensor, Tensor]:
    """The model's own [max_positions, head_dim], in its dtype, of every position."""
    like = base.embed_tokens.weight
    positions = torch.arange(max_positions, device=like.device)[None]
    cos, sin = base.rotary_emb(like, positions)
    return cos[0], sin[0]


# Takes normed hidden states [rows, hidden], a layer and its index; gives [rows, num_heads * head_dim].
Attend = Callable[[Tensor, LlamaLayer, int], Tensor]


class LlamaForward:
    """Implements `Forward` on `model` between `begin` and `end`; `pages` by layer index.

    `max_positions`: length of the rotary tables. Numerics are those of transformers' own code, rounded at the same
    places, but for the order of sums.
    """

    _model: LlamaModel

    def __init__(self, model: PreTrainedModel, pages: tuple[LayerPages, ...], max_positions: int) -> None:
        self._source = model
        self._pages = pages
        max_rows, device = pages[0].block_table.shape[0], pages[0].pages.device
        # Of one layer after the other: what attention leaves behind is what it finds.
        num_arrivals = max_rows * model.config.num_key_value_heads
        self._arrivals = torch.zeros(num_arrivals, dtype=torch.int32, device=device)
        self._cos, self._sin = (
            table.clone(memory_format=torch.contiguous_format)
            for table in _rotary_tables(model.model, max_positions)
        )
        for tensor in (self._arrivals, self._cos, self._sin):
            torch._dynamo.mark_static_address(tensor)

    def begin(self) -> None:
        """Read the model as it is now. The rotary tables are ours, and stay where they are with what they are now."""
        self.read()
        for table, values in zip(
            (self._cos, self._sin), _rotary_tables(self._source.model, len(self._cos)), strict=True
        ):
            table.copy_(values)

    def read(self) -> None:
        """Take the caller's tensors, unless they are there: captured graphs do without. They lie where they did."""
        if "_model" not in vars(self):
            self._model = read_llama(self._source)

    def end(self) -> None:
        """Let go of the caller's tensors. Safe to call twice."""
        vars(self).pop("_model", None)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> HeadInputs:
        """As `Forward`."""
        hidden = self._run(token_ids, partial(self._attend_paged, positions))
        return HeadInputs(hidden, self._model.head)

    def prefill(self, batch: dict[str, Any], num_rows: int) -> HeadInputs:
        """As `Forward`."""
        hidden = self._run_packed(batch)
        return HeadInputs(hidden[batch["logits_indices"][:num_rows]], self._model.head)

    def prefill_in_chunks(
        self, batch: dict[str, Any], chunks: Sequence[Tensor], reduce: Reduce
    ) -> list[Tensor]:
        """As `Forward`."""
        hidden = self._run_packed(batch)
        return [
            reduce(HeadInputs(hidden[rows], self._model.head), chunk) for chunk, rows in enumerate(chunks)
        ]

    def _run_packed(self, batch: dict[str, Any]) -> Tensor:
        return self._run(batch["input_ids"][0], partial(self._attend_packed, batch))

    def _run(self, token_ids: Tensor, attend_in: Attend) -> Tensor:
        """Final normed hidden states [rows, hidden]."""
        model = self._model
        residual: Tensor
        hidden: Tensor
        residual, hidden = ops.embed_norm(token_ids, model.embedding, model.first_norm, model.eps)
        for index, layer in enumerate(model.layers):
            attended = attend_in(hidden, layer, index)
            residual, hidden = ops.project_add_norm(
                attended, layer.o, layer.o_bias, residual, layer.post_attention_norm, model.eps
            )
            gated = ops.gated_projection(hidden, layer.gate, layer.up)
            residual, hidden = ops.project_add_norm(
                gated, layer.down, None, residual, layer.next_norm, model.eps
            )
        return hidden

    def _attend_paged(self, positions: Tensor, hidden: Tensor, layer: LlamaLayer, index: int) -> Tensor:
        pages = self._pages[index]
        attended: Tensor = ops.attend_new_token(
            *self._projection(positions, hidden, layer),
            pages.pages,
            pages.block_table,
            pages.page_offset,
            self._arrivals,
            self._model.scaling,
            pages.window,
        )
        return attended

    def _attend_packed(self, batch: dict[str, Any], hidden: Tensor, layer: LlamaLayer, index: int) -> Tensor:
        heads = ops.rotated_projection(*self._projection(batch["position_ids"][0], hidden, layer))
        # As model code hands them to a cache: [1, heads, tokens, head_dim].
        query, key, value = (part.transpose(0, 1)[None] for part in heads)
        kwargs = dict(batch)  # the cache puts this layer's lengths in place of all
        key, value = batch["cache"].update(key, value, index, kwargs=kwargs)
        # Not the module's, which has none in Mistral: its code asks the config.
        window = self._pages[index].window
        lengths = packed_lengths(kwargs, "sliding_attention" if window else "full_attention")
        packed = query.squeeze(0), key.squeeze(0), value.squeeze(0)
        attended = attend_packed(*packed, lengths, self._model.scaling, window, None, None)
        return attended.reshape(hidden.shape[0], -1)

    def _projection(self, positions: Tensor, hidden: Tensor, layer: LlamaLayer) -> tuple[Any, ...]:
        """What both operators that make heads take first."""
        model, norms = self._model, (layer.q_norm, layer.k_norm)
        return (hidden, layer.qkv, layer.qkv_biases, positions, self._cos, self._sin, *norms, model.eps)


def why_not_llama(model: PreTrainedModel) -> str | None:
    """The reason for which `model` cannot run as fused layers; None when it can. It must be borrowed."""
    return next(_objections(model), None)


def find_hook(model: PreTrainedModel) -> str | None:
    """The first hook or replaced forward in the model, as `why_not_llama` names it."""
    for path, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return (
                f"{path or 'the model'} has a hook or a replaced forward, which fused kernels would not run"
            )
    return None


def _objections(model: PreTrainedModel) -> Iterator[str]:
    """In an order in which each may rely on those before it; a hook is named when nothing else is amiss."""
    name = type(model).__name__
    if name not in MODEL_CLASSES or type(model).__module__.split(".")[0] != "transformers":
        yield f"{name} is not one of {', '.join(MODEL_CLASSES)}"
    yield from _module_objections(model)
    yield from _config_objections(model)
    yield from _parameter_objections(model)
    hook = find_hook(model)
    if hook is not None:
        yield hook
    _, unfused = find_projection_groups(model)
    for name, reason in unfused.items():
        yield f"{name} cannot be one product: {reason}"


def _module_objections(model: PreTrainedModel) -> Iterator[str]:
    own_modules = (type(model).__module__, "transformers.activations")
    for path, module in model.named_modules():
        kind = type(module)
        if kind not in PLAIN_MODULES and kind.__module__ not in own_modules:
            qualified_name = f"{kind.__module__}.{kind.__qualname__}"
            yield f"{path} is a {qualified_name} (an adapter, or quantised weights), not the model's own"
    for name in ("variance_epsilon", "scaling"):
        numbers = {vars(module)[name] for module in model.modules() if name in vars(module)}
        if len(numbers) > 1:
            yield f"its layers differ in {name}: {', '.join(map(str, sorted(numbers)))}"


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
        if not parameter.is_contiguous():
            yield f"{name} is not contiguous"
        if name.endswith("bias") and name.split(".")[-2] not in BIASED_PROJECTIONS:
            yield f"{name} is a bias where fused kernels add none"
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        yield f"its parameters differ in dtype: {', '.join(sorted(dtypes))}"
    if model.dtype == torch.float64:
        yield "its dtype is torch.float64, and fused kernels sum up in float32"
