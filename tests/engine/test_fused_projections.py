"""Fused projections change no token and no parameter: forwards, adapters, weight updates, storage, saving, tracing."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cbexp.engine.fused_projections import ProjectionFusion
from cbexp.engine.fused_weights import FusedWeights

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 12},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "Gemma2": {"sliding_window": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
}
NUM_GROUPS = 2 * SHAPE["num_hidden_layers"]
MEMBERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
# Sums inside the matrix product are ordered otherwise; measured at most 6e-6 of logits near 10.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


def build(family="Llama", **changes):
    """A random model with weights (and biases, where it has some) large enough to change its tokens."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES.get(family, {}) | changes))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def with_lora(model, targets=("q_proj", "v_proj", "up_proj"), **changes):
    """Random adapters: PEFT's own initialisation adds nothing; dropout must be the identity in eval mode."""
    torch.manual_seed(2)
    config = LoraConfig(
        r=4, lora_dropout=0.5, target_modules=list(targets), **{"init_lora_weights": False, **changes}
    )
    return get_peft_model(model, config).eval()


@torch.no_grad()
def logits(model, seed=0):
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, use_cache=False).logits


def generate(model):
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0
    ).tolist()


def layer(model, index=0):
    return next(m for name, m in model.named_modules() if name.endswith(f"layers.{index}"))


def num_bytes(model):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def num_storages(model):
    return len({p.untyped_storage().data_ptr() for p in model.parameters()})


def snapshot(model):
    return {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}


def assert_same_parameters(model, before):
    now = dict(model.named_parameters())
    assert list(now) == list(before)
    for name, (identity, value) in before.items():
        assert id(now[name]) == identity
        assert torch.equal(now[name], value), name


class CountProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.num_products += name in ("mm", "addmm", "linear")
        return function(*args, **(kwargs or {}))


def count_products(model):
    with CountProducts() as count:
        logits(model)
    return count.num_products


@pytest.fixture
def fused(request):
    fusions = []

    def make(model, cls=ProjectionFusion):
        fusions.append(cls(model))
        return fusions[-1]

    yield make
    for fusion in fusions:
        fusion.close()


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_tokens_with_fewer_products(family, lora, fused):
    model = with_lora(build(family)) if lora else build(family)
    before, tokens, products = logits(model), generate(model), count_products(model)
    fusion = fused(model)
    fusion.install()
    assert fusion.describe() == {
        "num_fused": NUM_GROUPS,
        "num_fused_again": 0,
        "num_skipped": 0,
        "skipped": {},
    }
    torch.testing.assert_close(logits(model), before, **TOLERANCE)
    assert generate(model) == tokens
    # Per layer two products fewer for q/k/v and one for gate/up.
    assert count_products(model) == products - 3 * SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_comes_back_as_it_was(family, fused):
    model = with_lora(build(family))
    before, keys, outputs, storages = (
        snapshot(model),
        list(model.state_dict()),
        logits(model),
        num_storages(model),
    )
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    fusion = fused(model)
    with fusion:
        assert list(model.state_dict()) == keys
        assert_same_parameters(model, before)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert num_storages(model) < storages
    assert torch.equal(logits(model), outputs)
    fusion.close()
    fusion.close()
    assert_same_parameters(model, before)
    assert num_storages(model) == storages
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in model.parameters())
    assert torch.equal(logits(model), outputs)


def test_adapters_are_added_as_peft_adds_them(fused):
    """Several at once, switched, scaled, merged, disabled, with a bias of their own."""
    model = with_lora(build("Qwen2"), targets=["q_proj", "v_proj"], lora_bias=True, lora_alpha=3)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj", "q_proj"], init_lora_weights=False))
    fusion = fused(model)

    def check():
        fusion.remove()
        fusion.weights.close()
        plain = logits(model)
        fusion.install()
        torch.testing.assert_close(logits(model), plain, **TOLERANCE)
        return plain

    first = check()
    model.set_adapter("second")
    second = check()
    model.base_model.set_adapter(["default", "second"])
    both = check()
    with model.disable_adapter():
        disabled = check()
    model.merge_adapter()
    merged = check()
    model.unmerge_adapter()
    assert not torch.allclose(first, second)
    assert not torch.allclose(both, first)
    assert not torch.allclose(disabled, both)
    torch.testing.assert_close(merged, both, rtol=1e-3, atol=1e-3)
    model.merge_adapter(safe_merge=True)  # re-assigns the weights that it merges into
    torch.testing.assert_close(check(), both, rtol=1e-3, atol=1e-3)


