"""Decode steps by mode on a CPU: the same tokens as eager steps, few programs, each counted, nothing left behind."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

from cbexp.engine.attention import paged_decode_attention
from cbexp.engine.decode import compiled
from cbexp.engine.decode.compiled import GraphTreeSteps
from cbexp.engine.decode.runners import build_runner
from cbexp.engine.decode.step import CompileStats
from cbexp.engine.types import CompileMode, EngineError
from tests.engine.decode_fixtures import VOCAB_SIZE, build_buffers, build_pools, set_rows, state_of

POSITIONS = (3, 9, -1, 8, 15, 0, 12, 7)
MAX_ROWS = 9


class ToyForward:
    """One layer of paged attention over an embedding: a step that compiles in a second or two."""

    scale = 2

    def __init__(self, layers):
        torch.manual_seed(0)
        self.layer = layers[0]
        self.embedding = nn.Embedding(VOCAB_SIZE, 64)
        self.head = nn.Linear(32, VOCAB_SIZE)

    def __call__(self, token_ids, positions):
        hidden = self.embedding(token_ids).view(-1, 8, 8) * self.scale
        layer, heads = self.layer, hidden.split([4, 2, 2], dim=1)
        attended = paged_decode_attention(
            *heads, layer.pages, layer.block_table, positions, layer.page_offset, 0.4
        )
        return self.head(attended.flatten(1))


class PrintingForward(ToyForward):
    def __call__(self, token_ids, positions):
        print(token_ids)
        return super().__call__(token_ids, positions)


@pytest.fixture
def buffers():
    return build_buffers(MAX_ROWS)


@pytest.fixture
def close_later():
    """Runners to be closed after the test."""
    runners = []
    yield lambda runner: runners.append(runner) or runner
    for runner in runners:
        runner.close()


@pytest.fixture
def make_runner(buffers, close_later):
    """Runners over `buffers`, of the toy or another forward."""

    def make(mode="default", forward_class=ToyForward, **options):
        return close_later(build_runner(forward_class(buffers.layers), buffers, mode, **options))

    return make


def run_burst(runner, buffers, bucket, num_steps=4):
    """All state after a burst from the same start."""
    for layer in buffers.layers:
        layer.pages.copy_(build_pools(MAX_ROWS * 3)["full_attention"].pages)
    set_rows(buffers, POSITIONS[:bucket])
    runner.prepare(bucket)
    runner.run(bucket, num_steps)
    return state_of(buffers)


@pytest.mark.parametrize(
    "mode", ["default", pytest.param("max_autotune_no_cudagraphs", marks=pytest.mark.slow)]
)
def test_one_program_serves_all_batches_of_several_rows(buffers, make_runner, mode):
    """One more does a single row, and yet another one all rows of the buffers. What is compiled anew is counted."""
    runner, eager = make_runner(mode), make_runner("eager")
    set_rows(buffers, POSITIONS)
    before = state_of(buffers)
    runner.prepare(8)
    assert all(map(torch.equal, state_of(buffers), before))
    for buckets, num_programs in (((8, 2, 4, 5), 1), ((1, 3, 1), 2), ((MAX_ROWS, 4), 3)):
        for bucket in buckets:
            expected = run_burst(eager, buffers, bucket)
            for actual, value in zip(run_burst(runner, buffers, bucket), expected, strict=True):
                torch.testing.assert_close(actual, value)
        assert runner.stats.programs == num_programs
    stats = runner.stats
    assert (stats.recompiles, stats.graph_breaks, stats.skipped_cudagraphs) == (0, 0, 0)
    assert (stats.graphs, stats.replays, stats.capture_s) == (0, 0, 0.0)
    assert stats.compile_s > 0
    runner._forward.scale = 3
    run_burst(runner, buffers, 4)
    assert (stats.programs, stats.recompiles) == (4, 1)


def test_a_graph_break_is_an_error_that_leaves_live_rows_alone(buffers, make_runner):
    runner = make_runner("default", PrintingForward)
    set_rows(buffers, POSITIONS)
    before = state_of(buffers)
    with pytest.raises(EngineError, match=r"default cannot compile the decode step of 5 rows: .*print"):
        runner.prepare(5)
    assert all(map(torch.equal, state_of(buffers), before))


def test_the_recompile_limit_is_an_error_and_holds_for_the_runner_alone(buffers, make_runner):
    before = torch._dynamo.config.get_config_copy()
    runner = make_runner(recompile_limit=1)
    runner.prepare(3)
    # A single row is a program of its own.
    with pytest.raises(EngineError, match="of 1 rows: recompile_limit=1 programs are there already"):
        runner.prepare(1)
    make_runner(recompile_limit=1).prepare(2)
    assert torch._dynamo.config.get_config_copy() == before


def test_a_compiler_that_is_not_there_is_an_error(make_runner, monkeypatch):
    runner = make_runner()
    with torch.compiler.set_stance("force_eager"), pytest.raises(EngineError, match="compiled nothing"):
        runner.prepare(4)
    no_compiler = r"compile_mode='default' compiles C\+\+ for the CPU, and no compiler was found"
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):  # noqa: SIM117
        with pytest.raises(EngineError, match=no_compiler):
            make_runner()
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with pytest.raises(EngineError, match="default compiles nothing"):
        make_runner()


@pytest.mark.parametrize("mode", ["cuda_graph", "compiled_cuda_graph", "reduce_overhead", "max_autotune"])
def test_graphs_need_cuda(make_runner, mode):
    with pytest.raises(EngineError, match=f"{mode} captures CUDA graphs, and the model is on cpu"):
        make_runner(mode)


# Graphs that torch.compile records itself. On a CPU it makes none.


@pytest.fixture
def make_trees(buffers, close_later, monkeypatch):
    """Steps of trees, compiled in torch.compile's own mode for them or in another."""

    def make(torch_mode="default"):
        monkeypatch.setattr(compiled, "COMPILE_MODES", {"reduce_overhead": CompileMode(torch_mode)})
        forward, stats = ToyForward(buffers.layers), CompileStats()
        return close_later(GraphTreeSteps(forward, buffers, stats, "reduce_overhead", None, ()))

    return make


