"""Decode steps by mode on a GPU, in fp32: the tokens of eager steps, from graphs that are really there."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cbexp.engine.decode.runners import build_runner
from cbexp.engine.decode.self_check import check_bucket
from cbexp.engine.forward import PlainForward
from cbexp.engine.types import COMPILE_MODES, EngineError
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
POSITIONS = (3, 9, -1, 8, 15, 0, 12, 7, 5, 1, 2)
GRAPH_MODES = tuple(name for name, mode in COMPILE_MODES.items() if mode.graphs is not None)
CAPTURE_MODES = tuple(name for name, mode in COMPILE_MODES.items() if mode.graphs == "engine")
TREE_MODES = tuple(name for name, mode in COMPILE_MODES.items() if mode.graphs == "torch")
FEW_MODES = ("cuda_graph", "compiled_cuda_graph", "reduce_overhead")


@pytest.fixture(autouse=True, scope="module")
def _exact_fp32():
    """TF32 would round the two sides differently; for the module, since programs are bound to it."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


class Setting:
    """A model with a cache, an eager runner and, by `make`, others over the same buffers."""

    def __init__(self, model, family="qwen3"):
        self.model = model
        pools = build_pools(MAX_ROWS * 4, family=family, device=DEVICE, dtype=model.dtype)
        self.buffers = build_buffers(MAX_ROWS, pools=pools)
        self.forward = PlainForward(model, self.buffers.layers)
        self.runners = []
        self.eager = self.make("eager")

    def make(self, mode, forward=None):
        forward = forward or self.forward
        parameters = list(forward.model.parameters())
        self.runners.append(build_runner(forward, self.buffers, mode, parameters=parameters))
        return self.runners[-1]

    def prepare(self, runner, *buckets):
        """Largest first, once each, as the decoder does."""
        for bucket in buckets:
            runner.prepare(bucket)
        return runner

    def burst(self, runner, bucket, num_steps=5):
        """All state after a burst; the cache is as before afterwards."""
        set_rows(self.buffers, POSITIONS[:bucket])
        pages = self.buffers.layers[0].pages
        before = pages.clone()
        runner.run(bucket, num_steps)
        state = state_of(self.buffers)
        pages.copy_(before)
        return state

    def require_equal_bursts(self, runner, *buckets):
        for bucket in buckets:
            expected = self.burst(self.eager, bucket)
            for actual, value in zip(self.burst(runner, bucket), expected, strict=True):
                torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-4)

    def check(self, runner, bucket):
        return check_bucket(
            runner, self.forward, self.forward.logits, self.buffers, bucket=bucket, mode="some_mode"
        )

    def close(self, runner=None):
        """All runners, or one of them."""
        for closed in [runner] if runner else list(self.runners):
            closed.close()
            self.runners.remove(closed)


@pytest.fixture
def make_setting():
    settings = []

    def make(model=None, family="qwen3"):
        settings.append(Setting(model or build_decode_model(family, DEVICE), family))
        return settings[-1]

    yield make
    for setting in settings:
        setting.close()


@pytest.fixture
def setting(make_setting):
    return make_setting()


class Ready:
    """A runner of one mode, prepared for all of its batch sizes over live rows, and what that left of them."""

    def __init__(self, mode):
        self.mode = mode
        # Tuning takes its time for each of the programs, of which a single row has its own.
        self.buckets = (4, 2) if "max_autotune" in mode else (8, 4, 2, 1)
        self.setting = Setting(build_decode_model("qwen3", DEVICE))
        set_rows(self.setting.buffers, POSITIONS)
        before = state_of(self.setting.buffers)
        self.runner = self.setting.prepare(self.setting.make(mode), *self.buckets)
        after = state_of(self.setting.buffers)
        self.has_left_rows_alone = all(map(torch.equal, after, before))


@pytest.fixture(scope="module", params=COMPILE_MODES)
def ready(request):
    """Compiled once for all tests of a mode."""
    made = Ready(request.param)
    yield made
    made.setting.close()


