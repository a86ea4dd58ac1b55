"""Torch's global random numbers, from which transformers' own generation draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Keep torch's global generators, whatever the body does with them."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def own_random_numbers(seed: int, submission: int) -> Iterator[None]:
    """In the body they follow from both numbers; afterwards they go on as if nothing had been drawn."""
    with kept_random_state():
        torch.manual_seed(random.Random(f"{seed} {submission}").getrandbits(63))
        yield
