"""Decode steps by mode on a GPU, in fp32: the tokens of eager steps, from graphs that are really there."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch

from cbexp.engine.compile_modes import CAPTURE_MODES, TORCH_MODES, TREE_MODES, build_step_runner
from cbexp.engine.model_forward import ModelForward
from cbexp.engine.self_check import check_bucket
from cbexp.engine.types import EngineError
from tests.engine.decode_fixtures import (
    build_buffers,
    build_decode_model,
    build_pools,
    set_rows,
    state_of,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MAX_ROWS = 12
BUCKETS = (8, 4, 2, 1)
POSITIONS = (3, 9, -1, 8, 15, 0, 12, 7, 5, 1, 2)
GRAPH_MODES = (*TREE_MODES, *CAPTURE_MODES)
COMPILED_MODES = tuple(mode for mode, torch_mode in TORCH_MODES.items() if torch_mode)
CHOICES = [
    *((mode, "model") for mode in TORCH_MODES),
    *((mode, "layer") for mode in ("default", "max_autotune_no_cudagraphs", "compiled_cuda_graph")),
]


@pytest.fixture(autouse=True)
def _exact_fp32():
    """TF32 would round the two sides differently."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture(scope="module")
def models():
    return {family: build_decode_model(family, DEVICE) for family in ("qwen3", "gemma2")}


class Setting:
    """A model with a cache, an eager runner and, by `make`, others over the same buffers."""

    def __init__(self, model, family="qwen3", dtype=torch.float32):
        self.model = model
        self.pools = build_pools(MAX_ROWS * 4, family=family, device=DEVICE, dtype=dtype)
        self.buffers = build_buffers(MAX_ROWS, pools=self.pools)
        self.forward = ModelForward(model, self.buffers.layers)
        self.runners = []
        self.eager = self.make("eager")

    def make(self, mode, forward=None, **options):
        self.runners.append(
            build_step_runner(forward or self.forward, self.buffers, mode, model=self.model, **options)
        )
        return self.runners[-1]

    def burst(self, runner, bucket, num_steps=5):
        """All state after a burst; the cache is as before afterwards."""
        runner.prepare(bucket)
        set_rows(self.buffers, POSITIONS[:bucket])
        pages = self.buffers.layers[0].pages
        before = pages.clone()
        runner.run(bucket, num_steps)
        state = state_of(self.buffers)
        pages.copy_(before)
        return state

    def require_equal_bursts(self, runner, buckets=BUCKETS, num_steps=5):
        for bucket in buckets:
            expected = self.burst(self.eager, bucket, num_steps)
            for actual, value in zip(self.burst(runner, bucket, num_steps), expected, strict=True):
                torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-4)

    def check(self, runner, bucket, mode="some_mode", forward=None):
        return check_bucket(
            runner,
            forward or self.forward,
            self.forward.logits,
            self.buffers,
            self.pools,
            bucket=bucket,
            mode=mode,
        )

    def close(self):
        for runner in self.runners:
            runner.close()
        self.runners.clear()


@pytest.fixture
def setting(models):
    made = Setting(models["qwen3"])
    yield made
    made.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize(("mode", "region"), CHOICES)
def test_every_mode_makes_the_tokens_of_eager_steps(models, family, mode, region):
    setting = Setting(models[family], family)
    runner = setting.make(mode, region=region)
    for bucket in BUCKETS:
        runner.prepare(bucket)
    setting.require_equal_bursts(runner, (*reversed(BUCKETS), *BUCKETS))
    stats = runner.stats
    assert (stats.recompiles, stats.graph_breaks, stats.skipped_cudagraphs) == (0, 0, 0)
    kinds = 2 if family == "gemma2" and region == "layer" else 1
    assert stats.programs == (2 * kinds if mode in COMPILED_MODES else 0)
    # One graph for each batch size, and each step of eight bursts is a replay.
    graphs, replays = (len(BUCKETS), 8 * 5) if mode in GRAPH_MODES else (0, 0)
    assert (stats.graphs, stats.replays) == (graphs, replays)
    setting.close()


@pytest.mark.parametrize(("mode", "region"), CHOICES)
def test_preparing_leaves_live_rows_alone(setting, mode, region):
    runner = setting.make(mode, region=region)
    set_rows(setting.buffers, POSITIONS)
    before = state_of(setting.buffers)
    for bucket in BUCKETS:
        runner.prepare(bucket)
        assert all(map(torch.equal, state_of(setting.buffers), before))


@pytest.mark.parametrize("mode", TORCH_MODES)
def test_steps_stay_valid_over_training(models, mode):
    setting = Setting(build_decode_model("qwen3", DEVICE))
    runner = setting.make(mode)
    setting.require_equal_bursts(runner, (4, 2))
    with torch.no_grad():
        for parameter in setting.model.parameters():
            parameter.mul_(1.05)
    setting.model.train()
    setting.model.lm_head.requires_grad_(False)
    setting.model.eval()
    setting.require_equal_bursts(runner, (4, 2))
    assert runner.stats.recompiles == 0
    setting.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mode", "region"), CHOICES)
