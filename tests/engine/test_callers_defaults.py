"""What torch has for the whole process, and a caller may have set: defaults of new tensors, states of generators."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cbexp.engine.roofline import measure_read_bandwidth
from cbexp.engine.types import COMPILE_MODES
from tests.engine.driving import drive

slow, gpu = pytest.mark.slow, pytest.mark.gpu


@contextmanager
def defaults(device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"fusion": "projections", "num_blocks": 80}),
        ("gemma2", {"max_batch_tokens": 24}),
        ("gemma3", {"attn_implementation": "sdpa", "max_batch_tokens": 24}),
        ("gpt_oss", {"fusion": "projections"}),
        ("qwen3_moe", {}),
        pytest.param("qwen3", {"compile_mode": "default", "buckets": (4,)}, marks=slow),
    ],
)
@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float64), ("cpu", torch.bfloat16)])
def test_other_defaults_of_new_tensors_change_nothing(
    shared_model, make_driver, prompts, references, family, settings, device, dtype
):
    """Not even those that `on_step` sees."""
    seen = []

    def on_step(index, info):
        seen.append(torch.zeros(1))

    expected = references(family, prompts)
    with defaults(device, dtype):
        driver = make_driver(shared_model(family), on_step=on_step, **settings)
        driver.warmup()
        assert drive(driver, prompts) == expected
        if "num_blocks" in settings:
            driver.time_decode_steps(batch=2, context=9, num_steps=2, num_bursts=1)
            assert drive(driver, prompts) == expected
    assert {(tensor.device.type, tensor.dtype) for tensor in seen} == {(device, dtype)}
    assert driver.compile_stats.get("recompiles", 0) == 0


@gpu
@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("mode", ["cuda_graph", "reduce_overhead"])
def test_other_defaults_change_nothing_on_a_gpu(
    new_model, make_driver, prompts, greedy, exact_fp32, device, mode
):
    """Host memory is pinned there, and copied from while steps run."""
    model = new_model("qwen3", head_dim=16).cuda()
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    with defaults(device, torch.float64):
        driver = make_driver(model, compile_mode=mode, fusion="projections", num_blocks=80, buckets=(4,))
        driver.warmup()
        assert drive(driver, prompts) == expected
        driver.time_decode_steps(batch=4, context=9, num_steps=2, num_bursts=1)


def generator_states():
    on_gpu = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None
    return torch.get_rng_state().tolist(), on_gpu, random.getstate(), str(np.random.get_state())


def mode_marks(name):
    mode = COMPILE_MODES[name]
    return [gpu] if mode.graphs else [slow] if mode.torch_mode else []


@pytest.mark.parametrize("mode", [pytest.param(name, marks=mode_marks(name)) for name in COMPILE_MODES])
def test_nothing_draws_from_the_callers_generators_nor_reseeds_them(new_model, make_driver, prompts, mode):
    model = new_model("qwen3", num_hidden_layers=1, head_dim=16)
    model = model.to("cuda" if COMPILE_MODES[mode].graphs else "cpu")
    before = generator_states()
    driver = make_driver(model, compile_mode=mode, fusion="projections", num_blocks=64, buckets=(4,))
    assert generator_states() == before
    driver.warmup()
    assert driver.resolved["self_check_results"]
    assert generator_states() == before
    drive(driver, prompts, num_generations=2)
    assert generator_states() == before
    driver.time_decode_steps(batch=4, context=9, num_steps=2, num_bursts=1)
    driver.close()
    assert generator_states() == before


@gpu
def test_measuring_the_bandwidth_draws_from_no_generator_of_the_callers():
    torch.cuda.init()
    before = generator_states()
    measure_read_bandwidth(torch.device("cuda"), seconds=0.01)
    assert generator_states() == before
