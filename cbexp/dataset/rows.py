"""Reads a dataset's rows: generated questions, a hub dataset (or a folder in its format), or a file of JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cbexp.config import DatasetConfig
from cbexp.dataset.arithmetic import build_questions
from cbexp.errors import DatasetError
from cbexp.hub import Source, explained_loading, resolve_source


@dataclass(frozen=True)
class Row:
    """One row. `place` names it in errors. `prompt` is text or a list of chat messages, unchecked."""

    place: str
    prompt: Any
    answer: Any


def load_rows(config: DatasetConfig, seed: int) -> list[Row]:
    """Return the `num_prompts` rows that `config` asks for. Arithmetic questions are drawn from `seed`.

    Raises:
        DatasetError: the dataset cannot be read or reached, or lacks rows or fields.
    """
    if config.kind == "arithmetic":
        questions = build_questions(config.num_prompts, seed, "heldout")
        return [Row(f"question {i}", question.text, question.answer) for i, question in enumerate(questions)]
    if config.kind == "hub":
        return _load_hub_rows(config)
    return _load_json_lines(config)


def _load_hub_rows(config: DatasetConfig) -> list[Row]:
    dataset = _load_hub_dataset(config)
    name = f"dataset {config.path!r} (split {config.split})"
    _check_num_rows(config, len(dataset), name)
    for field in _wanted_fields(config):
        _check_field(field, dataset.column_names, name)
    indices = _order_rows(len(dataset), config.shuffle_seed)[: config.num_prompts]
    return [
        _build_row(config, f"row {index} of {name}", values)
        for index, values in zip(indices, dataset.select(indices), strict=True)
    ]


def _order_rows(num_rows: int, shuffle_seed: int | None) -> list[int]:
    """The order of `datasets.Dataset.shuffle(seed=...)`, which would not return the rows' indices."""
    if shuffle_seed is None:
        return list(range(num_rows))
    return [int(index) for index in np.random.default_rng(shuffle_seed).permutation(num_rows)]


def _load_hub_dataset(config: DatasetConfig) -> Any:
    import datasets

    assert config.path is not None
    source = resolve_source(Source("dataset", "dataset.path", config.path, config.revision), DatasetError)
    with explained_loading(source, DatasetError, datasets.exceptions.DatasetsError):
        return datasets.load_dataset(
            source.name, name=config.config_name, split=config.split, revision=source.revision
        )


def _load_json_lines(config: DatasetConfig) -> list[Row]:
    assert config.path is not None
    path = Path(config.path).expanduser()
    limit = config.num_prompts if config.shuffle_seed is None else None
    rows = list(islice(_read_json_lines(path, config), limit))
    if config.shuffle_seed is not None:
        random.Random(config.shuffle_seed).shuffle(rows)
    _check_num_rows(config, len(rows), f"dataset.path={config.path}")
    return rows[: config.num_prompts]


def _read_json_lines(path: Path, config: DatasetConfig) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"line {number} of {path}"
                    yield _build_row(config, place, _parse_json_line(line, place))
    except OSError as error:
        raise DatasetError(f"dataset.path={path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset.path={path} is not UTF-8 text: {error}.") from error


def _parse_json_line(line: str, place: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{place} is not valid JSON: {error.msg} at column {error.colno}.") from error
    if not isinstance(values, dict):
        raise DatasetError(
            f"{place} holds a JSON {type(values).__name__}, and an object with fields is needed."
        )
    return values


def _build_row(config: DatasetConfig, place: str, values: Mapping[str, Any]) -> Row:
    for field in _wanted_fields(config):
        _check_field(field, values, place)
    prompt, *answer = (values[field] for field in _wanted_fields(config))
    return Row(place, prompt, answer[0] if answer else None)


def _wanted_fields(config: DatasetConfig) -> list[str]:
    """The prompt's field and, for a verifier, the answer's. The configuration has checked them."""
    fields = [config.prompt_field, config.answer_field if config.verifier != "none" else None]
    return [field for field in fields if field is not None]


def _check_field(field: str, known: Any, place: str) -> None:
    if field not in known:
        raise DatasetError(f"{place} has no field {field!r}. Its fields: {', '.join(known)}.")


def _check_num_rows(config: DatasetConfig, num_rows: int, place: str) -> None:
    if num_rows < config.num_prompts:
        raise DatasetError(
            f"dataset.num_prompts={config.num_prompts} are asked for, and {place} has {num_rows} rows: "
            f"set dataset.num_prompts={num_rows} or less."
        )
