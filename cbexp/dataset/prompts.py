"""Turns a dataset's configuration into prompts, their answers and a verifier."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from cbexp.config import DatasetConfig
from cbexp.dataset.chat import PromptRenderer
from cbexp.dataset.rows import Row, load_rows
from cbexp.dataset.synthetic import draw_prompts
from cbexp.dataset.verifiers import ANSWER_CHECKS, Verifier
from cbexp.errors import DatasetError


@dataclass(frozen=True)
class PromptSet:
    """A round's prompts in order: for each its token ids, and in parallel lists its text and answer.

    `texts` is None for synthetic prompts. `answers` and `verifier` (completion text, answer) are None together.
    """

    prompt_ids: list[list[int]]
    texts: list[str] | None = None
    answers: list[str] | None = None
    verifier: Verifier | None = None


def needs_tokenizer(config: DatasetConfig) -> bool:
    """Whether the prompts are text that has to be tokenized."""
    return config.kind != "synthetic"


def load_prompts(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    seed: int,
    special_ids: Collection[int] = (),
) -> PromptSet:
    """Return the `num_prompts` prompts of `config`. Generated prompts are drawn from `seed`.

    Synthetic prompts need no tokenizer. They avoid `special_ids` and the tokenizer's special ids.

    Raises:
        DatasetError: the dataset cannot be read or reached, lacks rows, fields or a chat template, or a prompt is empty
            or has ids outside the vocabulary.
    """
    if not needs_tokenizer(config):
        known_ids = tokenizer.all_special_ids if tokenizer is not None else []
        return PromptSet(draw_prompts(config, vocab_size, seed, {*special_ids, *known_ids}))
    if tokenizer is None:
        raise DatasetError(f"dataset={config.name} holds text and needs a tokenizer, and the model has none.")
    rows = load_rows(config, seed)
    renderer = PromptRenderer(config, tokenizer)
    texts = [renderer.render(row) for row in rows]
    prompt_ids = [renderer.encode(text, row.place) for row, text in zip(rows, texts, strict=True)]
    for row, ids in zip(rows, prompt_ids, strict=True):
        _check_ids(row, ids, vocab_size)
    if config.verifier == "none":
        return PromptSet(prompt_ids, texts)
    answers = [_read_answer(row, config.verifier) for row in rows]
    return PromptSet(prompt_ids, texts, answers, ANSWER_CHECKS[config.verifier].verify)


def _check_ids(row: Row, ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise DatasetError(f"{row.place}: its prompt is empty once the chat template is applied.")
    if max(ids) >= vocab_size:
        raise DatasetError(
            f"{row.place}: its prompt has the token id {max(ids)}, and the model knows 0 to {vocab_size - 1}: "
            "the tokenizer does not belong to this model."
        )


def _read_answer(row: Row, verifier: str) -> str:
    if row.answer is None:
        raise DatasetError(f"{row.place} has no answer, and dataset.verifier={verifier} compares with it.")
    try:
        return ANSWER_CHECKS[verifier].normalize(str(row.answer))
    except ValueError as error:
        raise DatasetError(
            f"{row.place}: dataset.verifier={verifier} cannot use its answer {str(row.answer)!r}: {error}."
        ) from error
