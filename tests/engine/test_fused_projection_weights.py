"""Fused projections and the caller's weights: adapters, updates, re-assignments, storage, saving."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cbexp.engine.fused_weights import FusedWeights
from tests.engine.projection_cases import (
    NUM_GROUPS,
    SHAPE,
    TOLERANCE,
    build,
    layer,
    logits,
    num_bytes,
    with_lora,
)


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


def exchange_rows(model):
    gate, up = (getattr(layer(model).mlp, name).weight for name in ("gate_proj", "up_proj"))
    gate.data, up.data = up.data, gate.data


def change_dtype(model):
    model.to(torch.float64)


@pytest.mark.parametrize(
    ("change", "num_groups"),
    [
        (reassign_one, 1),
        (replace_parameter, 1),
        (replace_module, 1),
        (exchange_rows, 1),
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


def test_saving_while_fused_writes_the_right_files(fused, tmp_path):
    model = build("Qwen2")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fusion = fused(model)
    with fusion:
        model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
        save_file(model.state_dict(), tmp_path / "plain.safetensors")
        torch.save(model.state_dict(), tmp_path / "plain.pt")
        duplicate = copy.deepcopy(model.state_dict())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    sharded_files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(sharded_files) > 1
    from_shards = {name: t for file in sharded_files for name, t in load_file(file).items()}
    sources = (
        loaded.state_dict(),
        from_shards,
        load_file(tmp_path / "plain.safetensors"),
        duplicate,
        torch.load(tmp_path / "plain.pt"),
    )
    for state in sources:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert sum(f.stat().st_size for f in sharded_files) < 1.2 * num_bytes(model) + 10_000
    # A model that was read from disk is fused like any other.
    again = fused(loaded)
    again.install()
    assert again.describe()["num_fused"] == NUM_GROUPS
    torch.testing.assert_close(logits(loaded), logits(model), **TOLERANCE)


def test_an_adapter_saved_while_fused_is_the_adapter(fused, tmp_path):
    from peft import PeftModel

    model = with_lora(build())
    expected = logits(model)
    with fused(model):
        model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build(), tmp_path).eval()
    assert torch.equal(logits(loaded), expected)
