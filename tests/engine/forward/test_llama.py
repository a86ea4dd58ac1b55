"""Fused layers on the CPU: the same tokens, logits and cache as the model's own code, and models that cannot run so."""

from __future__ import annotations

import pytest
import torch

from cbexp.engine.decode.step import run_step
from cbexp.engine.forward import PlainForward, ops
from cbexp.engine.sampling import advance, choose, choose_from_hidden, compute_logits
from tests.engine.driving import drive
from tests.engine.forward.models import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    build,
    build_buffers,
    fused_forward,
)
from tests.engine.kernels.cases import EPS, randn, rotary_tables

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0}
ROPE = {"rope_theta": 10_000.0, "original_max_position_embeddings": 16}
SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = [
    # A key head for each query head.
    ("Llama", {"num_attention_heads": 2}),
    ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("Llama", {"rope_parameters": LLAMA3_ROPE | ROPE}),
    ("Llama", {"rope_parameters": LINEAR_ROPE | ROPE}),
    ("Qwen2", {}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "layer_types": SLIDING_AND_FULL}),
    ("Qwen3", {}),
    ("Qwen3", {"rope_parameters": YARN_ROPE | ROPE, "attention_bias": True}),
    ("Mistral", {"sliding_window": 12}),
    ("Mistral", {"sliding_window": None}),
]
# In float32, but for the order of sums.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    family, changes = request.param
    return build(family, **changes)


def assert_same_pages(buffers, others):
    for layer, other in zip(buffers.layers, others.layers, strict=True):
        torch.testing.assert_close(layer.pages, other.pages, **TOLERANCE, equal_nan=True)


# Decode


@torch.no_grad()
def test_decode_steps_equal_the_models_own_code(model):
    """Rows of one token that grow past every window; one of them ends early, one was never there."""
    num_rows, num_steps = 5, 30
    own_buffers, fused_buffers = (build_buffers(model, num_rows, num_steps) for _ in range(2))
    own = PlainForward(model, own_buffers.layers)
    fused = fused_forward(model, fused_buffers)
    for buffers in (own_buffers, fused_buffers):
        buffers.token_ids.copy_(torch.tensor([3, 96, 0, 41, 7]))
        buffers.positions.copy_(torch.tensor([0, 0, -1, 0, 0]))
        buffers.remaining.copy_(torch.tensor([99, 99, 99, 6, 99]))
    # The last row is beyond the batch.
    rows = slice(0, 4)
    for _ in range(num_steps):
        token_ids, positions = own_buffers.token_ids[rows], own_buffers.positions[rows]
        is_active = positions >= 0
        expected = own(token_ids, positions)
        logits = compute_logits(fused(fused_buffers.token_ids[rows], fused_buffers.positions[rows]))
        torch.testing.assert_close(logits[is_active], expected[is_active], **TOLERANCE)
        advance(own_buffers, *choose(expected))
        run_step(fused, fused_buffers.rows(4))
        best_logits = own_buffers.best_logits[rows][is_active]
        torch.testing.assert_close(fused_buffers.best_logits[rows][is_active], best_logits, **TOLERANCE)
        assert fused_buffers.token_ids.equal(own_buffers.token_ids)
    assert fused_buffers.outputs.equal(own_buffers.outputs)
    assert len(own_buffers.outputs.unique()) > 8, "a model that repeats itself tests nothing"
    assert (own_buffers.outputs[:, 3] >= 0).sum() == 6
    assert_same_pages(fused_buffers, own_buffers)


# Whole drives: prompts through transformers' batches, then bursts


def test_prompts_and_bursts_equal_generate(model, make_driver_anywhere, make_prompts, greedy):
    """Prompts of several batches, beyond every window, more than fit at once; the caller has the model after each."""
    prompts = make_prompts((1, 7, 16, 17, 40, 25))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    settings = {"max_batch_tokens": 24, "max_requests_per_batch": 4, "on_step": lambda index, info: None}
    driver = make_driver_anywhere(model, fusion="layers", **settings)
    assert drive(driver, prompts) == expected
    assert driver.resolved["fusion"] == "layers"
    assert {step.kind for step in driver.steps} >= {"prefill", "decode"}


def test_a_drive_asks_nothing_of_the_models_own_code(make_driver_anywhere, make_prompts, monkeypatch):
    model = build("Qwen3")
    driver = make_driver_anywhere(model, fusion="layers", num_blocks=20, self_check=False)
    monkeypatch.delattr(type(model.model.layers[0]), "forward")
    assert [len(tokens) for tokens in drive(driver, make_prompts((5, 9)))] == [12, 12]


# Tracing


@torch.no_grad()
def test_traced_as_one_graph_for_all_batch_sizes():
    model = build("Qwen3")
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    plain_buffers, compiled_buffers = (build_buffers(model, 6, 1) for _ in range(2))
    plain, traced = fused_forward(model, plain_buffers), fused_forward(model, compiled_buffers)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: choose(traced(*inputs)), fullgraph=True, backend=backend)
    for num_rows in (2, 3, 6):
        token_ids = torch.arange(num_rows) + 11
        positions = torch.arange(num_rows, dtype=torch.int32) % 2 - 1
        for tensor in (token_ids, positions):
            torch._dynamo.mark_dynamic(tensor, 0)
        expected = choose(plain(token_ids, positions))
        assert all(map(torch.equal, compiled(token_ids, positions), expected))
    assert len(graphs) == 1
    assert_same_pages(compiled_buffers, plain_buffers)
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("cbexp" in str(target) for target in targets) == 2 + 4 * NUM_LAYERS
    torch._dynamo.reset()


HIDDEN = 32
X, NORM, HEAD_NORM = randn(3, HIDDEN), torch.ones(HIDDEN), torch.ones(HEAD_DIM)
QKV = [randn(heads * HEAD_DIM, HIDDEN, seed=heads) for heads in (4, NUM_KV_HEADS, NUM_KV_HEADS)]
BIASES = [randn(len(weight)) for weight in QKV]
POSITIONS = torch.tensor([5, -1, 0], dtype=torch.int32)
ROTATED = (X, QKV, BIASES, POSITIONS, *rotary_tables(8, HEAD_DIM, torch.float32), HEAD_NORM, HEAD_NORM)
PAGES = (randn(9, 4, NUM_KV_HEADS, HEAD_DIM), torch.arange(6, dtype=torch.int32).view(3, 2) % 4 * 2)
OFFSET_AND_ARRIVALS = torch.tensor(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
OPERATORS = {
    "joint_linear": (randn(2, 5, HIDDEN), QKV, BIASES),
    "embed_norm": (torch.tensor([1, 5, 0]), randn(7, HIDDEN), NORM, EPS),
    "rotated_projection": (*ROTATED, EPS),
    "attend_new_token": (*ROTATED, EPS, *PAGES, *OFFSET_AND_ARRIVALS, 0.25, 0),
    "project_add_norm": (X, randn(HIDDEN, HIDDEN), NORM, X, NORM, EPS),
    "gated_projection": (X, randn(40, HIDDEN), randn(40, HIDDEN, seed=1)),
    "choose_from_hidden": (X.bfloat16(), randn(97, HIDDEN).bfloat16()),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_declare_what_they_do(name):
    """Shapes, mutations and aliases, as torch checks them."""
    operator = choose_from_hidden if name == "choose_from_hidden" else getattr(ops, name)
    torch.library.opcheck(operator, OPERATORS[name], test_utils=("test_schema", "test_faketensor"))
