"""A small random model for fused layers, of any family that they run."""

from __future__ import annotations

import torch
import transformers

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, MAX_POSITIONS, PAGE_SIZE = 3, 2, 16, 64, 4
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


def build(family="Qwen3", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("norm.weight")
            if parameter.dim() > 1 or name.endswith("bias") or is_norm:
                parameter.normal_(1.0 if is_norm else 0.0, std=0.3, generator=generator)
    return model.eval().requires_grad_(False)
