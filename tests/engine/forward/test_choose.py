"""What runs fused, when compiled or captured code no longer fits the caller's weights, and that these stay put."""

from __future__ import annotations

import gc
import operator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cbexp.engine import EngineError
from cbexp.engine.decode.step import EagerSteps
from cbexp.engine.forward import ForwardChoice, PlainForward
from cbexp.engine.forward.choose import warn_of_hook
from cbexp.engine.forward.llama import LlamaForward
from cbexp.engine.forward.projections import ProjectionFusion
from cbexp.engine.sampling import compute_logits
from tests.engine.driving import drive
from tests.engine.forward.models import (
    MAX_POSITIONS,
    CountProducts,
    build,
    build_buffers,
    layer,
    places,
    with_lora,
)

FUSIONS = ["none", "projections", "layers"]
INPUTS = torch.tensor([3, 96]), torch.zeros(2, dtype=torch.int32)


@pytest.fixture
def model():
    return build("Llama").requires_grad_(False)


def choose_forward(model, fusion):
    return ForwardChoice(model, build_buffers(model, 2).layers, fusion, MAX_POSITIONS)


@pytest.fixture(params=FUSIONS)
def choice(request, model):
    choice = choose_forward(model, request.param)
    assert choice.begin()
    choice.end()
    yield choice
    choice.close()


def check_logits(choice):
    """By all forwards: the products that were fused are counted."""
    with CountProducts() as count:
        expected = choice.plain_logits(*INPUTS)
    assert count.joint == 0
    with CountProducts() as count:
        logits = compute_logits(choice.forward(*INPUTS))
    assert count.joint == (6 if choice.fusion == "projections" else 0)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    return logits


@torch.no_grad()
@pytest.mark.parametrize("fusion", FUSIONS)
def test_weights_stay_where_they_are_and_are_read_there(fusion):
    """Neither the objects move, nor their addresses, nor what their storages hold; what is compiled stays valid."""
    model = build("Qwen2")
    choice, before, keys = choose_forward(model, fusion), places(model), list(model.state_dict())
    assert choice.begin()
    forward, logits = choice.forward, check_logits(choice)
    assert isinstance(forward, LlamaForward if fusion == "layers" else PlainForward)
    assert places(model) == before
    assert list(model.state_dict()) == keys
    choice.end()
    assert places(model) == before
    for parameter in model.parameters():
        parameter.mul_(0.5)
    values = {name: p.clone() for name, p in model.named_parameters()}
    assert not choice.begin()
    assert choice.forward is forward
    assert not torch.allclose(check_logits(choice), logits)
    choice.close()
    choice.close()
    assert places(model) == before
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", ["layers.1.self_attn.q_proj.weight", "norm.weight", "rotary_emb.inv_freq"])
def test_a_reassigned_tensor_voids_compiled_code(choice, model, name):
    tensor = operator.attrgetter(name)(model.model)
    tensor.data = tensor.data.clone() + 1
    assert choice.begin()
    check_logits(choice)
    assert not choice.begin()


def test_another_activation_voids_compiled_code(model):
    choice = choose_forward(model, "projections")
    choice.begin()
    choice.end()
    layer(model, 1).mlp.act_fn = torch.nn.GELU()
    assert choice.begin()


@pytest.mark.parametrize("fusion", ["none", "projections"])
def test_hooks_forwards_and_adapters_void_compiled_code(fusion, model):
    """No guard of the compiler's sees a hook, a captured graph sees nothing, and an adapter's flag moves no parameter.

    Whole layers refuse all of them.
    """
    lora = with_lora(model, ["q_proj"])
    choice = choose_forward(model, fusion)
    assert choice.begin()
    handle = layer(model).register_forward_hook(lambda module, inputs, output: output)
    assert choice.begin()
    assert not choice.begin()
    handle.remove()
    assert choice.begin()
    model.lm_head.forward = model.lm_head.forward
    assert choice.begin()
    with lora.disable_adapter():
        assert choice.begin()
    assert choice.begin()
    assert not choice.begin()


def test_a_forward_at_the_address_of_another_voids_compiled_code(model):
    choice, mlp = choose_forward(model, "projections"), layer(model).mlp
    addresses = set()
    for factor in range(20):
        mlp.forward = lambda x, factor=factor: factor * x
        addresses.add(id(mlp.forward))
        choice.begin()
        choice.end()
        del mlp.forward
        mlp.forward = lambda x, factor=factor: -factor * x
        addresses.add(id(mlp.forward))
        assert choice.begin()
        choice.end()
        del mlp.forward
    assert len(addresses) < 20, "none was used again"


