"""Fused projections change no token and no parameter: forwards, adapters, weight updates, storage, saving, tracing."""

from __future__ import annotations

import copy
import re

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
from cbexp.engine.row_stack import stack

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
# Not bit for bit: a wider matrix product sums in another order. Measured: 3e-6 at most, of logits up to 7.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-5}


def build(family="Llama", **changes):
    """A random model with weights (and biases, where it has some) large enough to change its tokens."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES.get(family, {}) | changes))
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
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


def quantised(model):
    class Quantised(nn.Linear):
        pass

    layer(model).mlp.up_proj.__class__ = Quantised


def subclassed_parameter(model):
    class QuantisedTensor(nn.Parameter):
        pass

    projection = layer(model).mlp.up_proj
    projection.weight = QuantisedTensor(projection.weight.detach())


def another_dtype(model):
    layer(model).mlp.up_proj.to(torch.bfloat16)


def on_meta(model):
    layer(model).mlp.up_proj.to("meta")


def tied(model):
    layer(model).mlp.up_proj.weight = layer(model, 1).mlp.up_proj.weight


def tied_data(model):
    layer(model).mlp.up_proj.weight.data = layer(model).mlp.gate_proj.weight.data


def flat_buffer(model):
    weights = [layer(model).mlp.up_proj.weight, layer(model).mlp.down_proj.weight]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.data = part.view(weight.shape)


def sharded(model):
    weight = layer(model).mlp.up_proj.weight
    weight.data = weight.data.new_empty(0)


def transposed(model):
    weight = layer(model).mlp.up_proj.weight
    weight.data = weight.detach().t().contiguous().t()


def one_bias(model):
    layer(model).mlp.up_proj.bias = nn.Parameter(torch.zeros(SHAPE["intermediate_size"]))


REFUSALS = {
    quantised: "up_proj is a .*Quantised, not a plain torch.nn.Linear",
    subclassed_parameter: "up_proj.weight is a QuantisedTensor, not a plain parameter",
    another_dtype: "differ in dtype: torch.bfloat16, torch.float32",
    on_meta: "up_proj.weight holds no data",
    tied: "up_proj.weight is shared with another parameter",
    tied_data: "_proj.weight is shared with another parameter",
    flat_buffer: "up_proj.weight is a view into a larger storage",
    sharded: r"up_proj.weight is laid out as \(0,\), not as a contiguous \(48, 32\)",
    transposed: r"up_proj.weight is laid out as \(48, 32\), not as a contiguous \(48, 32\)",
    one_bias: "only some of the projections have a bias",
}


@pytest.mark.parametrize("spoil", REFUSALS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_cannot_be_fused_is_left_alone_and_named(spoil, when, fused):
    model = build()
    fusion = fused(model)
    if when == "after":
        fusion.install()
        fusion.remove()
    spoil(model)
    pointers = {name: p.data_ptr() for name, p in layer(model).mlp.named_parameters()}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    fusion.install()
    skipped = fusion.describe()["skipped"]
    # Tying spoils the group at the other end of the tie too.
    assert set(skipped) == {
        f"model.layers.{i}.mlp.gate_proj+up_proj" for i in ((0, 1) if spoil is tied else (0,))
    }
    assert re.search(REFUSALS[spoil], skipped["model.layers.0.mlp.gate_proj+up_proj"])
    assert fusion.describe()["num_fused"] == NUM_GROUPS - len(skipped)
    if when == "before":
        assert {name: p.data_ptr() for name, p in layer(model).mlp.named_parameters()} == pointers
    # The rest of a group that came apart does not keep the whole alive.
    gate = layer(model).mlp.gate_proj.weight
    assert gate.untyped_storage().nbytes() == gate.numel() * gate.element_size()
    assert fusion.weights.is_current()
    fusion.close()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            assert torch.equal(parameter, values[name]), name


@pytest.mark.parametrize("change", [{"use_dora": True}, {"alora_invocation_tokens": [1, 2]}])
def test_other_adapters_leave_their_projections_unfused(change, fused):
    model = with_lora(build(), targets=["v_proj"], **change, task_type="CAUSAL_LM")
    with torch.no_grad():
        plain = logits(model.base_model.model)
    fusion = fused(model)
    fusion.install()
    assert fusion.describe()["num_fused"] == NUM_GROUPS // 2
    assert all("LinearVariant" in reason for reason in fusion.describe()["skipped"].values())
    torch.testing.assert_close(logits(model.base_model.model), plain, **TOLERANCE)


def test_a_projection_with_a_forward_of_its_own_is_left_alone(fused):
    model = build()
    projection = layer(model).self_attn.k_proj
    own = projection.forward = lambda x: 2 * nn.functional.linear(x, projection.weight)
    plain = logits(model)
    fusion = fused(model)
    fusion.install()
    assert fusion.describe()["num_fused"] == NUM_GROUPS - 1
    assert (
        "replaced by somebody else"
        in fusion.describe()["skipped"]["model.layers.0.self_attn.q_proj+k_proj+v_proj"]
    )
    torch.testing.assert_close(logits(model), plain, **TOLERANCE)
    fusion.remove()
    assert projection.forward is own


def test_a_block_with_a_forward_of_its_own_gets_it_back(fused):
    model = build()
    mlp = layer(model).mlp
    inner = mlp.forward
    own = mlp.forward = lambda x: -inner(x)
    plain = logits(model)
    fusion = fused(model)
    fusion.install()
    torch.testing.assert_close(logits(model), plain, **TOLERANCE)
    fusion.remove()
    assert mlp.forward is own
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize(
    ("family", "changes", "num_fused", "num_skipped"),
    [
        ("Phi3", {"pad_token_id": 0}, 0, NUM_GROUPS),
        ("Olmo2", {}, NUM_GROUPS, 0),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, NUM_GROUPS // 2, 0),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            NUM_GROUPS // 2,
            0,
        ),
    ],
)
def test_other_families_are_fused_as_far_as_they_can_be(family, changes, num_fused, num_skipped, fused):
    model = build(family, **changes)
    plain = logits(model)
    fusion = fused(model)
    fusion.install()
    assert fusion.describe()["num_fused"] == num_fused
    assert fusion.describe()["num_skipped"] == num_skipped
    assert set(fusion.describe()["skipped"].values()) <= {"is one product already"}
    torch.testing.assert_close(logits(model), plain, **TOLERANCE)


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
