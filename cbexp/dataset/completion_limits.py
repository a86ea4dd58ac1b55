"""The limit of new tokens for each prompt: one for all, a list from a file, or drawn at random."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from cbexp.config import ExperimentConfig, SamplingConfig
from cbexp.errors import ConfigError


def load_completion_limits(config: ExperimentConfig) -> list[int]:
    """Return the limit of each prompt, in order.

    Raises:
        ConfigError: the file cannot be read, is no list of limits, or its length is not the number of prompts.
    """
    sampling, num_prompts = config.sampling, config.dataset.num_prompts
    if sampling.max_new_tokens_file is not None:
        return _read_limits(Path(sampling.max_new_tokens_file).expanduser(), num_prompts)
    if sampling.median_new_tokens is None:
        return [config.max_new_tokens] * num_prompts
    seed = config.seed if sampling.new_tokens_seed is None else sampling.new_tokens_seed
    return draw_limits(sampling, num_prompts, seed)


def draw_limits(sampling: SamplingConfig, num_prompts: int, seed: int) -> list[int]:
    """Return log-normal limits: `random.Random(seed).lognormvariate(log(median), sigma)` in order, rounded.

    They are clipped to 1 and `max_new_tokens`. The limits of fewer prompts are the first of those of more.
    """
    assert sampling.median_new_tokens is not None  # checked by the schema, as max_new_tokens is
    assert sampling.max_new_tokens is not None
    rng = random.Random(seed)
    mu, longest = math.log(sampling.median_new_tokens), sampling.max_new_tokens
    draws = (rng.lognormvariate(mu, sampling.sigma_new_tokens) for _ in range(num_prompts))
    return [max(1, min(longest, round(draw))) for draw in draws]


def _read_limits(path: Path, num_prompts: int) -> list[int]:
    key = f"sampling.max_new_tokens_file={path}"
    try:
        limits = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{key} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key} is no JSON: {error}.") from error
    if not isinstance(limits, list) or any(type(limit) is not int or limit < 1 for limit in limits):
        raise ConfigError(
            f"{key} must be a JSON list of whole numbers from 1, one a prompt, as in [12, 480]."
        )
    if len(limits) != num_prompts:
        raise ConfigError(
            f"{key} has {len(limits)} limits, and dataset.num_prompts={num_prompts}: they must be as many."
        )
    return limits
