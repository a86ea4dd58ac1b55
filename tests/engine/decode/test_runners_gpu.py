"""Decode steps by mode on a GPU, in fp32: the tokens of eager steps, from graphs that are really there."""

import gc
import logging
import threading
import weakref

import pytest
import torch

from cbexp.engine.decode.runners import build_runner
from cbexp.engine.decode.self_check import check_bucket
from cbexp.engine.forward import PlainForward
from cbexp.engine.types import COMPILE_MODES, EngineError
from tests.engine.decode_fixtures import (
    VOCAB_SIZE,
    build_buffers,
    build_decode_model,
    build_pools,
    set_rows,
    state_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_fp32")]

DEVICE = "cuda"
MAX_ROWS = 12
POSITIONS = (3, 9, -1, 8, 15, 0, 12, 7, 5, 1, 2)
FEW_MODES = ("cuda_graph", "compiled_cuda_graph", "reduce_overhead")


class Setting:
    """A model with a cache, an eager runner and, by `prepare`, others over the same buffers."""

    def __init__(self, family="qwen3", dtype=torch.float32):
        self.model = build_decode_model(family, DEVICE).to(dtype)
        pools = build_pools(MAX_ROWS * 4, family=family, device=DEVICE, dtype=dtype)
        self.buffers = build_buffers(MAX_ROWS, pools=pools)
        self.forward = PlainForward(self.model, self.buffers.layers)
        self.runners = []
        self.eager = self.prepare("eager")

    def prepare(self, mode, *buckets, forward=None):
        """A runner, ready for the buckets; the largest come first, each once, as in the decoder."""
        forward = forward or self.forward
        parameters = list(forward.model.parameters())
        self.runners.append(build_runner(forward, self.buffers, mode, parameters=parameters))
        for bucket in buckets:
            self.runners[-1].prepare(bucket)
        return self.runners[-1]

    def burst(self, runner, bucket):
        """All state after five steps; the cache is as before afterwards."""
        set_rows(self.buffers, POSITIONS[:bucket])
        pages = self.buffers.layers[0].pages
        before = pages.clone()
        runner.run(bucket, 5)
        state = state_of(self.buffers)
        pages.copy_(before)
        return state

    def require_equal_bursts(self, runner, *buckets):
        for bucket in buckets:
            expected = self.burst(self.eager, bucket)
            for actual, value in zip(self.burst(runner, bucket), expected, strict=True):
                torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-4)

    def check(self, runner, bucket):
        asked = {"bucket": bucket, "mode": "some_mode", "vocab_size": VOCAB_SIZE, "max_positions": 256}
        return check_bucket(runner, self.forward, self.forward, self.buffers, **asked)

    def close(self, *runners):
        for runner in runners or list(self.runners):
            runner.close()
            self.runners.remove(runner)


@pytest.fixture
def make_setting():
    settings = []

    def make(**changes):
        settings.append(Setting(**changes))
        return settings[-1]

    yield make
    for setting in settings:
        setting.close()


@pytest.fixture
def setting(make_setting):
    return make_setting()


CHOICES = [(mode, "qwen3") for mode in COMPILE_MODES] + [(mode, "gemma2") for mode in FEW_MODES]


