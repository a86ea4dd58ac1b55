"""What the tests of loading share: tiny architectures, and a byte-level tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}[no thinking]{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
QWEN3 = {"model_type": "qwen3", "tie_word_embeddings": True, "eos_token_id": 257, **TINY}
GPT_OSS = {**TINY, "model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}


def build_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """256 bytes, then <s> = 256, </s> = 257, <pad> = 258; a BOS is added unless told otherwise."""
    from tokenizers.processors import TemplateProcessing

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=chat_template
    )


def save_model(folder: Path, values: dict[str, Any] = QWEN3, *, tokenizer: bool = True) -> Path:
    """Write a tiny random model in transformers' folder format."""
    values = dict(values)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.save_pretrained(folder)
    if tokenizer:
        build_tokenizer().save_pretrained(folder)
    return folder