def check_counts(runner, mode, buckets):
    stats = runner.stats
    assert (stats.recompiles, stats.graph_breaks, stats.skipped_cudagraphs) == (0, 0, 0)
    assert stats.programs == (1 + (1 in buckets) if COMPILE_MODES[mode].torch_mode else 0)
    assert stats.graphs == (len(buckets) if mode in GRAPH_MODES else 0)


def test_preparing_leaves_live_rows_alone(ready):
    assert ready.has_left_rows_alone


def test_every_mode_makes_the_tokens_of_eager_steps(ready):
    before = ready.runner.stats.replays
    ready.setting.require_equal_bursts(ready.runner, *reversed(ready.buckets), *ready.buckets)
    check_counts(ready.runner, ready.mode, ready.buckets)
    # Each step is a replay.
    num_replays = 2 * len(ready.buckets) * 5 if ready.mode in GRAPH_MODES else 0
    assert ready.runner.stats.replays - before == num_replays


def test_the_self_check_passes(ready):
    for bucket in ready.buckets:
        before = state_of(ready.setting.buffers)
        result = ready.setting.check(ready.runner, bucket)
        assert result.num_rows == max(1, bucket - 1)
        assert 0 <= result.mean_logit_error <= result.max_logit_error < 1e-3
        assert all(map(torch.equal, state_of(ready.setting.buffers), before))
    check_counts(ready.runner, ready.mode, ready.buckets)


