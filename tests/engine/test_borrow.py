"""The caller's model: as it was after a drive, changed at will between drives, and for one thread at a time."""

import copy
import functools
import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy
import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from transformers import CompileConfig

from cbexp.engine import EngineError
from cbexp.engine.upstream import Batcher
from tests.engine.driving import cache_of, drive
from tests.engine.forward.models import build

# As it was


def snapshot(model):
    return {
        "modules": {name: (m.training, sorted(vars(m))) for name, m in model.named_modules()},
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "config": copy.deepcopy(vars(model.config)),
        "generation_config": model.generation_config.to_dict(),
        "weights": {name: (p.requires_grad, p.tolist()) for name, p in model.named_parameters()},
        "rng": (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "grad_and_inference": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


@pytest.mark.parametrize(
    ("family", "fusion", "ends_badly"),
    [("qwen3", "projections", False), ("qwen3", "projections", True), ("gemma2", "none", True)],
)
def test_everything_is_as_before(new_model, make_driver, prompts, family, ends_badly, fusion):
    model = new_model(family)
    model.train()
    model.model.layers[0].eval()  # a caller may keep parts out of training
    model.lm_head.weight.requires_grad_(False)
    seen = []

    def look_inside(index, info):
        seen.append(snapshot(model) == before)
        if ends_badly:
            raise ArithmeticError

    before = snapshot(model)
    driver = make_driver(model, num_blocks=64, fusion=fusion, on_step=look_inside)
    assert snapshot(model) == before
    driver.add_requests(prompts)
    with pytest.raises(ArithmeticError) if ends_badly else nullcontext():
        driver.drive_until_empty()
    assert snapshot(model) == before
    assert set(seen) == {True}
    driver.close()
    assert snapshot(model) == before


@pytest.mark.parametrize(("family", "settings"), [("qwen3", {}), ("gemma2", {"num_blocks": 64})])
def test_the_callers_own_modes_change_nothing(shared_model, check_drive, prompts, family, settings):
    """Inference mode, of which a cache outlives the drive."""
    shared_model(family)  # made outside
    with torch.inference_mode():
        driver = check_drive(family, prompts, **settings)
        assert torch.is_inference_mode_enabled()
    check_drive(family, prompts, driver=driver)


@pytest.mark.parametrize("compile_mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fusion", ["none", "projections", "layers"])
def test_a_model_made_in_inference_mode(fusion, compile_mode, make_driver_anywhere, prompts, greedy):
    with torch.inference_mode():
        model = build()
    before, expected = snapshot(model), [greedy(model, prompt, 12) for prompt in prompts[:2]]
    settings = {"fusion": fusion, "compile_mode": compile_mode, "num_blocks": 64, "buckets": (2,)}
    driver = make_driver_anywhere(model, **settings)
    for is_inference in (False, True, False):
        with torch.inference_mode(is_inference):
            assert drive(driver, prompts[:2]) == expected
    assert driver.compile_stats["recompiles"] == 0
    driver.close()
    assert snapshot(model) == before
    assert [greedy(model, prompt, 12) for prompt in prompts[:2]] == expected


@pytest.mark.parametrize("ends_badly", [False, True])
def test_on_step_has_the_callers_model(new_model, make_driver, prompts, references, ends_badly):
    """It trains, runs and changes it; the drive goes on with what it finds, and leaves it so."""
    model, expected = new_model("qwen3").train(), references("qwen3", prompts[:2])
    inputs, before = torch.tensor([prompts[-1]]), []

    def use(index, info):
        model(input_ids=inputs, labels=inputs).loss.backward()
        model.zero_grad()
        model.set_attn_implementation("eager")
        model.model.layers[1].eval()
        model.config.note = model.marker = index
        torch.set_grad_enabled(False)
        before.append(snapshot(model))
        torch.set_grad_enabled(True)
        if ends_badly:
            raise ArithmeticError

    driver = make_driver(model, fusion="projections", on_step=use)
    driver.add_requests(prompts[:2])
    with pytest.raises(ArithmeticError) if ends_badly else nullcontext():
        assert [c.completion_ids for c in driver.drive_until_empty().values()] == expected
    assert snapshot(model) == before[-1] | {"grad_and_inference": (True, False)}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_on_step_may_replace_weights(new_model, make_driver, prompts, greedy, family):
    """A forward that was compiled or fused for the old ones is not used again; a moved model is refused."""
    model, changes = new_model(family), []
    settings = {"fusion": "projections", "max_burst": 2, "num_blocks": 64}
    driver = make_driver(model, on_step=lambda index, info: changes and changes.pop()(), **settings)
    same = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changes.append(lambda: model.load_state_dict(same, assign=True))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    assert drive(driver, prompts) == expected
    changes.append(model.double)
    with pytest.raises(EngineError, match=r"on_step has left the model on cpu in torch\.float64"):
        drive(driver, prompts)
    model.float()
    assert drive(driver, prompts) == expected


def test_what_upstream_would_take_up_is_left_alone(new_model, make_driver, prompts, references):
    """A manager that it keeps on the model, and a compile config, on which it would compile the forward."""
    model = new_model("qwen3")
    model._cached_continuous_batching_manager = marker = object()
    model.config.compile_config = CompileConfig()
    driver = make_driver(model, num_blocks=64)
    assert drive(driver, prompts[:2]) == references("qwen3", prompts[:2])
    assert model._cached_continuous_batching_manager is marker
    model_runner = driver._engine.batcher._processor.model_runner
    assert (model_runner._compiled_varlen, model_runner._compiled_decode) == (None, None)


@pytest.mark.parametrize("compile_mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
def test_close_frees_the_cache_at_once(shared_model, make_driver, prompts, compile_mode, monkeypatch):
    """The trainer needs the memory now, and no collection comes by itself when memory is short on the device.

    Transformers' side is the last to close, and gives what is free by then back to the device.
    """
    settings = {"num_blocks": 64, "max_requests_per_batch": 2}
    driver = make_driver(shared_model("qwen3"), compile_mode=compile_mode, **settings)
    drive(driver, prompts)
    cache = [weakref.ref(layer.pages) for layer in driver._engine.decoder._buffers.layers]
    cache += [weakref.ref(cache_of(driver)), weakref.ref(cache_of(driver).cache_tensor)]
    left = []

    def close_batcher(batcher, original=Batcher.close):
        original(batcher)
        left.extend(reference() for reference in cache)

    monkeypatch.setattr(Batcher, "close", close_batcher)
    gc.collect()
    gc.disable()
    try:
        driver.close()
        assert left == [None] * len(cache)
    finally:
        gc.enable()


# Changed between drives


def test_training_goes_on_between_rounds(new_model, make_driver, prompts, greedy):
    """With block sharing, keys and values of the old weights must not serve the new ones."""
    model = new_model("qwen3").train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    driver = make_driver(model, allow_block_sharing=True, num_blocks=128)
    seen = []
    for _ in range(2):
        seen.append(drive(driver, prompts, num_generations=2))
        assert model.training
        assert model.is_activation_checkpointing
        model.eval()
        assert seen[-1] == [greedy(model, prompt, 12) for prompt in prompts for _ in range(2)]
        model.train()
        inputs = torch.tensor([prompts[-1]])
        model(input_ids=inputs, labels=inputs).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] != seen[1]


@pytest.mark.parametrize("num_blocks", [None, 60])
def test_another_dtype_between_rounds_gets_another_cache(new_model, make_driver, prompts, greedy, num_blocks):
    model = new_model("qwen3")
    driver = make_driver(model, num_blocks=num_blocks, fusion="projections")
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        assert drive(driver, prompts[:2]) == [greedy(model, prompt, 12) for prompt in prompts[:2]]


@pytest.mark.parametrize("compile_mode", ["eager", pytest.param("default", marks=pytest.mark.slow)])
def test_an_adapter_is_switched_trained_and_merged(
    new_model, make_driver, prompts, greedy, references, compile_mode
):
    """With blocks shared within a round: keys and values of one policy never serve another."""
    # PEFT's default initialisation is a no-op, hence random weights.
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(new_model("qwen3"), config).train()
    settings = {"fusion": "projections", "allow_block_sharing": True, "num_blocks": 80, "buckets": (4,)}
    driver = make_driver(model, compile_mode=compile_mode, **settings)
    assert driver.resolved["model_class"] == "Qwen3ForCausalLM"

    def check():
        tokens = drive(driver, prompts)
        assert model.training
        model.eval()
        assert tokens == [greedy(model, prompt, 12) for prompt in prompts]
        model.train()
        assert driver.compile_stats["recompiles"] == 0
        return tokens

    attached = check()
    with model.disable_adapter():
        assert check() == references("qwen3", prompts) != attached
    assert check() == attached
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.neg_()
    trained = check()
    assert trained != attached
    assert drive(make_driver(model.merge_and_unload()), prompts) == trained


HEAD = {"r": 4, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
TUNERS = {
    "tied head": [LoraConfig(**HEAD)],
    "tied embedding": [LoraConfig(**HEAD | {"target_modules": ["embed_tokens"]})],
    "tied head and a copy": [
        LoraConfig(**HEAD | {"target_modules": ["v_proj"]}, modules_to_save=["lm_head"])
    ],
    "DoRA": [LoraConfig(**HEAD, use_dora=True)],
    "LoHa": [LoHaConfig(r=4, target_modules=["q_proj", "up_proj"], init_weights=False)],
    "IA3": [IA3Config(target_modules=["v_proj", "up_proj"], feedforward_modules=["up_proj"])],
    "two adapters": [LoraConfig(**HEAD | {"target_modules": [name]}) for name in ("q_proj", "up_proj")],
}


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`:UserWarning")
def test_what_the_caller_has_merged_is_what_runs(new_model, make_driver, prompts, greedy, tuner):
    """PEFT merges into a tied weight for both of its owners; the engine runs what the model computes then."""
    model = new_model("qwen3", tie_word_embeddings=True)
    plain = [greedy(model, prompt, 12) for prompt in prompts[:3]]
    torch.manual_seed(0)
    first, *others = TUNERS[tuner]
    model = get_peft_model(model, first).eval()
    for index, config in enumerate(others):
        model.add_adapter(f"other {index}", config)
    model.base_model.set_adapter(list(model.peft_config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    driver = make_driver(model, fusion="projections")
    for change in (lambda: None, model.merge_adapter, model.unmerge_adapter):
        change()
        expected = [greedy(model, prompt, 12) for prompt in prompts[:3]]
        assert drive(driver, prompts[:3]) == expected != plain


def test_a_round_of_one_page_has_room_for_the_self_check(new_model, make_driver, prompts, references):
    driver = make_driver(new_model("qwen3"), fusion="projections", page_size=64)
    assert drive(driver, [prompts[0][:5]], max_new_tokens=3) == references("qwen3", [prompts[0][:5]], 3)
    assert driver.resolved["self_check_results"]


# For one thread at a time

REFUSED = "Qwen3ForCausalLM is in use by a driver in another thread"


def in_another_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def state(model):
    return (
        [module.training for module in model.modules()],
        model.config._attn_implementation,
        ["forward" in vars(module) for module in model.modules()],
        [parameter.data_ptr() for parameter in model.parameters()],
    )


def test_another_thread_is_refused_with_nothing_changed(new_model, make_driver, prompts, references):
    model, expected = new_model("qwen3").train(), references("qwen3", prompts)
    other, closed = (make_driver(model, num_blocks=64, fusion="projections") for _ in range(2))
    other.add_requests(prompts)
    uses = [other.drive_until_empty, other.warmup, lambda: other.time_decode_steps(1, 8, 4)]
    uses += [lambda: make_driver(model), closed.close]

    def interfere(index, info):
        inside = state(model)
        for use in uses if index == 0 else ():
            with pytest.raises(EngineError, match=REFUSED):
                in_another_thread(use)
            assert state(model) == inside

    driver = make_driver(model, fusion="projections", on_step=interfere)
    before = state(model)[:3]
    assert drive(driver, prompts) == expected
    assert state(model)[:3] == before
    closed.close()
    assert closed._engine is None
    # What the other one had queued was kept.
    assert [c.completion_ids for c in other.drive_until_empty().values()] == expected


def test_a_drive_inside_a_drive_of_the_same_thread(new_model, make_driver, prompts, references):
    """The outer one still has the model after it; once that has ended, even badly, another thread has its turn."""
    model, expected = new_model("qwen3"), references("qwen3", prompts)
    inner, seen = make_driver(model), []

    def nest(index, info):
        seen.append(drive(inner, prompts))
        inner.add_requests(prompts)
        with pytest.raises(EngineError, match=REFUSED):
            in_another_thread(inner.drive_until_empty)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        drive(make_driver(model, on_step=nest), prompts)
    assert seen == [expected]
    assert in_another_thread(drive, inner, prompts) == expected * 2
    assert drive(inner, prompts) == expected


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_model_with_the_same_config(make_driver, prompts, greedy, in_thread):
    """It runs with its own attention while the other is driven: in `on_step`, and in the middle of a forward."""
    model = build()
    other = type(model)(model.config)
    inputs = torch.tensor(prompts[:1])
    expected, seen = other(input_ids=inputs).logits, []
    run = functools.partial(in_another_thread, other, inputs) if in_thread else lambda: other(inputs)
    model.lm_head.register_forward_hook(lambda *_: seen.append(run().logits))
    own, tokens = model.config._attn_implementation, greedy(model, prompts[0], 12)
    driver = make_driver(model, on_step=lambda *_: seen.append(other(inputs).logits))
    assert drive(driver, prompts[:1]) == [tokens]
    assert all(torch.equal(logits, expected) for logits in seen)
    assert model.config is other.config
    assert model.config._attn_implementation == own
