"""Fused projections change no token and no parameter: forwards, hooks, tracing, drivers that share a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cbexp.engine.row_stack import stack
from tests.engine.projection_cases import (
    FAMILIES,
    NUM_GROUPS,
    SHAPE,
    TOLERANCE,
    assert_same_parameters,
    build,
    count_products,
    generate,
    layer,
    logits,
    num_storages,
    snapshot,
    with_lora,
)


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


class OddAttention(nn.Module):
    """Calls its projections in another order, one twice, and one with an input of its own."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n) for n in (8, 4, 4))
        self.fails = False

    def forward(self, x):
        value = self.v_proj(x)
        if self.fails:
            raise RuntimeError("in the middle")
        return torch.cat([value, self.k_proj(2 * x), self.q_proj(x), self.k_proj(x)], dim=-1)


def test_any_order_and_any_input_is_right(fused):
    attention = OddAttention()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), fused(attention):
        fused_output = attention(x)
        x.neg_()
        negated = attention(x)
        attention.k_proj(x)
        x.mul_(3)
        single = attention.k_proj(x)
        x.div_(3)
        attention.fails = True
        with pytest.raises(RuntimeError, match="in the middle"):
            attention(x)
        attention.fails = False
        x.mul_(2)
        after_failure = attention(x)
    torch.testing.assert_close(fused_output, attention(-x / 2))
    torch.testing.assert_close(negated, attention(x / 2))
    torch.testing.assert_close(single, attention.k_proj(1.5 * x))
    torch.testing.assert_close(after_failure, attention(x))


def test_hooks_of_the_caller_still_run(fused):
    model = build()
    projection = layer(model).self_attn.k_proj
    projection.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    projection.register_forward_hook(lambda _, args, output: output.mul_(3))
    plain = logits(model)
    with fused(model):
        torch.testing.assert_close(logits(model), plain, **TOLERANCE)


def test_two_drivers_may_share_a_model(fused):
    model = build()
    first, second = fused(model), fused(model)
    first.install()
    first.remove()
    assert not second.install().has_moved
    assert second.describe()["num_fused"] == NUM_GROUPS
    plain = logits(model)
    second.remove()
    second.close()
    assert first.install().has_moved
    torch.testing.assert_close(logits(model), plain, **TOLERANCE)


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_traced_without_breaks_once_for_all_rounds(lora, fused):
    model = with_lora(build("Qwen2")) if lora else build("Qwen2")
    plain = logits(model)
    fusion = fused(model)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, backend=backend
    )
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for scale in (1.0, 0.5, 1.0):
            for parameter in model.parameters():
                parameter.mul_(scale)
            with fusion:
                torch.testing.assert_close(compiled(ids), logits(model), **TOLERANCE)
        layer(model).self_attn.q_proj.to(torch.float64).to(torch.float32)
        with fusion:
            assert fusion.describe()["num_fused_again"] == 1
            torch.testing.assert_close(compiled(ids), logits(model), **TOLERANCE)
    assert len(graphs) == 1
    fused_rows = SHAPE["hidden_size"] * 2
    shapes = [tuple(n.meta["example_value"].shape) for n in graphs[0].graph.nodes if n.op == "placeholder"]
    assert shapes.count((fused_rows, SHAPE["hidden_size"])) == SHAPE["num_hidden_layers"]
    assert not torch.allclose(plain, logits(model))


def test_one_layer_traced_serves_all_layers(fused):
    model = build("Qwen3")
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    mlp = torch.compile(lambda layer, hidden: layer.mlp(hidden), fullgraph=True, backend=backend)
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), fused(model):
        for block in model.model.layers:
            torch.testing.assert_close(mlp(block, hidden), block.mlp(hidden))
    assert len(graphs) == 1


def test_an_error_while_fusing_leaves_the_model_whole(fused, monkeypatch):
    from cbexp.engine import fused_weights

    model = build()
    before, outputs, storages = snapshot(model), logits(model), num_storages(model)
    calls = []

    def fail_at_fourth(parameters):
        calls.append(parameters)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no room")
        stack(parameters)

    monkeypatch.setattr(fused_weights, "stack", fail_at_fourth)
    fusion = fused(model)
    with pytest.raises(torch.OutOfMemoryError):
        fusion.install()
    assert torch.equal(logits(model), outputs)
    assert_same_parameters(model, before)
    fusion.close()
    assert num_storages(model) == storages
    fusion.install()
    torch.testing.assert_close(logits(model), outputs, **TOLERANCE)
