"""On a CUDA device: the same tokens as `generate` in fp32, and complete rounds in bf16."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

NUM_NEW = 12


@pytest.fixture(autouse=True)
def _exact_fp32():
    """TF32 would round the two sides differently."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 11}, {"num_blocks": 24}], ids=str)
def test_fp32_equals_generate(new_model, make_driver, prompts, greedy, family, settings):
    model = new_model(family).cuda()
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
    driver = make_driver(model, **settings)
    for num_generations in (1, 3):
        driver.add_requests(prompts, num_generations=num_generations)
        completions = list(driver.drive_until_empty().values())
        assert [c.completion_ids for c in completions] == [
            e for e in expected for _ in range(num_generations)
        ]
        assert not driver._slot._engine.read_trash.any()


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graph": True},
        {"compile_mode": "default", "cuda_graph": True, "compile_region": "layer"},
        {"compile_mode": "reduce-overhead"},
        {"cuda_graph": True, "fusion": "projections"},
        {"cuda_graph": True, "batch_shape": "full", "allow_block_sharing": True},
    ],
    ids=str,
)
def test_graphs_say_the_same(new_model, make_driver, prompts, greedy, settings):
    """Warmed up or not, with forks copied just before a burst, admission between bursts, and eviction."""
    model = new_model("qwen3").cuda()
    for num_blocks, is_warm in ((64, True), (24, False)):
        driver = make_driver(model, max_requests_per_batch=6, num_blocks=num_blocks, **settings)
        if is_warm:
            driver.warmup()
        for num_generations in (1, 3):
            expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts for _ in range(num_generations)]
            driver.add_requests(prompts, num_generations=num_generations)
            assert [c.completion_ids for c in driver.drive_until_empty().values()] == expected
            assert not driver._slot._engine.read_trash.any()
        assert driver.compile_stats["graphs"] > 0 or settings.get("compile_mode") == "reduce-overhead"
        assert 0 <= driver.compile_stats["device_idle_share"] < 1
        driver.close()


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