def test_trees_are_refused_on_another_thread(make_trees):
    steps = make_trees()
    with ThreadPoolExecutor(1) as pool:
        errors = [pool.submit(make_trees).exception(), pool.submit(steps.run, 2, 1).exception()]
    assert {type(error) for error in errors} == {EngineError}
    assert all("reduce_overhead works on the main thread alone" in str(error) for error in errors)


def test_a_recompile_where_graphs_are_promised_is_an_error(buffers, make_trees, monkeypatch):
    counted = itertools.count()
    monkeypatch.setattr(GraphTreeSteps, "_num_recorded", lambda self: next(counted))
    steps = make_trees()
    run_burst(steps, buffers, 4)
    steps._forward.scale = 3
    with pytest.raises(EngineError, match=r"promises CUDA graphs and has none for 4 rows: .*compiled anew"):
        run_burst(steps, buffers, 4)
    assert steps.stats.recompiles == 1


@pytest.mark.parametrize(
    ("torch_mode", "num_skipped", "reason"),
    [("reduce-overhead", 1, "no reason given"), ("default", 0, "none was recorded")],
)
def test_graphs_that_are_not_there_are_an_error(make_trees, torch_mode, num_skipped, reason):
    """Those that the compiler skips, and those that nobody has recorded."""
    steps = make_trees(torch_mode)
    with pytest.raises(EngineError, match=f"promises CUDA graphs and has none for 4 rows: {reason}"):
        steps.prepare(4)
    assert (steps.stats.skipped_cudagraphs, steps.stats.graphs) == (num_skipped, 0)


def test_a_skip_in_the_middle_of_a_session_is_an_error_with_its_reason(make_trees):
    """Said as the trees say it: counted, and raised because the session asks for that."""
    steps = make_trees()
    reason = "skipping cudagraphs due to mutated inputs"
    with pytest.raises(EngineError, match=f"none for 4 rows: {reason}"), steps.session(4):
        log_cudagraph_skip_and_bump_counter(reason)
    assert steps.stats.skipped_cudagraphs == 1
    assert not torch._inductor.config.triton.cudagraph_or_error
