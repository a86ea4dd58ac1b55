"""The caller's model and process come back as they were, after a drive and after an error in one."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import numpy
import pytest
import torch
from transformers import GenerationConfig

NUM_NEW = 12


@pytest.fixture(params=["qwen3", "gemma2"])
def family(request):
    return request.param


def snapshot(model):
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "attention": model.config._attn_implementation,
        "config": copy.deepcopy(vars(model.config)),
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {name: len(module._forward_pre_hooks) for name, module in model.named_modules()},
        "forward": type(model).forward,
        "generation_config": model.generation_config.to_dict(),
        "weights": {name: parameter.clone() for name, parameter in model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "torch_rng": torch.get_rng_state(),
        "python_rng": random.getstate(),
        "numpy_rng": numpy.random.get_state(),
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
    }


def check_same(before, after):
    for key, value in before.items():
        if key == "weights":
            assert all(torch.equal(value[name], after[key][name]) for name in value)
        elif key in ("torch_rng", "numpy_rng"):
            assert all(numpy.array_equal(a, b) for a, b in zip(value, after[key], strict=True))
        else:
            assert after[key] == value, key


@pytest.mark.parametrize("ends_badly", [False, True], ids=["good", "error"])
def test_everything_is_as_before(new_model, make_driver, prompts, family, ends_badly):
    model = new_model(family)
    model.train()
    model.model.layers[0].eval()  # a caller may keep parts out of training
    model.lm_head.weight.requires_grad_(False)
    seen = {}

    def look_inside(index, info):
        seen["training"] = any(module.training for module in model.modules())
        seen["grad"] = torch.is_grad_enabled()
        if ends_badly:
            raise ArithmeticError

    before = snapshot(model)
    driver = make_driver(model, num_blocks=64, on_step=look_inside)
    check_same(before, snapshot(model))
    driver.add_requests(prompts)
    if ends_badly:
        with pytest.raises(ArithmeticError):
            driver.drive_until_empty()
    else:
        driver.drive_until_empty()
    check_same(before, snapshot(model))
    assert seen == {"training": False, "grad": False}
    driver.close()
    check_same(before, snapshot(model))


def test_training_goes_on_between_rounds(new_model, make_driver, prompts, greedy):
    model = new_model("qwen3").train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    driver = make_driver(model)
    seen = []
    for _ in range(2):
        driver.add_requests(prompts)
        completions = [c.completion_ids for c in driver.drive_until_empty().values()]
        assert model.training
        model.eval()
        assert completions == [greedy(model, prompt, NUM_NEW) for prompt in prompts]
        model.train()
        seen.append(completions)
        inputs = torch.tensor([prompts[-1]])
        model(input_ids=inputs, labels=inputs).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] != seen[1]


def test_the_generation_config_is_only_read(new_model, make_driver, prompts):
    """One without EOS stays without: upstream would write -1 into it."""
    given = GenerationConfig(max_new_tokens=3, temperature=0.3, do_sample=True)
    before = given.to_dict()
    driver = make_driver(new_model("qwen3"), given, max_new_tokens=None)
    driver.add_requests(prompts)
    assert {len(c) for c in driver.drive_until_empty().values()} == {3}
    assert given.to_dict() == before
    assert given.eos_token_id is None


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 64}], ids=["growing", "fixed"])
def test_drives_inside_and_outside_of_inference_mode(
    shared_model, make_driver, prompts, reference, family, settings
):
    expected = [reference(family, prompt, NUM_NEW) for prompt in prompts]
    with torch.inference_mode():
        driver = make_driver(shared_model(family), **settings)
        driver.add_requests(prompts)
        inside = [c.completion_ids for c in driver.drive_until_empty().values()]
        assert torch.is_inference_mode_enabled()
    driver.add_requests(prompts)
    outside = [c.completion_ids for c in driver.drive_until_empty().values()]
    assert inside == outside == expected


def test_the_callers_autocast_changes_nothing(shared_model, make_driver, prompts, reference):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        driver = make_driver(shared_model("qwen3"))
        driver.add_requests(prompts)
        completions = [c.completion_ids for c in driver.drive_until_empty().values()]
        assert torch.is_autocast_enabled("cpu")
    assert completions == [reference("qwen3", prompt, NUM_NEW) for prompt in prompts]


def test_a_cached_manager_of_upstream_is_left_alone(new_model, make_driver, prompts, reference):
    model = new_model("qwen3")
    model._cached_continuous_batching_manager = marker = object()
    driver = make_driver(model)
    driver.add_requests(prompts[:2])
    completions = [c.completion_ids for c in driver.drive_until_empty().values()]
    assert completions == [reference("qwen3", prompt, NUM_NEW) for prompt in prompts[:2]]
    assert model._cached_continuous_batching_manager is marker


def test_a_compile_config_on_the_model_is_not_taken_up(new_model, make_driver, prompts):
    """Upstream would compile the forward on seeing one."""
    from transformers import CompileConfig

    model = new_model("qwen3")
    model.config.compile_config = CompileConfig()
    driver = make_driver(model, num_blocks=64)
    processor = driver._slot._engine._processor
    assert processor.model_runner._compiled_varlen is None
    assert processor.model_runner._compiled_decode is None
    assert driver.resolved["compile_mode"] is None


@pytest.mark.parametrize("compile_mode", [None, "default"])
def test_close_frees_the_cache_at_once(shared_model, make_driver, prompts, compile_mode):
    """The trainer needs the memory now, and no collection comes by itself when memory is short on the device."""
    driver = make_driver(
        shared_model("qwen3"), compile_mode=compile_mode, num_blocks=64, max_requests_per_batch=2
    )
    driver.add_requests(prompts, max_new_tokens=NUM_NEW)
    driver.drive_until_empty()
    decoder = driver._slot._engine._decoder
    cache = [weakref.ref(layer.pages) for layer in decoder._buffers.layers]
    cache.append(weakref.ref(driver._slot._engine._cache.cache_tensor))
    del decoder
    gc.collect()
    gc.disable()
    try:
        driver.close()
        assert [reference() is None for reference in cache] == [True] * len(cache)
    finally:
        gc.enable()
