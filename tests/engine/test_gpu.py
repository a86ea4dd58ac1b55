"""Whole drives on a CUDA device: the same tokens as `generate` in fp32, in every way that steps can run."""

import functools
import gc
import math
import time

import pytest
import torch

from cbexp.engine import driver as driver_module
from cbexp.engine.decode.runners import GraphRunner
from cbexp.engine.decode.timing import DeviceIdle
from cbexp.engine.types import COMPILE_MODES
from tests.engine.driving import check_cache_at_rest, drive

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_fp32")]

NUM_NEW = 12


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
        tokens = drive(driver, prompts, num_generations=num_generations)
        assert tokens == [completion for completion in expected for _ in range(num_generations)]
        check_cache_at_rest(driver)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("settings", [{"max_batch_tokens": 11}, {"num_blocks": 24}], ids=str)
def test_fp32_equals_generate(on_gpu, make_driver, prompts, family, settings):
    model, expected = on_gpu(family)
    check_rounds(make_driver(model, **settings), prompts, expected)


# In fp32 nothing is fused unless it is asked for.
WAYS = [{"compile_mode": mode} for mode in COMPILE_MODES]
WAYS += [
    {"compile_mode": mode, "fusion": "layers"}
    for mode in ("default", "compiled_cuda_graph", "reduce_overhead")
]
WAYS += [{"compile_mode": "cuda_graph", "fusion": fusion} for fusion in ("projections", "layers")]
WAYS += [{"compile_mode": "cuda_graph", "batch_shape": "full"}]
WAYS += [
    {"compile_mode": mode, "batch_shape": "natural", "buckets": None}
    for mode in ("cuda_graph", "reduce_overhead")
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_every_way_says_the_same(on_gpu, make_driver, prompts, settings):
    """With chunks, early ends, shared blocks, evictions, and forks copied just before a burst."""
    _, full = on_gpu("qwen3")
    eos = full[5][4]
    model, expected = on_gpu("qwen3", (eos,))
    common = {"max_batch_tokens": 24, "num_blocks": 20, "buckets": (2, 4, 6), "max_requests_per_batch": 6}
    driver = make_driver(model, eos_token_id=eos, allow_block_sharing=True, **(common | settings))
    check_rounds(driver, prompts, expected)
    assert driver.resolved["fusion"] == settings.get("fusion", "none")
    assert driver.resolved["self_check"] == (settings != {"compile_mode": "eager"})
    stats, mode = driver.compile_stats, COMPILE_MODES[settings["compile_mode"]]
    has_graphs = mode.graphs is not None
    assert (stats["graphs"] > 0) == (stats["replays"] > 0) == has_graphs
    assert (stats["programs"] > 0) == (mode.torch_mode is not None)
    assert (stats["recompiles"], stats["graph_breaks"], stats["skipped_cudagraphs"]) == (0, 0, 0)
    idle_share = stats["device_idle_share"]
    assert 0 < idle_share < 1 if has_graphs else idle_share is None


class CountingIdle(DeviceIdle):
    num_spans = 0

    def add(self, start, end):
        self.num_spans += 1
        super().add(start, end)


def test_the_device_waits_for_a_slow_host_between_bursts_and_batches(
    on_gpu, make_driver, prompts, monkeypatch
):
    model, expected = on_gpu("qwen3")
    settings = {"num_blocks": 64, "max_requests_per_batch": 4, "max_batch_tokens": 24, "max_burst": 4}
    driver = make_driver(model, compile_mode="cuda_graph", **settings)
    check_rounds(driver, prompts, expected)  # captures
    delay_s, run_step = 0.05, driver_module._run_step

    def run_step_late(*args):
        time.sleep(delay_s)
        return run_step(*args)

    monkeypatch.setattr(driver_module, "_run_step", run_step_late)
    idle = driver._engine.decoder.record.idle = CountingIdle()
    assert drive(driver, prompts) == expected
    assert {step.kind for step in driver.steps} == {"prefill", "decode"}
    assert idle.num_spans == len(driver.steps)
    assert 0 < driver.compile_stats["device_idle_share"] == idle.share < 1
    # Between any two spans, whichever kind each is of; a host that is slower yet makes it more.
    assert idle._idle_ms > 0.9 * 1000 * delay_s * (len(driver.steps) - 1)


def test_a_warm_driver_captures_nothing_more_even_after_a_burst_broken_off(
    on_gpu, make_driver, prompts, monkeypatch
):
    model, expected = on_gpu("qwen3")
    driver = make_driver(model, compile_mode="cuda_graph", num_blocks=64, max_requests_per_batch=6)
    driver.warmup()
    assert driver.compile_stats["graphs"] == 4

    def break_off(runner, bucket, num_steps, original=GraphRunner.run):
        original(runner, bucket, num_steps // 2)
        raise ArithmeticError

    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(GraphRunner, "run", break_off)
        drive(driver, prompts)
    check_rounds(driver, prompts, expected)
    assert driver.compile_stats["graphs"] == 4


NAN_WAYS = [("qwen3", "none", "buckets"), ("mistral", "none", "natural")]
NAN_WAYS += [("qwen3", "layers", "full"), ("mistral", "layers", "buckets")]


@pytest.mark.parametrize(("family", "fusion", "batch_shape"), NAN_WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_in_one_request_stays_there(new_model, make_driver, greedy, family, dtype, fusion, batch_shape):
    """The poisoned rows decode beside the others, and pages of theirs are used again afterwards.

    What others get is to be what they got in the same batches before: bit for bit, since no row reads another's.
    """
    model = new_model(family, head_dim=16).to("cuda", dtype)
    clean = [[1, 2, 3, 4, 5], [8] * 12, [11, 12]]
    # A self-check of rows that hold the poisoned token would end the drive.
    settings = {"fusion": fusion, "batch_shape": batch_shape, "self_check": False}
    settings |= {"max_new_tokens": 20, "num_blocks": 24, "max_requests_per_batch": 6}
    driver = make_driver(model, compile_mode="cuda_graph", **settings)

    def drive_beside(token, order):
        """Of the clean prompts, then of two others that hold `token`; submitted in `order`, which gives out pages."""
        prompts = [*clean, [6, token, 7], [9, 10, token]]
        completions = drive(driver, [prompts[index] for index in order])
        assert [len(tokens) for tokens in completions] == [20] * 5
        check_cache_at_rest(driver)
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
        assert drive(driver, prompts) == [greedy(model, prompt, NUM_NEW) for prompt in prompts]


def test_close_gives_the_memory_back(new_model, make_driver, prompts):
    model = new_model("qwen3").cuda()
    torch._dynamo.reset()  # graphs of tests before this one would keep their workspaces
    gc.collect()
    make_driver(model).close()  # and this gives those of their streams back
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    driver = make_driver(model, num_blocks=200_000, max_batch_tokens=64, compile_mode="cuda_graph")
    assert before[1] - torch.cuda.mem_get_info()[0] > 2**28
    drive(driver, prompts)
    driver.close()
    assert torch.cuda.memory_allocated() - before[0] < 2**20
    assert (
        before[1] - torch.cuda.mem_get_info()[0] < 2**25
    )  # what kernels that were loaded take is CUDA's own
