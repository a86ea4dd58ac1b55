"""Tiny random models, the reference they are compared with, and drivers on transformers' own generation."""

import gc
from contextlib import ExitStack

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cbexp.drivers.generate import GenerateDriver
from cbexp.drivers.manager import ManagerDriver
from cbexp.engine import CBSyncConfig

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session", autouse=True)
def _imported_modules_are_not_collected():
    """Upstream runs a full collection at each stop, half a second with all that torch and transformers import."""
    gc.collect()
    gc.freeze()


def build_model(model_class, config_class, **changes):
    """Its initialisation is larger than by default, where every prompt gets the same token."""
    torch.manual_seed(0)
    model = model_class(config_class(**(SHAPE | changes)))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def qwen3():
    return build_model(Qwen3ForCausalLM, Qwen3Config)


@pytest.fixture(params=["qwen3", "llama"])
def model(request, qwen3):
    return qwen3 if request.param == "qwen3" else build_model(LlamaForCausalLM, LlamaConfig)


SETTINGS = {"max_new_tokens": 8, "eos_token_id": (), "pad_token_id": 0, "page_size": 16, "num_blocks": 64}


def make_config(**changes):
    return CBSyncConfig(**(SETTINGS | {"max_batch_tokens": 256} | changes))


@pytest.fixture(params=[ManagerDriver, GenerateDriver], ids=["manager", "generate"])
def make_driver(request):
    """Builds a driver of each kind and closes it after the test."""
    yield from _making(request.param)


@pytest.fixture
def make_manager():
    yield from _making(ManagerDriver)


def _making(driver_class):
    with ExitStack() as drivers:
        yield lambda model, **changes: drivers.enter_context(driver_class(model, make_config(**changes)))


@pytest.fixture
def generate_alone():
    """The reference: greedy `generate` of one prompt at a time, with a mask, nothing else set."""

    def generate(model, prompt_ids, max_new_tokens, eos_token_ids=()):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        own, base.generation_config = base.generation_config, GenerationConfig()
        ids = torch.tensor([list(prompt_ids)])
        eos = list(eos_token_ids) or None
        settings = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=0)
        output = base.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        base.generation_config = own
        return tuple(output[0, len(prompt_ids) :].tolist())

    return generate


def drive(driver, prompts, **kwargs):
    ids = driver.add_requests(prompts, **kwargs)
    completions = driver.drive_until_empty()
    assert list(completions) == ids
    return list(completions.values())


def ids_of(completions):
    return [completion.completion_ids for completion in completions]


@pytest.fixture
def prompts():
    """Prompts of 1 to 40 tokens; token 0, which is also the pad id, is in one of them."""
    generator = torch.Generator().manual_seed(3407)
    lengths = (1, 3, 40, 17, 16, 8)
    drawn = [torch.randint(1, SHAPE["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    drawn[1][0] = 0
    return drawn