def test_bursts_of_graphs_do_not_wait_for_the_device(ready):
    if ready.mode not in GRAPH_MODES:
        pytest.skip("has no graphs")
    set_rows(ready.setting.buffers, POSITIONS[:4])
    torch.cuda.set_sync_debug_mode("error")
    try:
        ready.runner.run(4, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_trees_run_on_the_main_thread_alone(ready):
    if ready.mode not in TREE_MODES:
        pytest.skip("has no trees")
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(ready.runner.run, 2, 1).exception()
    assert isinstance(error, EngineError)
    assert f"{ready.mode} works on the main thread alone" in str(error)


def test_steps_stay_valid_over_training(ready):
    """The last test of a mode: it changes the weights."""
    model = ready.setting.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    model.train()
    model.lm_head.requires_grad_(False)
    model.eval()
    ready.setting.require_equal_bursts(ready.runner, 4, 2)
    check_counts(ready.runner, ready.mode, ready.buckets)


@pytest.mark.parametrize("mode", FEW_MODES)
def test_sliding_and_full_layers(make_setting, mode):
    setting = make_setting(family="gemma2")
    runner = setting.prepare(setting.make(mode), 4, 2)
    setting.require_equal_bursts(runner, 4, 2, 4)
    check_counts(runner, mode, (4, 2))


def test_the_self_check_passes_in_half_precision(make_setting):
    """Of the model's own code; fused code in every mode is checked where the embedded model answers questions."""
    setting = make_setting(build_decode_model("qwen3", DEVICE).to(torch.bfloat16))
    runner = setting.prepare(setting.make("compiled_cuda_graph"), 8, 4)
    for bucket in (8, 4):
        result = setting.check(runner, bucket)
        assert 0 <= result.mean_logit_error <= result.max_logit_error


# A graph of other weights -> what the self-check says of it.
OTHER_WEIGHTS = {
    "another layer": (lambda model: model.model.layers[1].mlp.down_proj.weight.mul_(1.5), "mode some_mode"),
    # Which is no part of what is written to the cache.
    "no attention in the last layer": (
        lambda model: model.model.layers[-1].self_attn.o_proj.weight.zero_(),
        r"a token is less likely|the step's best logits differ",
    ),
}


@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_the_self_check_finds_a_graph_of_other_weights(setting, change):
    weaken, message = OTHER_WEIGHTS[change]
    other = build_decode_model("qwen3", DEVICE)
    with torch.no_grad():
        weaken(other)
    runner = setting.prepare(setting.make("cuda_graph", PlainForward(other, setting.buffers.layers)), 8, 1)
    for bucket in (8, 1):
        with pytest.raises(EngineError, match=message):
            setting.check(runner, bucket)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", FEW_MODES)
def test_the_self_check_finds_a_graph_of_other_logits(make_setting, mode, dtype):
    """The forward run eagerly is right, and so are the graph's tokens and what it writes to the cache."""
    model, other = (build_decode_model("qwen3", DEVICE).to(dtype) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(0.8)
    setting = make_setting(model)
    runner = setting.prepare(setting.make(mode, PlainForward(other, setting.buffers.layers)), 8)
    with pytest.raises(EngineError, match="batch of 8 rows: the step's best logits differ by up to"):
        setting.check(runner, 8)


def test_another_threads_calls_do_not_break_a_capture(setting):
    """A logger asks for the free memory whenever it likes."""
    is_done = threading.Event()

    def ask():
        while not is_done.is_set():
            torch.cuda.mem_get_info()
            torch.empty(2**20, device=DEVICE)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        runner = setting.prepare(setting.make("cuda_graph"), 8, 4, 2, 1)
        setting.require_equal_bursts(runner, 8, 4, 2, 1)
    finally:
        is_done.set()
        thread.join()


class CountingForward(PlainForward):
    """Changes a tensor that is no buffer, which makes trees skip its graph."""

    def __init__(self, model, layers):
        super().__init__(model, layers)
        self.calls = torch.zeros((), device=DEVICE)

    def logits(self, token_ids, positions):
        self.calls.add_(1)
        return super().logits(token_ids, positions)


def test_a_skipped_graph_is_an_error(setting):
    runner = setting.make("reduce_overhead", CountingForward(setting.model, setting.buffers.layers))
    message = "reduce_overhead promises CUDA graphs and has none for 4 rows: .*mutated"
    with pytest.raises(EngineError, match=message):
        runner.prepare(4)
    assert runner.stats.skipped_cudagraphs >= 1


def test_many_tree_sizes_raise_no_warning_and_leave_no_setting(setting, caplog):
    before = torch._inductor.config.get_config_copy()
    buckets = range(11, 0, -1)
    with caplog.at_level(logging.WARNING):
        runner = setting.prepare(setting.make("reduce_overhead"), *buckets)
        setting.require_equal_bursts(runner, *buckets)
    assert runner.stats.graphs == 11
    assert not [record for record in caplog.records if "dynamic shapes" in record.getMessage()]
    assert torch._inductor.config.get_config_copy() == before


def settled_memory():
    """Bytes that the device has reserved for graphs of our own, and bytes that tensors take."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # one for each stream that has multiplied
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    in_graphs = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))
    return in_graphs, torch.cuda.memory_allocated()


@pytest.mark.parametrize("mode", ["cuda_graph", "reduce_overhead"])
def test_closing_gives_memory_and_marks_back(setting, mode):
    """Trees keep their pool for the next graphs of the device: of theirs, tensors alone can be counted."""
    in_graphs, allocated = settled_memory()
    forward = PlainForward(setting.model, setting.buffers.layers)
    runner, is_gone = setting.prepare(setting.make(mode, forward), 8, 4), weakref.ref(forward)
    assert mode not in CAPTURE_MODES or settled_memory()[0] > in_graphs
    setting.close(runner)
    del forward, runner
    in_graphs_after, allocated_after = settled_memory()
    assert mode not in CAPTURE_MODES or in_graphs_after <= in_graphs
    # Less than a copy of the pages, of which the trees' manager keeps a small part for itself.
    assert allocated_after <= allocated + 2**17
    assert is_gone() is None
    assert not any(hasattr(layer.pages, "_dynamo_static_input_type") for layer in setting.buffers.layers)


def test_a_second_runner_works_after_the_first_is_closed(setting):
    for mode in ("cuda_graph", "reduce_overhead", "cuda_graph", "reduce_overhead"):
        runner = setting.prepare(setting.make(mode), 4, 2)
        setting.require_equal_bursts(runner, 4, 2)
        setting.close(runner)


class SynchronisingForward(PlainForward):
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
    runner = setting.prepare(setting.make("cuda_graph"), 8, 4)
    setting.require_equal_bursts(runner, 8, 4)
