"""Weights that the caller has replaced, moved away or shared with another process: none is kept, all are followed."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.driving import drive
from tests.engine.forward.models import build
from tests.engine.test_trainer_weights import FUSIONS, PLACES, PROMPTS, run_at


@pytest.mark.parametrize("compile_mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("place", PLACES)
def test_old_weights_are_free(place, fusion, compile_mode, make_driver_anywhere):
    alive = []

    def replace(model):
        old = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
        model.model.layers[0] = copy.deepcopy(model.model.layers[0])
        half = len(list(model.parameters())) // 2
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if half > 0:  # moved, as `to` does it
                    parameter.data = parameter.data.clone()
                else:
                    setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
                half -= 1
        del module, parameter
        if compile_mode != "eager":
            gc.collect()  # the compiler leaves cycles
        alive.append(sum(not reference.expired() for reference in old))

    make_driver = functools.partial(make_driver_anywhere, compile_mode=compile_mode)
    run_at(place, fusion, make_driver, replace)
    assert alive == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("compile_mode", ["eager", "cuda_graph"])
def test_moving_off_the_gpu_frees_it(fusion, compile_mode, make_driver, greedy):
    model = build("Qwen3").to("cuda", torch.bfloat16)
    num_bytes = sum(p.nbytes for p in model.parameters())
    settings = {"compile_mode": compile_mode, "num_blocks": 16, "self_check": False}
    with contextlib.closing(make_driver(model, fusion=fusion, **settings)) as driver:
        expected = drive(driver, PROMPTS)
        before = torch.cuda.memory_allocated()
        model.to("cpu")
        assert torch.cuda.memory_allocated() <= before - num_bytes
        model.to("cuda")
        assert drive(driver, PROMPTS) == expected


def negate_in_place(parameter, done):
    with torch.no_grad():
        parameter.neg_()
    torch.cuda.synchronize()
    del parameter
    done.set()


@pytest.mark.gpu
def test_another_process_updates_weights_in_place(make_driver):
    model = build("Qwen3").to("cuda", torch.bfloat16).requires_grad_(False)
    weight = model.model.layers[0].self_attn.k_proj.weight
    settings = {"fusion": "layers", "num_blocks": 16, "self_check": False}
    driver = make_driver(model, compile_mode="cuda_graph", **settings)
    first, before = drive(driver, PROMPTS), weight.clone()
    context = torch.multiprocessing.get_context("spawn")
    done = context.Event()
    process = context.Process(target=negate_in_place, args=(weight, done))
    process.start()
    process.join(300)
    assert done.is_set()
    assert torch.equal(weight, -before)
    followed = drive(driver, PROMPTS)
    assert followed != first
    assert followed == drive(make_driver(model, **settings), PROMPTS)
