"""Draws prompts of random token ids, for a workload of known size without a tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cbexp.config import DatasetConfig
from cbexp.errors import DatasetError


def draw_prompts(
    config: DatasetConfig, vocab_size: int, seed: int, special_ids: Collection[int]
) -> list[list[int]]:
    """Return `num_prompts` prompts of ids below `vocab_size`, none of them special.

    Raises:
        DatasetError: the file of lengths cannot be read or is too short.
    """
    rng = random.Random(seed)
    excluded = set(special_ids)
    allowed = [token_id for token_id in range(vocab_size) if token_id not in excluded]
    return [rng.choices(allowed, k=length) for length in draw_lengths(config, seed)]


def draw_lengths(config: DatasetConfig, seed: int) -> list[int]:
    """Return each prompt's length in tokens: from the file, or `random.Random(lengths_seed).randint(min, max)`.

    Without `lengths_seed`, lengths are drawn from `seed`.
    """
    if config.lengths_file is not None:
        return _read_lengths(Path(config.lengths_file).expanduser(), config.num_prompts)
    assert config.min_length is not None
    assert config.max_length is not None
    rng = random.Random(seed if config.lengths_seed is None else config.lengths_seed)
    return [rng.randint(config.min_length, config.max_length) for _ in range(config.num_prompts)]


def _read_lengths(path: Path, num_prompts: int) -> list[int]:
    """Lengths from a JSON list, or from text with one a line."""
    key = f"dataset.lengths_file={path}"
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        lengths = [_read_length(value) for value in values]
    except OSError as error:
        raise DatasetError(f"{key} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise DatasetError(
            f"{key} is no list of lengths (whole numbers from 1, one a line): {error}."
        ) from error
    if len(lengths) < num_prompts:
        raise DatasetError(
            f"dataset.num_prompts={num_prompts} are asked for, and {key} has {len(lengths)} lengths."
        )
    return lengths[:num_prompts]


def _read_length(value: Any) -> int:
    if type(value) not in (int, str) or int(value) < 1:
        raise ValueError(f"{value!r} is none")
    return int(value)
