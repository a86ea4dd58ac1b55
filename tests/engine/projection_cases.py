"""A small random model of each family, and what fused projections are asked of it."""

from __future__ import annotations

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 12},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "Gemma2": {"sliding_window": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
}
NUM_GROUPS = 2 * SHAPE["num_hidden_layers"]
MEMBERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
# Not bit for bit: a wider matrix product sums in another order. Measured: 3e-6 at most, of logits up to 7.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-5}


def build(family="Llama", **changes):
    """A random model with weights (and biases, where it has some) large enough to change its tokens."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES.get(family, {}) | changes))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def with_lora(model, targets=("q_proj", "v_proj", "up_proj"), **changes):
    """Random adapters: PEFT's own initialisation adds nothing; dropout must be the identity in eval mode."""
    torch.manual_seed(2)
    config = LoraConfig(
        r=4, lora_dropout=0.5, target_modules=list(targets), **{"init_lora_weights": False, **changes}
    )
    return get_peft_model(model, config).eval()


@torch.no_grad()
def logits(model, seed=0):
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, use_cache=False).logits


def generate(model):
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0
    ).tolist()


def layer(model, index=0):
    return next(m for name, m in model.named_modules() if name.endswith(f"layers.{index}"))


def num_bytes(model):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def num_storages(model):
    return len({p.untyped_storage().data_ptr() for p in model.parameters()})


def snapshot(model):
    return {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}


def assert_same_parameters(model, before):
    now = dict(model.named_parameters())
    assert list(now) == list(before)
    for name, (identity, value) in before.items():
        assert id(now[name]) == identity
        assert torch.equal(now[name], value), name


class CountProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.num_products += name in ("mm", "addmm", "linear")
        return function(*args, **(kwargs or {}))


def count_products(model):
    with CountProducts() as count:
        logits(model)
    return count.num_products
