"""On a CUDA device: fused projections keep tokens and graph trees right, and hold no memory."""

from __future__ import annotations

import pytest
import torch

from tests.engine.forward.models import build, fused, places
from tests.engine.kernels.cases import randn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_fp32")]

SHAPE = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "attention_bias": True}


def build_model(dtype):
    return build("Llama", weight_std=0.03, **SHAPE).requires_grad_(False).to("cuda", dtype)


def run_mlps(model, hidden):
    for layer in model.model.layers:
        hidden = hidden + layer.mlp(hidden)
    return hidden


def test_same_tokens_in_fp32_and_no_memory_taken():
    model, ids = build_model(torch.float32), torch.arange(24, device="cuda").view(2, 12)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
    tokens = model.generate(**asked)
    before, allocated = places(model), torch.cuda.memory_allocated()
    with fused(model):
        assert places(model) == before
        assert torch.cuda.memory_allocated() == allocated
        assert model.generate(**asked).equal(tokens)


@torch.no_grad()
def test_cudagraph_trees_read_the_weights_where_they_are():
    model = build_model(torch.bfloat16)
    hidden = randn(8, SHAPE["hidden_size"], dtype=torch.bfloat16, device="cuda")
    weight_bytes = sum(p.nbytes for p in model.parameters())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda h: run_mlps(model, h), mode="reduce-overhead", fullgraph=True)
    gate = model.model.layers[0].mlp.gate_proj.weight
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    with torch._inductor.config.patch({"triton.cudagraph_or_error": True}):
        for change in (lambda: None, lambda: gate.mul_(2), lambda: setattr(gate, "data", gate.detach() * 2)):
            change()
            expected = run_mlps(model, hidden)
            # Without norms between them the layers make large numbers, and small ones of their differences.
            tolerance = 0.05 * float(expected.abs().max())
            with fused(model):
                for _ in range(3):
                    torch.compiler.cudagraph_mark_step_begin()
                    torch.testing.assert_close(compiled(hidden), expected, rtol=0, atol=tolerance)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # Were the weights copied into the graphs' pool, it would hold them all once more.
    assert torch.cuda.memory_allocated() - allocated < weight_bytes / 4
    torch._dynamo.reset()
