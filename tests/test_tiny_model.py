"""The embedded tiny model: small, in transformers' own format, right on questions it was not trained on."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import cbexp
from cbexp.dataset.arithmetic import build_questions, verify_answer

TINY = Path(cbexp.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


def test_folder_is_small_and_complete() -> None:
    files = {file.name: file.stat().st_size for file in TINY.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert sum(files.values()) <= 5_000_000
    assert json.loads((TINY / "training.json").read_text())["held_out_accuracy"] >= 0.95


@pytest.mark.parametrize("text", ["What is 47 plus 85?", " two  spaces\n\ttab", "naïve café, 数学, 🎉"])
def test_tokenizer_gives_the_bytes_and_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Add 2 to 3."}]
    closed = tokenizer.apply_chat_template(chat, tokenize=False)
    assert closed == "<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\nAdd 2 to 3.<|im_end|>\n"
    opened = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opened == closed + "<|im_start|>assistant\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_held_out_accuracy(tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    questions = build_questions(100, seed=123, split="heldout")
    chats = [[{"role": "user", "content": question.text}] for question in questions]
    prompt_ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    batch = tokenizer.pad({"input_ids": cast(Any, prompt_ids)}, padding_side="left", return_tensors="pt")
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 96, "do_sample": False}
    completion_ids = model.generate(batch.input_ids, **settings)[:, batch.input_ids.shape[1] :]
    assert (completion_ids == tokenizer.eos_token_id).any(dim=1).all(), "a completion did not end by itself"
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    pairs = zip(texts, questions, strict=True)
    assert sum(verify_answer(text, question.answer) for text, question in pairs) >= 95
