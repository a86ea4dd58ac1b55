"""On a GPU: fused projections keep tokens, memory and captured graphs right."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cbexp.engine.fused_projections import ProjectionFusion

pytestmark = pytest.mark.gpu
HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 1024, 4096, 6
MIB = 2**20


def build(dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        eos_token_id=None,
        pad_token_id=None,
        attention_bias=True,
    )
    return LlamaForCausalLM(config).to("cuda", dtype).eval().requires_grad_(False)


@pytest.fixture
def fusion():
    fusions = []

    def make(model):
        fusions.append(ProjectionFusion(model))
        return fusions[-1]

    yield make
    for made in fusions:
        made.close()


def requested_bytes():
    """What tensors hold; `memory_allocated` counts the blocks that they lie in."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def run_mlps(model, hidden):
    for layer in model.model.layers:
        hidden = hidden + layer.mlp(hidden)
    return hidden


def random_hidden(dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(8, HIDDEN_SIZE, device="cuda", dtype=dtype, generator=generator)


def generate(model):
    ids = torch.arange(24, device="cuda").view(2, 12)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=0,
    ).tolist()


def test_same_tokens_in_fp32(fusion):
    model = build(torch.float32)
    tokens = generate(model)
    with fusion(model):
        assert generate(model) == tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_it_was(dtype, fusion):
    """Against fp32, the fused half-precision forward is no further off than the unfused one, but for noise."""
    ids = torch.arange(24, device="cuda").view(2, 12)
    with torch.no_grad():
        exact = build(torch.float32)(input_ids=ids, use_cache=False).logits
        model = build(dtype)
        plain_error = (model(input_ids=ids, use_cache=False).logits - exact).abs().mean()
        with fusion(model):
            fused_error = (model(input_ids=ids, use_cache=False).logits - exact).abs().mean()
    assert fused_error <= 1.25 * plain_error


def test_fusing_and_taking_apart_hold_one_group_twice_at_most(fusion):
    model = build(torch.bfloat16)
    largest_group = 2 * HIDDEN_SIZE * INTERMEDIATE_SIZE * 2
    fused = fusion(model)
    for work in (fused.install, fused.close):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        requested = requested_bytes()
        work()
        # The allocator rounds large tensors up to 2 MiB each.
        assert torch.cuda.max_memory_allocated() <= allocated + largest_group + 8 * MIB
        assert abs(requested_bytes() - requested) <= MIB
        # What it keeps are segments of 20 MiB, one more or less by what ran before.
        assert torch.cuda.memory_reserved() <= reserved + largest_group + 60 * MIB


def test_a_captured_graph_follows_weights_written_in_place(fusion):
    model, hidden = build(torch.float32), random_hidden(torch.float32)
    fused = fusion(model)
    fused.install()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run_mlps(model, hidden)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run_mlps(model, hidden)
        fused.remove()
        for factor in (1.0, 0.5):
            for parameter in model.parameters():
                parameter.mul_(factor)
            graph.replay()
            torch.testing.assert_close(output, run_mlps(model, hidden), rtol=1e-4, atol=1e-4)
    assert not fused.install().has_moved


def test_cudagraph_trees_read_the_weights_where_they_are(fusion):
    model, hidden = build(torch.float32), random_hidden(torch.float32)
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    fused = fusion(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda h: run_mlps(model, h), mode="reduce-overhead", fullgraph=True)
    gate = model.model.layers[0].mlp.gate_proj.weight
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    with torch.no_grad(), torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        for change in (lambda: None, lambda: gate.mul_(2), lambda: setattr(gate, "data", gate.detach() * 2)):
            change()
            expected = run_mlps(model, hidden)
            with fused:
                for _ in range(3):
                    torch.compiler.cudagraph_mark_step_begin()
                    torch.testing.assert_close(compiled(hidden), expected, rtol=1e-3, atol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # Were the weights copied into the graphs' pool, it would hold them all once more.
    assert torch.cuda.memory_allocated() - allocated < weight_bytes / 4
    torch._dynamo.reset()
