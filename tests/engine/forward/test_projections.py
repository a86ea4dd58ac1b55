"""Fused projections: the results of the model's own code with fewer products, hooks and adapters; what is skipped."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
from peft import LoraConfig
from torch import nn

from tests.engine.forward.models import NUM_LAYERS, build, count_products, fused, layer, logits, with_lora
from tests.engine.kernels.cases import randn

EXPERTS = {"num_experts_per_tok": 2}
# With what each layer has: products that are computed as others, and these.
FAMILIES = [
    # q, k and v, gate and up: five products in two.
    ("Llama", {}, 5, 2),
    ("Qwen2", {}, 5, 2),
    ("SmolLM3", {"no_rope_layers": [1, 0, 1]}, 5, 2),
    ("Gemma2", {"sliding_window": 16, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16}, 5, 2),
    ("Olmo2", {}, 5, 2),
    ("GptOss", {"num_local_experts": 4} | EXPERTS, 3, 1),
    ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16} | EXPERTS, 3, 1),
    # One product already.
    ("Phi3", {"pad_token_id": 0}, 0, 0),
]
NUM_GROUPS = 2 * NUM_LAYERS


def check_fused(model, num_fused=NUM_GROUPS):
    """On a CPU, bit for bit: there, the separate products are what is computed. The reasons of what was skipped."""
    plain = logits(model)
    with fused(model) as fusion:
        assert torch.equal(logits(model), plain)
        facts = fusion.describe()
    assert facts["num_fused"] == num_fused
    assert facts["num_skipped"] == len(facts["skipped"])
    return facts["skipped"]


@pytest.mark.parametrize(("family", "changes", "num_fewer", "num_joint"), FAMILIES, ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_same_logits_with_fewer_products_and_the_model_comes_back(
    family, changes, num_fewer, num_joint, lora
):
    model = build(family, **changes)
    model = with_lora(model, ["q_proj", "v_proj", "qkv_proj"]) if lora else model
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    skipped = check_fused(model, num_joint * NUM_LAYERS)
    assert list(skipped.values()) == ["is one product already"] * (0 if num_joint else NUM_GROUPS)
    num_single, _ = count_products(model)
    with fused(model):
        keys = list(model.state_dict())
        assert count_products(model) == (num_single - num_fewer * NUM_LAYERS, num_joint * NUM_LAYERS)
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
    dora = with_lora(build(), targets=["up_proj"], use_dora=True)
    reason = "up_proj has an adapter of another kind than plain LoRA: DoraLinearVariant"
    assert list(check_fused(dora, NUM_LAYERS).values()) == [reason] * NUM_LAYERS


class OddAttention(nn.Module):
    """Calls its projections in another order, one twice, and one with an input of its own."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n) for n in (8, 4, 4))

    def forward(self, x, fails=False):
        value = self.v_proj(x)
        if fails:
            raise RuntimeError("in the middle")
        other_key, query = self.k_proj(2 * x), self.q_proj(x)
        self.last_query = weakref.ref(query)
        return torch.cat([value, other_key, query, self.k_proj(x)], dim=-1)


@torch.no_grad()
def test_any_order_and_any_input_is_right():
    """Also of an input that is written in place between calls, and after a forward that failed."""
    attention, x = OddAttention(), randn(3, 8)
    expected = [attention(factor * x) for factor in (1, -1, 2)]
    with fused(attention):
        outputs = [attention(x)]
        assert attention.last_query() is None, "a product outlives its block's forward"
        outputs.append(attention(x.neg_()))
        with pytest.raises(RuntimeError, match="in the middle"):
            attention(x, fails=True)
        key = attention.k_proj(x.mul_(-2))
        outputs.append(attention(x))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(key, attention.k_proj(x))


def test_hooks_and_forwards_of_the_caller_still_run():
    model = build()
    projection, mlp = layer(model).self_attn.k_proj, layer(model).mlp
    plain = logits(model)
    projection.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    projection.register_forward_hook(lambda _, args, output: output.mul_(3))
    inner = mlp.forward
    own = mlp.forward = lambda x: -inner(x)
    assert not torch.allclose(logits(model), plain)
    check_fused(model)
    assert mlp.forward is own


def test_gradients_flow_while_installed():
    model = build()
    with fused(model):
        model(input_ids=torch.arange(20)[None], use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast_is_the_models_own():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        check_fused(model)
        with fused(model):
            assert count_products(model)[1] == 0


def test_traced_without_breaks_once_for_all_rounds():
    model = with_lora(build("Qwen2", num_hidden_layers=1))
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
    assert sum("joint_linear" in target for target in targets) == 2
    torch._dynamo.reset()


# What is left alone, by name


class Quantised(nn.Linear):
    pass


class QuantisedTensor(nn.Parameter):
    pass


REFUSALS = [
    (lambda up: setattr(up, "__class__", Quantised), "up_proj is a .*Quantised, not a plain torch.nn.Linear"),
    (lambda up: setattr(up, "weight", QuantisedTensor(up.weight)), "up_proj.weight is a QuantisedTensor"),
    (lambda up: setattr(up.weight, "data", up.weight.new_empty(0)), r"as \(0,\), not as a contiguous"),
    (lambda up: setattr(up.weight, "data", up.weight.t().contiguous().t()), r"as \(48, 32\), not as"),
    (lambda up: setattr(up, "bias", nn.Parameter(torch.zeros(48))), "only some .* have a bias"),
    (lambda up: setattr(up, "forward", torch.neg), "up_proj's forward was replaced by somebody else"),
    (lambda up: up.to(torch.bfloat16), "differ in dtype: torch.bfloat16, torch.float32"),
    (lambda up: up.to("meta"), r"up_proj.weight holds no data \(device meta\)"),
]


@pytest.mark.parametrize(("spoil", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
def test_what_cannot_be_fused_is_left_alone_and_named(spoil, reason):
    model = build()
    spoil(layer(model).mlp.up_proj)
    with fused(model) as fusion:
        facts = fusion.describe()
    assert facts["num_fused"] == NUM_GROUPS - 1
    assert re.search(reason, facts["skipped"]["model.layers.0.mlp.gate_proj+up_proj"])


def test_parameters_may_lie_anywhere():
    """Tied to another's, or in one buffer with it."""
    model = build()
    mlps = [layer(model, index).mlp for index in range(NUM_LAYERS)]
    mlps[0].up_proj.weight = mlps[1].up_proj.weight
    both = torch.cat([mlps[2].gate_proj.weight.detach(), mlps[2].up_proj.weight.detach()])
    mlps[2].gate_proj.weight.data, mlps[2].up_proj.weight.data = both.chunk(2)
    assert check_fused(model) == {}