def test_the_self_check_passes(dtype, mode, region):
    setting = Setting(build_decode_model("qwen3", DEVICE).to(dtype), dtype=dtype)
    runner = setting.make(mode, region=region)
    for bucket in BUCKETS:
        runner.prepare(bucket)
        before = state_of(setting.buffers)
        result = setting.check(runner, bucket, mode)
        assert result.num_rows == max(1, bucket - 1)
        assert all(map(torch.equal, state_of(setting.buffers), before))
    assert runner.stats.recompiles == 0
    setting.close()


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_the_self_check_finds_a_graph_of_other_weights(setting, mode):
    other = build_decode_model("qwen3", DEVICE)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    runner = setting.make(mode, ModelForward(other, setting.buffers.layers))
    runner.prepare(4)
    with pytest.raises(EngineError, match=f"mode {mode}, batch of 4 rows"):
        setting.check(runner, 4, mode)


@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_several_steps_in_a_graph(setting, mode):
    runner = setting.make(mode, steps_per_graph=(1, 3))
    setting.require_equal_bursts(runner, (4,), num_steps=8)
    assert (runner.stats.graphs, runner.stats.replays) == (2, 4)  # 3 + 3 + 1 + 1
    with pytest.raises(ValueError, match="must have 1 and end at max_burst=8"):
        setting.make(mode, steps_per_graph=(1, 9))


@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_graphs_run_on_the_stream_that_was_given(setting, mode):
    stream = torch.cuda.Stream()
    runner = setting.make(mode, stream=stream)
    runner.prepare(4)
    expected = setting.burst(setting.eager, 4)
    set_rows(setting.buffers, POSITIONS[:4])
    stream.wait_stream(torch.cuda.current_stream())
    runner.run(4, 5)
    stream.synchronize()
    assert torch.equal(setting.buffers.outputs, expected[3])


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_bursts_do_not_wait_for_the_device(setting, mode):
    runner = setting.make(mode)
    runner.prepare(4)
    set_rows(setting.buffers, POSITIONS[:4])
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.run(4, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", CAPTURE_MODES)
def test_another_threads_calls_do_not_break_a_capture(setting, mode):
    """A logger asks for the free memory whenever it likes."""
    is_done = threading.Event()

    def ask():
        while not is_done.is_set():
            torch.cuda.mem_get_info()
            torch.empty(2**20, device=DEVICE)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        setting.require_equal_bursts(setting.make(mode))
    finally:
        is_done.set()
        thread.join()


class CountingForward(ModelForward):
    """Changes a tensor that is no buffer, which makes trees skip its graph."""

    def __init__(self, model, layers):
        super().__init__(model, layers)
        self.calls = torch.zeros((), device=DEVICE)

    def logits(self, token_ids, positions):
        self.calls.add_(1)
        return super().logits(token_ids, positions)


@pytest.mark.parametrize("mode", TREE_MODES)
def test_a_skipped_graph_is_an_error(setting, mode):
    runner = setting.make(mode, CountingForward(setting.model, setting.buffers.layers))
    with pytest.raises(EngineError, match=f"{mode} promises CUDA graphs and has none for 4 rows: .*mutated"):
        runner.prepare(4)
    assert runner.stats.skipped_cudagraphs >= 1


@pytest.mark.parametrize("mode", TREE_MODES)
def test_trees_run_on_the_main_thread_alone(setting, mode):
    runner = setting.make(mode)
    runner.prepare(2)
    errors = []

    def run():
        try:
            runner.run(2, 1)
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [f"{mode} works on the main thread alone" in error for error in errors] == [True]


def test_many_tree_sizes_raise_no_warning_and_leave_no_setting(setting, caplog):
    before = torch._inductor.config.get_config_copy()
    runner = setting.make("reduce_overhead")
    with caplog.at_level(logging.WARNING):
        for bucket in range(11, 0, -1):
            setting.require_equal_bursts(runner, (bucket,))
    assert runner.stats.graphs == 11
    assert not [record for record in caplog.records if "dynamic shapes" in record.getMessage()]
    assert torch._inductor.config.get_config_copy() == before


def graph_bytes():
    """Memory in pools other than the allocator's own, of which each is some graph's; trees share one a device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(s["active_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_closing_gives_memory_and_marks_back(models, mode):
    before = graph_bytes()
    setting = Setting(models["qwen3"])
    runner = setting.make(mode)
    for bucket in BUCKETS:
        runner.prepare(bucket)
    assert graph_bytes() > before
    setting.close()
    assert graph_bytes() <= before
    assert not any(hasattr(layer.pages, "_dynamo_static_input_type") for layer in setting.buffers.layers)


def test_a_second_runner_works_after_the_first_is_closed(setting):
    for mode in (*GRAPH_MODES, *GRAPH_MODES):
        runner = setting.make(mode)
        setting.require_equal_bursts(runner, (4, 2))
        runner.close()
        setting.runners.remove(runner)


class SynchronisingForward(ModelForward):
    def logits(self, token_ids, positions):
        logits = super().logits(token_ids, positions)
        return logits + 0 * int(positions[0])


def test_a_forward_that_cannot_be_captured_is_named_and_harms_no_other(setting):
    set_rows(setting.buffers, POSITIONS)
    before = state_of(setting.buffers)
    failing = setting.make("cuda_graph", SynchronisingForward(setting.model, setting.buffers.layers))
    with pytest.raises(EngineError, match="cuda_graph cannot capture the decode step of 4 rows"):
        failing.prepare(4)
    assert all(map(torch.equal, state_of(setting.buffers), before))
    setting.require_equal_bursts(setting.make("cuda_graph"))
