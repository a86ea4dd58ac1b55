"""Tiny random models of every shape that matters, prompts for them, and the reference that they are compared with."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

VOCAB_SIZE = 97
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Tied random weights make a model repeat its last token.
    "tie_word_embeddings": False,
}
# Name of transformers' classes, and what is special.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {"attn_implementation": "eager"}),
    # A soft cap low enough to bend every attention score, and a window shorter than most prompts.
    "gemma2": ("Gemma2", {"sliding_window": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}),
    # Four sliding layers to one full layer: their blocks differ in size, so sectors hold several.
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 16,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 12}),
    # Attention sinks, experts, sliding and full layers.
    "gpt_oss": ("GptOss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "llama, one head of keys": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2, sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    # Heads that are wider together than the hidden state.
    "qwen3, wide heads": ("Qwen3", {"head_dim": 16}),
    "phi3, sliding": ("Phi3", {"sliding_window": 9}),
    "olmo2": ("Olmo2", {}),
    # Its second layer has no rotary positions.
    "smollm3, sliding": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 11},
    ),
}
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 40, 63)


def build_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model whose completions differ from prompt to prompt; transformers' own init is too flat for that."""
    name, values = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    config = config_class(**(SHAPE | values | changes))
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(("sinks", "bias")):
                parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.no_grad()
def generate_greedily(
    model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int] = ()
) -> tuple[int, ...]:
    """The reference: `generate` of one prompt, with a mask; the pad id is only ever written after an end."""
    input_ids = torch.tensor([prompt_ids], device=model.device)
    eos = list(eos_token_ids) or None
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
    return tuple(output[0, len(prompt_ids) :].tolist())
