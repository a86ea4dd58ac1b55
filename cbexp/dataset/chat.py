"""Turns a row's prompt into text by a chat template, and into token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cbexp.checks import describe_near_matches
from cbexp.config import DatasetConfig
from cbexp.dataset.rows import Row
from cbexp.errors import DatasetError

_RESERVED_TEMPLATE_KWARGS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenize",
    "truncation",
)

Message = dict[str, str]


class PromptRenderer:
    """Renders prompts with the tokenizer's chat template, or with the file `dataset.chat_template`.

    Raises:
        DatasetError: there is no template, or it does not read what `dataset.chat_template_kwargs` gives it.
    """

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = config.system_prompt
        self._template = _read_template(config, tokenizer)
        self._kwargs = dict(config.chat_template_kwargs)
        _check_template_kwargs(self._kwargs, self._template)

    def read_messages(self, row: Row) -> list[Message]:
        """The chat that asks for the model's turn."""
        return self._with_system_prompt(_read_messages(row), row.place)

    def render(self, row: Row) -> str:
        """Return the text that the model continues: the chat so far and the start of the model's turn."""
        messages = self.read_messages(row)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self._kwargs,
                )
            )
        except TemplateError as error:
            raise DatasetError(f"the chat template refuses {row.place}: {error}") from error

    def encode(self, text: str, place: str) -> list[int]:
        """Return the token ids of rendered text. The template has already written special tokens like BOS.

        Raises:
            DatasetError: the text, which comes from `place`, is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DatasetError(
                f"{place}: its prompt is not valid Unicode, at character {error.start}: {error.reason}."
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_system_prompt(self, messages: list[Message], place: str) -> list[Message]:
        if self._system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise DatasetError(f"{place} brings its own system message: leave dataset.system_prompt unset.")
        return [{"role": "system", "content": self._system_prompt}, *messages]


def _read_template(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise DatasetError(f"dataset.chat_template={path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise DatasetError(f"dataset.chat_template={path} is not UTF-8 text: {error}.") from error
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise DatasetError(
            "the model's tokenizer has no chat template (or no default one), as is usual for base models: give a Jinja "
            "file in dataset.chat_template. For bare text, one that holds "
            "{% for message in messages %}{{ message.content }}{% endfor %}."
        ) from error


def _check_template_kwargs(kwargs: Mapping[str, Any], template: str) -> None:
    """Refuse names that the template never reads, which Jinja would drop silently."""
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    for key in kwargs:
        if key in _RESERVED_TEMPLATE_KWARGS:
            raise DatasetError(f"dataset.chat_template_kwargs.{key} is set by cbexp: remove it.")
        if key not in words:
            hint = describe_near_matches(key, words)
            raise DatasetError(
                f"dataset.chat_template_kwargs.{key}: the chat template does not read it.{hint}"
            )


def _read_messages(row: Row) -> list[Message]:
    """The row's prompt as chat messages; plain text is one user message."""
    prompt = row.prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DatasetError(
            f"{row.place}: its prompt is of type {type(prompt).__name__}; text or a list of chat messages is needed."
        )
    messages = [_read_message(message, row.place) for message in prompt]
    if not any(message["content"].strip() for message in messages):
        raise DatasetError(f"{row.place}: its prompt is empty.")
    return messages


def _read_message(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise DatasetError(
            f"{place}: a chat message is an object with role and content, and this one is {message!r}."
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise DatasetError(
            f"{place}: a chat message needs a role and a content, both text; it has {dict(message)!r}."
        )
    return {"role": role, "content": content}
