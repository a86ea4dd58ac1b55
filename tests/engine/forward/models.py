"""Small random models, adapters on them, and buffers for their decode steps."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from cbexp.engine.attention import ATTENTION_NAME
from cbexp.engine.buffers import PagePool, allocate_buffers
from cbexp.engine.forward.llama import LlamaForward, why_not_llama
from cbexp.engine.forward.projections import ProjectionFusion

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, MAX_POSITIONS, PAGE_SIZE = 3, 2, 16, 128, 4
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def build(family="Qwen3", weight_std=0.3, **changes):
    """Weights, biases and norms are large enough to change the model's tokens."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, std=0.3, generator=generator)
            elif parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(std=weight_std if parameter.dim() > 1 else 0.3, generator=generator)
    return model.eval()


def with_lora(model, targets=("q_proj", "v_proj", "up_proj"), **changes):
    """Random adapters: PEFT's own initialisation adds nothing; dropout must be the identity in eval mode."""
    torch.manual_seed(2)
    options = {"r": 4, "lora_dropout": 0.5, "init_lora_weights": False, **changes}
    return get_peft_model(model, LoraConfig(target_modules=list(targets), **options)).eval()


def in_half_precision(model, dtype=torch.bfloat16):
    """A copy, as it is loaded with that dtype: buffers stay what they are."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


@contextmanager
def fused(model):
    """With `model`'s projections fused."""
    fusion = ProjectionFusion(model)
    fusion.resolve()
    fusion.install()
    try:
        yield fusion
    finally:
        fusion.remove()


def layer(model, index=0):
    return next(m for name, m in model.named_modules() if name.endswith(f"layers.{index}"))


@torch.no_grad()
def logits(model, seed=0):
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, use_cache=False).logits


def places(model):
    """Where each parameter is: the object, its address and its storage."""
    return {
        name: (id(p), p.data_ptr(), p.untyped_storage().data_ptr(), p.untyped_storage().nbytes())
        for name, p in model.named_parameters(remove_duplicate=False)
    }


class CountProducts(TorchDispatchMode):
    """Products of one weight each, and joint ones."""

    single = joint = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.single += name in ("mm", "addmm", "linear")
        self.joint += name == "joint_linear"
        return function(*args, **(kwargs or {}))


def count_products(model):
    with CountProducts() as count:
        logits(model)
    return count.single, count.joint


def layer_windows(config):
    """Of each layer, as transformers' cache and model code read the config."""
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in types]


def build_buffers(model, num_rows, max_burst=1, page_size=PAGE_SIZE, max_positions=MAX_POSITIONS):
    """Every slot holds NaN; blocks are shuffled among the rows. The model is set to the engine's attention."""
    model.config._attn_implementation = ATTENTION_NAME
    config, windows = model.config, layer_windows(model.config)
    pools = {}
    for window in sorted(set(windows)):
        layers = tuple(index for index, own in enumerate(windows) if own == window)
        width = -(-min(max_positions, window or max_positions) // page_size)
        pages_per_block = 2 * len(layers)
        num_pages = (num_rows * width + 1) * pages_per_block
        shape = num_pages, page_size, config.num_key_value_heads, config.head_dim
        pages = torch.full(shape, float("nan"), dtype=model.dtype, device=model.device)
        pools[str(window)] = PagePool(layers, pages, pages_per_block, 0, width, window)
    sizes = {"max_rows": num_rows, "max_burst": max_burst, "eos_token_ids": ()}
    buffers = allocate_buffers(pools, **sizes, device=model.device)
    generator = torch.Generator().manual_seed(2)
    for name, pool in pools.items():
        blocks = 1 + torch.randperm(num_rows * pool.table_width, generator=generator)
        buffers.block_tables[name].copy_((blocks * pool.pages_per_block).view(num_rows, pool.table_width))
    return buffers


def fused_forward(model, buffers, max_positions=MAX_POSITIONS):
    assert why_not_llama(model) is None
    forward = LlamaForward(model, buffers.layers, max_positions)
    forward.begin()
    return forward
