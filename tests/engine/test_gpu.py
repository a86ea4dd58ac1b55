"""On a CUDA device: the same tokens as `generate` in fp32, and complete rounds in bf16."""

from __future__ import annotations

import functools

import pytest
import torch

from cbexp.engine.cuda_graphs import GraphReplay

pytestmark = pytest.mark.gpu

NUM_NEW = 12


@pytest.fixture(autouse=True)
def _exact_fp32():
    """TF32 would round the two sides differently."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture(scope="module")
def on_gpu(new_model, prompts, greedy):
    """(family, eos ids) -> a model for all tests that leave it as it is, and the tokens of `generate`."""
    models = functools.cache(lambda family: new_model(family, head_dim=16).cuda())

    @functools.cache
    def build(family, eos=()):
        model = models(family)
        return model, [greedy(model, prompt, NUM_NEW, eos) for prompt in prompts]

    return build


def check_rounds(driver, prompts, expected):
    for num_generations in (1, 3):
        driver.add_requests(prompts, num_generations=num_generations)
        completions = list(driver.drive_until_empty().values())
        assert [c.completion_ids for c in completions] == [
            e for e in expected for _ in range(num_generations)
        ]
        assert not driver._slot._engine.read_trash.any()
        assert driver._slot._engine.num_referenced_blocks == 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("settings", [{"max_batch_tokens": 11}, {"num_blocks": 24}], ids=str)
def test_fp32_equals_generate(on_gpu, make_driver, prompts, family, settings):
    model, expected = on_gpu(family)
    check_rounds(make_driver(model, **settings), prompts, expected)


WAYS = {
    "eager": {},
    "captured": {"cuda_graph": True},
    "captured, layers compiled": {
        "compile_mode": "default",
        "cuda_graph": True,
        "compile_region": "layer",
    },
    "trees": {"compile_mode": "reduce-overhead"},
    "captured, fused projections": {"cuda_graph": True, "fusion": "projections"},
    "captured, fused layers": {"cuda_graph": True, "fusion": "layers"},
    "captured, always full": {"cuda_graph": True, "batch_shape": "full"},
}


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_every_way_says_the_same(on_gpu, make_driver, prompts, settings):
    """With chunks, early ends, shared blocks, evictions, and forks copied just before a burst."""
    _, full = on_gpu("qwen3")
    eos = full[5][4]
    model, expected = on_gpu("qwen3", (eos,))
    driver = make_driver(
        model,
        eos_token_id=eos,
        max_batch_tokens=24,
        num_blocks=20,
        buckets=(2, 4, 6),
        allow_block_sharing=True,
        **settings,
    )
    check_rounds(driver, prompts, expected)
    stats = driver.compile_stats
    has_graphs = settings.get("cuda_graph", False) or settings.get("compile_mode") == "reduce-overhead"
    assert (stats["graphs"] > 0) == (stats["replays"] > 0) == has_graphs
    assert (stats["recompiles"], stats["graph_breaks"], stats["skipped_cudagraphs"]) == (0, 0, 0)
    assert (stats["device_idle_share"] is not None) == has_graphs
    assert 0 <= (stats["device_idle_share"] or 0) < 1


def test_a_warm_driver_captures_nothing_more(on_gpu, make_driver, prompts):
    model, expected = on_gpu("qwen3")
    driver = make_driver(model, cuda_graph=True, num_blocks=64, max_requests_per_batch=6)
    driver.warmup()
    num_graphs = driver.compile_stats["graphs"]
    assert num_graphs == 4
    check_rounds(driver, prompts, expected)
    assert driver.compile_stats["graphs"] == num_graphs


def test_a_burst_broken_off_leaves_graphs_and_cache_usable(on_gpu, make_driver, prompts, monkeypatch):
    model, expected = on_gpu("qwen3")
    driver = make_driver(model, cuda_graph=True, num_blocks=64, max_requests_per_batch=6)
    original = GraphReplay.run

    def break_off(runner, bucket, num_steps):
        original(runner, bucket, num_steps // 2)
        raise ArithmeticError

    driver.warmup()
    monkeypatch.setattr(GraphReplay, "run", break_off)
    driver.add_requests(prompts)
    with pytest.raises(ArithmeticError):
        driver.drive_until_empty()
    monkeypatch.setattr(GraphReplay, "run", original)
    check_rounds(driver, prompts, expected)


def test_a_weight_update_on_the_callers_stream_is_seen(new_model, make_driver, prompts, greedy):
    """The engine works on a stream of its own, and must wait for what the trainer has just queued on another."""
    model = new_model("qwen3").cuda()
    driver = make_driver(model, num_blocks=64)
    weight = model.lm_head.weight
    for _ in range(3):
        with torch.no_grad():
            delay = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                delay = delay @ delay / 4096
            weight.copy_(weight.flip(0) + 0 * delay[0, 0].nan_to_num())
        driver.add_requests(prompts)
        completions = [c.completion_ids for c in driver.drive_until_empty().values()]
        assert completions == [greedy(model, prompt, NUM_NEW) for prompt in prompts]


def test_bf16_rounds_are_complete(new_model, make_driver, make_prompts):
    model = new_model("qwen3").to("cuda", torch.bfloat16)
    prompts = make_prompts(range(1, 65))
    driver = make_driver(model, num_blocks=400, allow_block_sharing=True)
    for _ in range(2):
        request_ids = driver.add_requests(prompts, num_generations=4, max_new_tokens=50)
        completions = driver.drive_until_empty()
        assert list(completions) == request_ids
        assert {len(c) for c in completions.values()} == {50}
        assert {c.finish_reason for c in completions.values()} == {"length"}
    assert driver.resolved["dtype"] == "bfloat16"


def test_close_gives_the_memory_back(new_model, make_driver, prompts):
    model = new_model("qwen3").cuda()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    driver = make_driver(model, num_blocks=200_000, max_batch_tokens=64)
    assert torch.cuda.memory_allocated() - before > 2**28
    driver.add_requests(prompts)
    driver.drive_until_empty()
    driver.close()
    # cuBLAS keeps its workspaces.
    assert torch.cuda.memory_allocated() - before < 2**27
