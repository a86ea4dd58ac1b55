"""What a driver tries at its construction: a model that computes something else on a paged cache is refused."""

import copy
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, GPT2Config

from cbexp.engine import CBSyncConfig, SyncCBDriver, UnsupportedModelError
from cbexp.engine.attention.reference import paged_decode_reference
from tests.engine.driving import drive
from tests.engine.models import SHAPE, generate_greedily


class ScaledKeys:
    """A cache, or none, whose reader doubles the keys that it gets."""

    def __init__(self, cache):
        self._cache = cache

    def update(self, key, value, layer_index, kwargs):
        if self._cache is not None:
            key, value = self._cache.update(key, value, layer_index, kwargs=kwargs)
        return 2 * key, value


def build_scaling(new_model):
    model = new_model("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, args, kwargs: (args, kwargs | {"cache": ScaledKeys(kwargs["cache"])}),
            with_kwargs=True,
        )
    return model


def build_diffllama(_new_model, dtype=torch.float32):
    """Its values are put in another order behind the cache."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.eval().to(dtype)


@pytest.mark.parametrize(("build", "own"), [(build_scaling, "eager"), (build_diffllama, "sdpa")])
def test_keys_or_values_that_a_model_changes_behind_the_cache(make_driver, new_model, prompts, build, own):
    """Decode steps read what was stored. Transformers' own steps hand all of it to the model, which changes it."""
    model = build(new_model)
    message = (
        rf"cannot be driven: on a paged cache its logits differ by [\d.]+ .* rounding makes 0\.001 at most\. "
        rf"Use attn_implementation='{own}', which the model was loaded with\.$"
    )
    with pytest.raises(UnsupportedModelError, match=message):
        make_driver(model)
    expected = [generate_greedily(model, prompt, 12) for prompt in prompts]
    assert drive(make_driver(model, attn_implementation=own), prompts) == expected


def forget_later_slots(num_slots):
    """Paged attention that reads no more slots than that."""

    def attend(query, key, value, pages, block_table, positions, *others):
        right = paged_decode_reference(query, key, value, pages, block_table, positions, *others)
        near = positions.clamp(max=num_slots - 1)
        near_only = paged_decode_reference(query, key, value, pages.clone(), block_table, near, *others)
        return torch.where((positions < num_slots)[:, None, None], right, near_only)

    return attend


def read_the_first_block_alone(query, key, value, pages, block_table, *others):
    paged_decode_reference(query, key, value, pages, block_table, *others)  # which writes, too
    first = block_table[:, :1].expand_as(block_table)
    return paged_decode_reference(query, key, value, pages.clone(), first, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("attend", [forget_later_slots(64), read_the_first_block_alone])
def test_paged_attention_that_forgets(make_driver, new_model, monkeypatch, attend, page_size, dtype):
    """Steps and their self-check share it."""
    model = new_model("qwen3", max_position_embeddings=512).to(dtype)
    make_driver(model, page_size=page_size)
    monkeypatch.setattr("cbexp.engine.attention.attention.paged_decode_attention", attend)
    with pytest.raises(UnsupportedModelError, match="on a paged cache its logits differ"):
        make_driver(model, page_size=page_size)


def test_half_precision_refuses_what_is_wrong_and_takes_what_rounds(make_driver, new_model):
    with pytest.raises(UnsupportedModelError, match=r"rounding makes 0\.25 at most"):
        make_driver(build_diffllama(new_model, torch.bfloat16))
    # Of so many layers and experts, rounding alone makes other logits.
    deep = new_model("gpt_oss", num_hidden_layers=24, layer_types=None).bfloat16()
    make_driver(deep)


def test_logits_that_are_all_equal_differ_by_rounding_alone(make_driver, new_model):
    model = new_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    make_driver(model)


def test_logits_that_are_not_finite_are_refused_when_the_cache_makes_them(make_driver, new_model):
    """The model's own are its own affair, which the self-check names."""
    model = new_model("qwen3")

    def spoil(_module, _args, kwargs, output):
        return (output[0] * torch.nan, *output[1:]) if kwargs["cache"] is not None else output

    hook = model.model.layers[1].self_attn.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="its logits are not finite"):
        make_driver(model)
    hook.remove()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    make_driver(model)


def test_a_model_whose_own_forward_fails(make_driver, new_model):
    model = new_model("qwen3")

    def fail(_module, _args, kwargs):
        if kwargs["cache"] is None:
            raise KeyError("cache\nis None")

    model.model.layers[0].self_attn.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(
        UnsupportedModelError, match=r"own forward fails without a cache \(KeyError: [^\n]*\)\.$"
    ):
        make_driver(model)


@pytest.mark.parametrize("attention", ["cbexp", "sdpa"])
@pytest.mark.parametrize("num_positions", [1, 2, 3, 8])
def test_few_positions_and_a_tiny_vocabulary(make_driver, num_positions, attention):
    sizes = {"vocab_size": 5, "n_positions": num_positions, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    driver = make_driver(model, attn_implementation=attention)
    if num_positions > 1:
        prompts, limit = [[4], [1]], num_positions - 1
        expected = [generate_greedily(model, prompt, limit) for prompt in prompts]
        assert drive(driver, prompts, max_new_tokens=limit) == expected


def test_construction_leaves_no_trace(new_model, make_driver):
    model = new_model("gemma2").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before, seen = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    make_driver(model)
    assert torch.equal(torch.get_rng_state(), seen)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config._attn_implementation == "eager"


def test_an_interrupt_leaves_no_hook(new_model, make_driver, monkeypatch):
    def register(module, *args, original=torch.nn.Module.register_forward_hook, **options):
        handle = original(module, *args, **options)
        signal.raise_signal(signal.SIGINT)
        return handle

    model = new_model("qwen3")
    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", register)
    with pytest.raises(KeyboardInterrupt):
        make_driver(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_driver_is_made_inside_of_a_drive(new_model, prompts, references):
    model, tokens = new_model("qwen3"), []

    def drive_another(index, info):
        if index == 2:
            with SyncCBDriver(model, config=CBSyncConfig(max_new_tokens=12, page_size=8)) as other:
                tokens.extend(drive(other, prompts))

    config = CBSyncConfig(max_new_tokens=12, page_size=8, max_burst=1, on_step=drive_another)
    with SyncCBDriver(model, config=config) as driver:
        assert drive(driver, prompts) == tokens == references("qwen3", prompts)