@pytest.mark.parametrize(("name", "family"), CHOICES)
def test_every_mode_makes_the_tokens_of_eager_steps(make_setting, name, family):
    """Prepared beside live rows, without waiting for the device where it has graphs, and over a training step."""
    setting, mode = make_setting(family=family), COMPILE_MODES[name]
    # Tuning takes its time for each of the programs, of which a single row has its own.
    buckets = (4, 2) if "max_autotune" in name else (8, 4, 2, 1)
    set_rows(setting.buffers, POSITIONS)
    before = state_of(setting.buffers)
    runner = setting.prepare(name, *buckets)
    assert all(map(torch.equal, state_of(setting.buffers), before))
    setting.require_equal_bursts(runner, *reversed(buckets), *buckets)
    # Each step is a replay.
    assert runner.stats.replays == (2 * len(buckets) * 5 if mode.graphs else 0)
    for bucket in buckets:
        result = setting.check(runner, bucket)
        assert result.num_rows == bucket
        assert 0 <= result.mean_logit_error <= result.max_logit_error < 1e-3
    if mode.graphs:
        set_rows(setting.buffers, POSITIONS[:4])
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.run(4, 5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for parameter in setting.model.parameters():
            parameter.mul_(1.05)
    setting.model.train()
    setting.model.lm_head.requires_grad_(False)
    setting.model.eval()
    setting.require_equal_bursts(runner, 4, 2)
    stats = runner.stats
    assert (stats.recompiles, stats.graph_breaks, stats.skipped_cudagraphs) == (0, 0, 0)
    assert stats.programs == (1 + (1 in buckets) if mode.torch_mode else 0)
    assert stats.graphs == (len(buckets) if mode.graphs else 0)


# What a graph has of its own -> what the self-check says. The forward run eagerly is right.
OTHER_WEIGHTS = {
    # Which leaves nothing in the cache.
    "no attention in the last layer": (
        lambda model: model.model.layers[-1].self_attn.o_proj.weight.zero_(),
        "a token is less likely|the step's best logits differ",
    ),
    # Its tokens are right, too.
    "scaled logits": (lambda model: model.lm_head.weight.mul_(0.8), "the step's best logits differ by up to"),
}


@pytest.mark.parametrize("mode", FEW_MODES)
@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_the_self_check_finds_a_graph_of_other_weights(setting, mode, change):
    weaken, message = OTHER_WEIGHTS[change]
    other = build_decode_model("qwen3", DEVICE)
    with torch.no_grad():
        weaken(other)
    runner = setting.prepare(mode, 8, forward=PlainForward(other, setting.buffers.layers))
    with pytest.raises(EngineError, match=f"mode some_mode, batch of 8 rows: ({message})"):
        setting.check(runner, 8)


def test_the_self_check_passes_in_half_precision(make_setting):
    """Of the model's own code; fused code in every mode is checked where the embedded model answers questions."""
    setting = make_setting(dtype=torch.bfloat16)
    runner = setting.prepare("compiled_cuda_graph", 8, 4)
    for bucket in (8, 4):
        result = setting.check(runner, bucket)
        assert 0 <= result.mean_logit_error <= result.max_logit_error


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
        setting.require_equal_bursts(setting.prepare("cuda_graph", 8, 4, 2, 1), 8, 4, 2, 1)
    finally:
        is_done.set()
        thread.join()


def test_many_tree_sizes_raise_no_warning(setting, caplog):
    buckets = range(11, 0, -1)
    with caplog.at_level(logging.WARNING):
        runner = setting.prepare("reduce_overhead", *buckets)
        setting.require_equal_bursts(runner, *buckets)
    assert runner.stats.graphs == 11
    assert not [record for record in caplog.records if "dynamic shapes" in record.getMessage()]


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
    is_captured = COMPILE_MODES[mode].graphs == "engine"
    in_graphs, allocated = settled_memory()
    forward = PlainForward(setting.model, setting.buffers.layers)
    runner, is_gone = setting.prepare(mode, 8, 4, forward=forward), weakref.ref(forward)
    assert not is_captured or settled_memory()[0] > in_graphs
    setting.close(runner)
    del forward, runner
    in_graphs_after, allocated_after = settled_memory()
    assert not is_captured or in_graphs_after <= in_graphs
    # Less than a copy of the pages, of which the trees' manager keeps a small part for itself.
    assert allocated_after <= allocated + 2**17
    assert is_gone() is None
    assert not any(hasattr(layer.pages, "_dynamo_static_input_type") for layer in setting.buffers.layers)


class CountingForward(PlainForward):
    """Changes a tensor that is no buffer, for which trees skip its graph."""

    def __init__(self, model, layers):
        super().__init__(model, layers)
        self.calls = torch.zeros((), device=DEVICE)

    def __call__(self, token_ids, positions):
        self.calls.add_(1)
        return super().__call__(token_ids, positions)


class SynchronisingForward(PlainForward):
    def __call__(self, token_ids, positions):
        return super().__call__(token_ids, positions) + 0 * int(positions[0])


@pytest.mark.parametrize(
    ("mode", "forward_class", "message"),
    [
        ("reduce_overhead", CountingForward, "promises CUDA graphs and has none for 4 rows: .*mutated"),
        ("cuda_graph", SynchronisingForward, "cannot capture the decode step of 4 rows"),
    ],
)
def test_a_step_without_a_graph_is_named_and_harms_no_other(setting, mode, forward_class, message):
    set_rows(setting.buffers, POSITIONS)
    before = state_of(setting.buffers)
    with pytest.raises(EngineError, match=f"{mode} {message}"):
        setting.prepare(mode, 4, forward=forward_class(setting.model, setting.buffers.layers))
    assert (setting.runners[-1].stats.skipped_cudagraphs > 0) == (mode == "reduce_overhead")
    assert all(map(torch.equal, state_of(setting.buffers), before))
    setting.require_equal_bursts(setting.prepare("cuda_graph", 8, 4), 8, 4)
