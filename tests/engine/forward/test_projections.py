"""Fused projections: the results of the model's own code with fewer products, hooks and adapters; what is skipped."""

from __future__ import annotations

import re
import weakref
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig
from torch import nn

from cbexp.engine.forward.projections import ProjectionFusion
from tests.engine.forward.models import NUM_LAYERS, SHAPE, build, count_products, layer, logits, with_lora

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 12},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "Gemma2": {"sliding_window": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16},
}
NUM_GROUPS = 2 * NUM_LAYERS


@contextmanager
def fused(model):
    fusion = ProjectionFusion(model)
    fusion.install()
    try:
        yield fusion
    finally:
        fusion.remove()


def check_fused(model, num_fused=NUM_GROUPS):
    """On a CPU, bit for bit: there, the separate products are what is computed. The reasons of what was skipped."""
    plain = logits(model)
    with fused(model) as fusion:
        assert torch.equal(logits(model), plain)
        facts = fusion.describe()
    assert facts["num_fused"] == num_fused
    assert facts["num_skipped"] == len(facts["skipped"])
    return facts["skipped"]


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_with_fewer_products_and_the_model_comes_back(family, lora):
    model = build(family, **FAMILIES[family])
    model = with_lora(model) if lora else model
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert check_fused(model) == {}
    num_single, _ = count_products(model)
    with fused(model):
        keys = list(model.state_dict())
        # q, k and v, gate and up: five products in two.
        assert count_products(model) == (num_single - 5 * NUM_LAYERS, NUM_GROUPS)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert list(model.state_dict()) == keys


def test_adapters_are_added_as_peft_adds_them():
    """Several at once, switched, scaled, merged, disabled, with a bias of their own."""
    model = with_lora(build("Qwen2"), targets=["q_proj", "v_proj"], lora_bias=True, lora_alpha=3)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj", "q_proj"], init_lora_weights=False))
    check_fused(model)
    outputs = [logits(model)]
    for adapters in ("second", ["default", "second"]):
        model.base_model.set_adapter(adapters)
        check_fused(model)
        outputs.append(logits(model))
    with model.disable_adapter():
        check_fused(model)
        outputs.append(logits(model))
    assert all(not torch.allclose(outputs[0], other) for other in outputs[1:])
    model.merge_adapter()
    check_fused(model)


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
        other_key, query = self.k_proj(2 * x), self.q_proj(x)
        self.last_query = weakref.ref(query)
        return torch.cat([value, other_key, query, self.k_proj(x)], dim=-1)


def test_any_order_and_any_input_is_right():
    attention = OddAttention()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), fused(attention):
        fused_output = attention(x)
        assert attention.last_query() is None, "a product outlives its block's forward"
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


def test_hooks_of_the_caller_still_run():
    model = build()
    projection = layer(model).self_attn.k_proj
    plain = logits(model)
    projection.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    projection.register_forward_hook(lambda _, args, output: output.mul_(3))
    assert not torch.allclose(logits(model), plain)
    check_fused(model)


def test_a_block_with_a_forward_of_its_own_gets_it_back():
    model = build()
    mlp = layer(model).mlp
    inner = mlp.forward
    own = mlp.forward = lambda x: -inner(x)
    check_fused(model)
    assert mlp.forward is own


def test_training_while_installed():
    """Each parameter gets its gradient, and what an optimizer writes is in the next product."""
    model, twin = build(), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    before = logits(model)
    with fused(model):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            ids = torch.arange(20)[None]
            m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            assert all(p.grad is not None for p in m.parameters())
            optimizer.step()
        assert not torch.allclose(logits(model), before)
        assert torch.equal(logits(model), logits(twin))


def test_autocast_is_the_models_own():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        check_fused(model)
        with fused(model):
            assert count_products(model)[1] == 0


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_traced_without_breaks_once_for_all_rounds(lora):
    model = with_lora(build("Qwen2")) if lora else build("Qwen2")
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
        for scale in (1.0, 0.5, 0.5):
            for parameter in model.parameters():
                parameter.mul_(scale)
            with fused(model):
                torch.testing.assert_close(compiled(ids), logits(model))
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("joint_linear" in target for target in targets) == NUM_GROUPS
    torch._dynamo.reset()


