"""Requests, steps and settings for transformers' processor without a driver."""

import time

import torch

from cbexp.engine import CBSyncConfig
from cbexp.engine.requests import PromptGroup
from cbexp.engine.upstream.build import build_request_state


def settings_for(model, **changes):
    """A small cache; every step is one of transformers' own, in the model's own attention."""
    settings = {"page_size": 8, "num_blocks": 20, "max_batch_tokens": 64, "max_requests_per_batch": 8}
    settings |= {"attn_implementation": model.config._attn_implementation}
    return CBSyncConfig(**(settings | changes))


def new_group(number, prompt_ids, max_new_tokens=4, eos_token_ids=(), num_children=0):
    numbers = range(number, number + 1 + num_children)
    return PromptGroup(numbers, tuple(prompt_ids), max_new_tokens, eos_token_ids, time.perf_counter())


def submit(processor, request_id, prompt_ids, **options):
    """Transformers' request, waiting; `options` as of `new_group`."""
    state = build_request_state(new_group(0, prompt_ids, **options))
    state.request_id = request_id
    processor.scheduler.add_waiting_request(state)
    return state


@torch.no_grad()
def run_step(processor, model):
    """One of transformers' own steps; whether there was one to run."""
    if not processor.prepare_next_batch():
        return False
    processor._generation_step(model)
    processor.update_batch()
    return True
