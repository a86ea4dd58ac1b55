"""On a CUDA device: the same tokens as `generate` in fp32, and complete rounds in bf16."""

from __future__ import annotations

import functools
import math
import time

import pytest
import torch
from cbexp.engine.cuda_graphs import GraphReplay
from cbexp.engine.device_idle import DeviceIdle
from cbexp.engine.paged_engine import PagedEngine

from cbexp.engine.settings import GRAPH_TREE_MODES
from tests.engine.driving import drive

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


# In fp32 nothing is fused unless it is asked for.
WAYS = {
    "eager": {},
    "captured": {"cuda_graph": True},
    "compiled": {"compile_mode": "default"},
    "compiled, fused layers": {"compile_mode": "default", "fusion": "layers"},
    "tuned": {"compile_mode": "max-autotune-no-cudagraphs"},
    "tuned trees": {"compile_mode": "max-autotune"},
    "captured, compiled": {"compile_mode": "default", "cuda_graph": True},
    "captured, compiled, fused layers": {"compile_mode": "default", "cuda_graph": True, "fusion": "layers"},
    "captured, layers compiled": {
        "compile_mode": "default",
        "cuda_graph": True,
        "compile_region": "layer",
    },
    "trees": {"compile_mode": "reduce-overhead"},
    "trees, fused layers": {"compile_mode": "reduce-overhead", "fusion": "layers"},
    "captured, fused projections": {"cuda_graph": True, "fusion": "projections"},
    "captured, fused layers": {"cuda_graph": True, "fusion": "layers"},
    "captured, always full": {"cuda_graph": True, "batch_shape": "full"},
    "captured, natural": {"cuda_graph": True, "batch_shape": "natural", "buckets": None},
    "trees, natural": {"compile_mode": "reduce-overhead", "batch_shape": "natural", "buckets": None},
}


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_every_way_says_the_same(on_gpu, make_driver, prompts, settings):
    """With chunks, early ends, shared blocks, evictions, and forks copied just before a burst."""
    _, full = on_gpu("qwen3")
    eos = full[5][4]
    model, expected = on_gpu("qwen3", (eos,))
    common = {"max_batch_tokens": 24, "num_blocks": 20, "buckets": (2, 4, 6), "max_requests_per_batch": 6}
    driver = make_driver(model, eos_token_id=eos, allow_block_sharing=True, **(common | settings))
    check_rounds(driver, prompts, expected)
    assert driver.resolved["fusion"] == settings.get("fusion", "none")
    assert driver.resolved["self_check"] == (settings != {})
    stats = driver.compile_stats
    mode = settings.get("compile_mode")
    has_graphs = settings.get("cuda_graph", False) or mode in GRAPH_TREE_MODES
    assert (stats["graphs"] > 0) == (stats["replays"] > 0) == has_graphs
    assert (stats["programs"] > 0) == (mode is not None)
    assert (stats["recompiles"], stats["graph_breaks"], stats["skipped_cudagraphs"]) == (0, 0, 0)
    idle_share = stats["device_idle_share"]
    assert 0 < idle_share < 1 if has_graphs else idle_share is None


class CountingIdle(DeviceIdle):
    """Counts its pieces of work, and tells the milliseconds behind the share."""

    def __init__(self):
        super().__init__()
        self.num_pieces = 0

    def add(self, start, end):
        self.num_pieces += 1
        super().add(start, end)

    @property
    def span_ms(self):
        """Busy and idle."""
        assert self.share is not None
        return self._busy_ms + self._idle_ms

    @property
    def idle_ms(self):
        return self.share * self.span_ms


def test_the_device_waits_for_a_slow_host_between_bursts_and_batches(
    on_gpu, make_driver, prompts, monkeypatch
):
    model, expected = on_gpu("qwen3")
    driver = make_driver(
        model, cuda_graph=True, num_blocks=64, max_requests_per_batch=4, max_batch_tokens=24, max_burst=4
    )
    check_rounds(driver, prompts, expected)  # compiles and captures

    def measure():
        """One more drive: what was measured, and the host's milliseconds."""
        idle = driver._slot._engine._decoder._bursts.idle = CountingIdle()
        driver.add_requests(prompts)
        start_s = time.perf_counter()
        driver.drive_until_empty()
        wall_ms = 1000 * (time.perf_counter() - start_s)
        assert idle.num_pieces == len(driver.steps)
        assert {step.kind for step in driver.steps} == {"prefill", "decode"}
        assert 0 < idle.idle_ms < idle.span_ms <= 1.01 * wall_ms + 1
        assert driver.compile_stats["device_idle_share"] == idle.share
        return idle

    quick = measure()
    delay_ms, step = 50, PagedEngine.step

    def step_late(engine, model):
        time.sleep(delay_ms / 1000)
        return step(engine, model)

    monkeypatch.setattr(PagedEngine, "step", step_late)
    slow = measure()
    # Between any two pieces, whichever kind each is of.
    assert slow.idle_ms > 0.9 * delay_ms * (len(driver.steps) - 1)
    assert slow.share > quick.share


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


NAN_WAYS = {
    "plain": {"fusion": "none"},
    "fused layers": {"fusion": "layers"},
    "fused layers, always full": {"fusion": "layers", "batch_shape": "full"},
    "natural": {"fusion": "none", "batch_shape": "natural"},
}


@pytest.mark.parametrize("settings", NAN_WAYS.values(), ids=NAN_WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_nan_in_one_request_stays_there(new_model, make_driver, greedy, family, dtype, settings):
    """The poisoned rows decode beside the others, and pages of theirs are used again afterwards.

    What others get is to be what they got in the same batches before: bit for bit, since no row reads another's.
    """
    model = new_model(family, head_dim=16).to("cuda", dtype)
    clean = [[1, 2, 3, 4, 5], [8] * 12, [11, 12]]
    # A self-check of rows that hold the poisoned token would end the drive.
    driver = make_driver(
        model,
        cuda_graph=True,
        max_new_tokens=20,
        num_blocks=24,
        max_requests_per_batch=6,
        self_check=False,
        **settings,
    )

    def drive_beside(token, order):
        """Of the clean prompts, then of two others that hold `token`; submitted in `order`, which gives out pages."""
        prompts = [*clean, [6, token, 7], [9, 10, token]]
        completions = drive(driver, [prompts[index] for index in order])
        assert [len(tokens) for tokens in completions] == [20] * 5
        assert not driver._slot._engine.read_trash.any()
        by_prompt = [completions[order.index(index)] for index in range(5)]
        return by_prompt[:3], by_prompt[3:]

    alone = drive(driver, clean)
    expected, _ = drive_beside(0, (0, 1, 2, 3, 4))
    if dtype == torch.float32:
        assert alone == expected == [greedy(model, prompt, 20) for prompt in clean]
    used = {token for tokens in [*clean, *alone, *expected] for token in tokens}
    poison = next(token for token in range(13, 97) if token not in used)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = math.nan
    for order in ((0, 3, 1, 4, 2), (3, 0, 4, 1, 2), (2, 0, 1, 3, 4)):
        others, poisoned = drive_beside(poison, order)
        assert others == expected
        assert all(0 <= token < 97 for tokens in poisoned for token in tokens)
    assert drive(driver, clean) == alone
    assert driver.compile_stats["replays"] > 0


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