# What is left alone, by name


def quantised(model):
    class Quantised(nn.Linear):
        pass

    layer(model).mlp.up_proj.__class__ = Quantised


def subclassed_parameter(model):
    class QuantisedTensor(nn.Parameter):
        pass

    projection = layer(model).mlp.up_proj
    projection.weight = QuantisedTensor(projection.weight.detach())


def transposed(model):
    weight = layer(model).mlp.up_proj.weight
    weight.data = weight.detach().t().contiguous().t()


def one_bias(model):
    layer(model).mlp.up_proj.bias = nn.Parameter(torch.zeros(SHAPE["intermediate_size"]))


def own_forward(model):
    projection = layer(model).mlp.up_proj
    projection.forward = lambda x: 2 * nn.functional.linear(x, projection.weight)


def dora(model):
    with_lora(model, targets=["up_proj"], use_dora=True, layers_to_transform=[0], task_type="CAUSAL_LM")


REFUSALS = {
    quantised: "up_proj is a .*Quantised, not a plain torch.nn.Linear",
    subclassed_parameter: "up_proj.weight is a QuantisedTensor, not a plain parameter",
    transposed: r"up_proj.weight is laid out as \(48, 32\), not as a contiguous \(48, 32\)",
    one_bias: "only some of the projections have a bias",
    own_forward: "up_proj's forward was replaced by somebody else",
    dora: "up_proj has an adapter of another kind than plain LoRA: .*LinearVariant",
}


@pytest.mark.parametrize("spoil", REFUSALS)
def test_what_cannot_be_fused_is_left_alone_and_named(spoil):
    model = build()
    spoil(model)
    [(name, reason)] = check_fused(model, num_fused=NUM_GROUPS - 1).items()
    assert name == "model.layers.0.mlp.gate_proj+up_proj"
    assert re.search(REFUSALS[spoil], reason)


def another_dtype(model):
    layer(model).mlp.up_proj.to(torch.bfloat16)


def on_meta(model):
    layer(model).mlp.up_proj.to("meta")


def sharded(model):
    weight = layer(model).mlp.up_proj.weight
    weight.data = weight.data.new_empty(0)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (another_dtype, "differ in dtype: torch.bfloat16, torch.float32"),
        (on_meta, r"up_proj.weight holds no data \(device meta\)"),
        (sharded, r"up_proj.weight is laid out as \(0,\), not as a contiguous \(48, 32\)"),
    ],
)
def test_what_would_not_run_is_named(spoil, reason):
    model = build()
    spoil(model)
    with fused(model) as fusion:
        assert re.search(reason, fusion.describe()["skipped"]["model.layers.0.mlp.gate_proj+up_proj"])


def tied(model):
    layer(model).mlp.up_proj.weight = layer(model, 1).mlp.up_proj.weight


def tied_data(model):
    layer(model).mlp.up_proj.weight.data = layer(model).mlp.gate_proj.weight.data


def flat_buffer(model):
    weights = [layer(model).mlp.up_proj.weight, layer(model).mlp.down_proj.weight]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.data = part.view(weight.shape)


@pytest.mark.parametrize("share", [tied, tied_data, flat_buffer])
def test_parameters_may_lie_anywhere(share):
    model = build()
    share(model)
    assert check_fused(model) == {}


@pytest.mark.parametrize(
    ("family", "changes", "num_fused", "num_skipped"),
    [
        ("Phi3", {"pad_token_id": 0}, 0, NUM_GROUPS),
        ("Olmo2", {}, NUM_GROUPS, 0),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, NUM_LAYERS, 0),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            NUM_LAYERS,
            0,
        ),
    ],
)
def test_other_families_are_fused_as_far_as_they_can_be(family, changes, num_fused, num_skipped):
    skipped = check_fused(build(family, **changes), num_fused)
    assert list(skipped.values()) == ["is one product already"] * num_skipped