@torch.no_grad()
@pytest.mark.parametrize("fusion", FUSIONS)
def test_other_numbers_void_compiled_code(model, fusion):
    choice = choose_forward(model, fusion)
    for name in ("scaling", "variance_epsilon"):
        assert choice.begin()
        choice.end()
        for module in model.modules():
            if name in vars(module):
                setattr(module, name, 0.5)
    assert choice.begin()
    check_logits(choice)


@torch.no_grad()
def test_rotary_tables_follow_the_model(model):
    """They are ours, and stay where they are."""
    choice = choose_forward(model, "layers")
    choice.begin()
    forward, before = choice.forward, choice.forward._cos.clone()
    choice.end()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert not choice.begin()
    assert choice.forward is forward
    assert not torch.equal(forward._cos, before)
    choice.close()


@pytest.mark.parametrize("place", [(ForwardChoice, "_build_forward"), (ProjectionFusion, "install")])
def test_a_drive_after_a_failed_one_builds_again(model, monkeypatch, place):
    def fail(self):
        raise torch.OutOfMemoryError("no memory")

    choice = choose_forward(model, "projections")
    choice.begin()
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    with monkeypatch.context() as patched:
        patched.setattr(*place, fail)
        with pytest.raises(torch.OutOfMemoryError):
            choice.begin()
    assert choice.begin()
    assert not choice.begin()


def test_layers_that_no_longer_fit_are_refused_at_the_next_drive(model):
    choice = choose_forward(model, "layers")
    choice.begin()
    weight = layer(model).self_attn.o_proj.weight
    weight.data = weight.data.t()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"o_proj\.weight is not contiguous"):
            choice.begin()


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_closed_choice_keeps_no_page_of_the_cache(fusion, model):
    layers = build_buffers(model, 2).layers
    choice = ForwardChoice(model, layers, fusion, MAX_POSITIONS)
    choice.begin()
    pages = StorageWeakRef(layers[0].pages.untyped_storage())
    del layers
    choice.close()
    gc.collect()
    assert pages.expired()


def test_auto_fuses_nothing_on_a_cpu(model):
    assert choose_forward(model, "auto").describe() == {"fusion": "none"}


def test_a_hook_that_alone_prevents_fused_layers_is_named(model):
    """Adapters are expected, and other reasons are there with or without it."""
    warn_of_hook(model)
    handle = layer(model).mlp.register_forward_hook(print)
    with pytest.warns(
        UserWarning, match=r"projections alone, which is slower: model\.layers\.0\.mlp has a hook"
    ):
        warn_of_hook(model)
    handle.remove()
    layer(model).mlp.up_proj.forward = print
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.mlp\.up_proj has a hook or a replaced forward"):
        warn_of_hook(model)
    warn_of_hook(with_lora(model).base_model.model)


# Whole drives


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_the_models_own_attention_takes_transformers_steps(
    shared_model, make_driver, prompts, reference, family
):
    model = shared_model(family)
    own = model.config._attn_implementation
    driver = make_driver(model, attn_implementation=own, max_batch_tokens=24, num_blocks=60)
    expected = [reference(family, prompt, 12) for prompt in prompts for _ in range(2)]
    assert drive(driver, prompts, num_generations=2) == expected
    assert {(step.num_steps, step.bucket) for step in driver.steps} == {(1, None)}
    assert "mixed" in {step.kind for step in driver.steps}
    assert driver.resolved["attn_implementation"] == own
    assert driver.compile_stats == {}


def test_a_step_that_computes_something_else_ends_the_run(
    new_model, make_driver, prompts, greedy, monkeypatch
):
    """In warmup, and in a drive without one; with the check off, nobody notices."""
    original = EagerSteps.run

    def run_wrongly(runner, bucket, num_steps):
        original(runner, bucket, num_steps)
        if bucket == 2:
            runner._buffers.token_ids.add_(1)

    model, settings = new_model("qwen3"), {"fusion": "projections", "max_requests_per_batch": 2}
    monkeypatch.setattr(EagerSteps, "run", run_wrongly)
    driver = make_driver(model, num_blocks=64, **settings)
    with pytest.raises(EngineError, match="Self-check of compile mode eager, batch of 2 rows"):
        driver.warmup()
    driver.add_requests(prompts)
    with pytest.raises(EngineError, match="batch of 2 rows: the rows did not advance"):
        driver.drive_until_empty()
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    careless = make_driver(model, num_blocks=64, max_burst=1, self_check=False, **settings)
    assert [len(tokens) for tokens in drive(careless, prompts)] == [12] * 7
    monkeypatch.setattr(EagerSteps, "run", original)
    assert drive(driver, prompts) == expected
