"""On a CUDA device: rows that have ended cost a decode step next to nothing."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cbexp.engine.attention import ATTENTION_NAME
from cbexp.engine.buffers import PagePool, allocate_buffers
from cbexp.engine.forward import ForwardChoice
from tests.engine.graph_capture import capture

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NUM_ROWS, CONTEXT = 256, 2000
PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 256, 8, 128
STEPS_EACH, NUM_TIMES = 20, 5


@pytest.fixture(scope="module")
def buffers():
    """Every row has pages of its own for `CONTEXT` tokens, 2 GB in all."""
    width, pages_per_block = -(-CONTEXT // PAGE_SIZE), 2
    shape = ((1 + NUM_ROWS * width) * pages_per_block, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pages = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
    pools = {"full_attention": PagePool((0,), pages, pages_per_block, 0, width, 0)}
    sizes = {"max_rows": NUM_ROWS, "max_burst": 1, "eos_token_ids": ()}
    made = allocate_buffers(pools, **sizes, device=torch.device(DEVICE))
    blocks = 1 + torch.randperm(NUM_ROWS * width, generator=torch.Generator().manual_seed(0))
    made.block_tables["full_attention"].copy_((blocks * pages_per_block).view(NUM_ROWS, width))
    return made


@pytest.fixture(scope="module")
def forward(buffers):
    """One fused layer with the heads of Qwen3-4B, and all else so small that a step is mostly attention."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
    sizes = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    model = Qwen3ForCausalLM._from_config(Qwen3Config(**heads, **sizes, max_position_embeddings=2 * CONTEXT))
    model.config._attn_implementation = ATTENTION_NAME
    model.to(DEVICE, torch.bfloat16).eval().requires_grad_(False)
    choice = ForwardChoice(model, buffers.layers, "layers", 2 * CONTEXT)
    with torch.no_grad():
        choice.begin()
    yield choice.forward
    choice.end()
    choice.close()


def time_step(graph):
    """Milliseconds of a step, the least of some replays."""
    times = []
    for _ in range(1 + NUM_TIMES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / STEPS_EACH)
    return min(times[1:])


@torch.no_grad()
@pytest.mark.parametrize("is_spread", [True, False], ids=["spread", "in front"])
def test_attention_reads_for_active_rows_alone(forward, buffers, is_spread):
    """16 of 256 rows go on: a sixteenth is read, by a sixteenth of the programs, which cannot fill the device."""
    buffers.token_ids.copy_(torch.arange(NUM_ROWS))
    graph = capture(lambda: forward(buffers.token_ids, buffers.positions), STEPS_EACH)

    buffers.positions.fill_(0)
    without_past = time_step(graph)
    buffers.positions.fill_(CONTEXT - 1)
    all_active = time_step(graph) - without_past
    buffers.positions.fill_(-1)
    buffers.positions[:: NUM_ROWS // 16 if is_spread else 1][:16] = CONTEXT - 1
    assert int((buffers.positions >= 0).sum()) == 16
    few_active = time_step(graph) - without_past

    assert all_active > without_past, "a step is to be mostly attention here"
    assert few_active < all_active / 3