def test_an_adapter_may_come_and_go_between_drives(fused):
    model = build()
    fusion = fused(model)
    fusion.install()
    fusion.remove()
    adapted = with_lora(model)
    plain = logits(adapted)
    assert not fusion.install().has_moved
    torch.testing.assert_close(logits(adapted), plain, **TOLERANCE)


def test_an_optimizer_step_while_fused_reaches_the_product(fused):
    model, twin = build(), build()
    fusion = fused(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    before = logits(model)
    fusion.install()
    for _ in range(2):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            # Installed during the backward pass too: each parameter must get its gradient.
            ids = torch.arange(20)[None]
            m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            assert all(p.grad is not None for p in m.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert not fusion.install().has_moved
    assert not torch.allclose(logits(model), before)
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-3, atol=1e-3)


def test_weights_loaded_in_place_reach_the_product(fused):
    model, other = build(), build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    fusion = fused(model)
    fusion.install()
    model.load_state_dict(other.state_dict())
    assert fusion.weights.is_current()
    torch.testing.assert_close(logits(model), logits(other), **TOLERANCE)


def reassign_one(model):
    weight = layer(model).self_attn.k_proj.weight
    weight.data = weight.detach() * 2


def replace_parameter(model):
    projection = layer(model).self_attn.k_proj
    projection.weight = nn.Parameter(projection.weight.detach() * 2)


def replace_module(model):
    attention = layer(model).self_attn
    attention.k_proj = copy.deepcopy(attention.k_proj)


def load_by_assignment(model):
    model.load_state_dict({name: -t for name, t in model.state_dict().items()}, assign=True)


def change_dtype(model):
    model.to(torch.float64)


@pytest.mark.parametrize(
    ("change", "num_groups"),
    [
        (reassign_one, 1),
        (replace_parameter, 1),
        (replace_module, 1),
        (load_by_assignment, NUM_GROUPS),
        (change_dtype, NUM_GROUPS),
    ],
)
def test_reassigned_weights_are_fused_again(change, num_groups, fused):
    model, twin = build(), build()
    fusion = fused(model)
    fusion.install()
    fusion.remove()
    assert fusion.weights.is_current()
    change(model)
    change(twin)
    assert not fusion.weights.is_current()
    report = fusion.install()
    assert report.has_moved
    assert report.num_fused + report.num_fused_again == num_groups
    assert fusion.weights.is_current()
    torch.testing.assert_close(logits(model), logits(twin), **TOLERANCE)
    assert num_bytes(model) == num_bytes(twin)
    assert not fusion.install().has_moved


def test_a_backup_that_the_caller_swapped_out_stays_as_it_is(fused):
    """Averaged weights are often swapped in for a round and the trained ones back afterwards."""
    model = build()
    fusion = fused(model)
    fusion.install()
    trained = {p: p.data for p in model.parameters()}
    values = {p: p.detach().clone() for p in model.parameters()}
    for parameter in trained:
        parameter.data = parameter.detach() / 2
    assert fusion.install().num_fused_again == NUM_GROUPS
    assert all(torch.equal(trained[p], values[p]) for p in trained)
    for parameter, data in trained.items():
        parameter.data = data
    fusion.install()
    assert fusion.describe()["num_fused"] == NUM_GROUPS
    torch.testing.assert_close(logits(model), logits(build()), **TOLERANCE)


class PeakBytes(TorchDispatchMode):
    """The most that the storages of `model` and of everything made since hold together."""

    def __init__(self, model):
        super().__init__()
        self.storages = {}
        self.peak = 0
        self.add(model.parameters())

    def add(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.storages[StorageWeakRef(storage)] = storage.nbytes()
        live = (size for storage, size in self.storages.items() if not storage.expired())
        self.peak = max(self.peak, sum(live))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.add(t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def test_one_copy_of_the_weights(fused):
    """While fusing and while taking apart, no more than one group is held twice."""
    model = build("Qwen2")
    total, largest_group = num_bytes(model), 2 * SHAPE["hidden_size"] * SHAPE["intermediate_size"] * 4
    weights = fused(model, FusedWeights)
    for work in (weights.refresh, weights.close):
        with PeakBytes(model) as meter:
            work()
        assert num_bytes(model) == total
        assert total < meter.peak <= total + largest_group


def test_fused_weights_hold_on_to_nothing(fused):
    """A model that moves away between drives frees its memory."""
    model = build()
    fusion = fused(model)
    fusion.install()
    fusion.remove()
    old = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    model.to(torch.bfloat16)
    assert all(storage.expired() for storage in old)
