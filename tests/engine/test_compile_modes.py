"""Decode steps by mode on a CPU: the same tokens as eager steps, few programs, each counted, nothing left behind."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

from cbexp.engine.compile_modes import TREE_MODES, build_step_runner
from cbexp.engine.compile_stats import CompileStats
from cbexp.engine.compiler_session import CompileOptions
from cbexp.engine.graph_trees import TreeStep, require_main_thread
from cbexp.engine.paged_attention_op import paged_decode_attention
from cbexp.engine.sampling import choose_best
from cbexp.engine.step_loop import StepLoop
from cbexp.engine.types import EngineError
from tests.engine.decode_fixtures import (
    VOCAB_SIZE,
    build_buffers,
    build_pools,
    set_rows,
    state_of,
)

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
        return choose_best(self.logits(token_ids, positions))

    def logits(self, token_ids, positions):
        hidden = self.embedding(token_ids).view(-1, 8, 8) * self.scale
        query, key, value = hidden.split([4, 2, 2], dim=1)
        layer = self.layer
        attended = paged_decode_attention(
            query, key, value, layer.pages, layer.block_table, positions, layer.page_offset, 0.4
        )
        return self.head(attended.flatten(1))


class PrintingForward(ToyForward):
    def logits(self, token_ids, positions):
        print(token_ids)
        return super().logits(token_ids, positions)


@pytest.fixture
def buffers():
    return build_buffers(MAX_ROWS)


@pytest.fixture
def make_runner(buffers):
    """Step runners over `buffers`, of the toy or another forward; closed after the test."""
    runners = []

    def make(mode="default", forward_class=ToyForward, **options):
        runners.append(build_step_runner(forward_class(buffers.layers), buffers, mode, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def run_burst(runner, buffers, bucket, num_steps=4):
    """Tokens and state after a burst from the same start."""
    for layer in buffers.layers:
        layer.pages.copy_(build_pools(MAX_ROWS * 3)["full_attention"].pages)
    set_rows(buffers, POSITIONS[:bucket])
    runner.prepare(bucket)
    runner.run(bucket, num_steps)
    return state_of(buffers)


def assert_same_bursts(runner, eager, buffers, buckets):
    for bucket in buckets:
        expected = run_burst(eager, buffers, bucket)
        for actual, value in zip(run_burst(runner, buffers, bucket), expected, strict=True):
            torch.testing.assert_close(actual, value)


def test_eager_steps_are_forward_and_advance(buffers, make_runner):
    runner, forward = make_runner("eager"), ToyForward(buffers.layers)
    runner.prepare(3)
    set_rows(buffers, [3, 9, -1])
    with torch.no_grad():
        first, _ = forward(buffers.token_ids[:3], buffers.positions[:3])
    runner.run(3, 2)
    assert buffers.outputs[0].tolist() == [first[0], first[1], -1] + [-1] * 6
    assert buffers.positions.tolist() == [5, 11, -1] + [-1] * 6
    assert int(buffers.step) == 2


@pytest.mark.parametrize("mode", ["eager", "default"])
@pytest.mark.parametrize("bucket", [1, 5])
def test_a_step_leaves_the_logits_of_its_tokens_behind(buffers, make_runner, mode, bucket):
    runner, forward = make_runner(mode), ToyForward(buffers.layers)
    runner.prepare(bucket)
    set_rows(buffers, POSITIONS[:bucket])
    token_ids, positions = buffers.token_ids[:bucket].clone(), buffers.positions[:bucket].clone()
    is_active, address = positions >= 0, buffers.best_logits.data_ptr()
    with torch.no_grad():
        expected = forward.logits(token_ids, positions).amax(-1)[is_active]
    runner.run(bucket, 1)
    torch.testing.assert_close(buffers.best_logits[:bucket][is_active], expected)
    assert not buffers.best_logits[bucket:].any()
    assert buffers.best_logits.data_ptr() == address


@pytest.mark.parametrize("mode", ["default", "max_autotune_no_cudagraphs"])
def test_one_program_serves_all_batches_of_several_rows(buffers, make_runner, mode):
    runner, eager = make_runner(mode), make_runner("eager")
    assert_same_bursts(runner, eager, buffers, (8, 2, 4, 5))
    assert runner.stats.programs == 1
    assert_same_bursts(runner, eager, buffers, (1, 3, 1))
    stats = runner.stats
    assert (stats.programs, stats.recompiles, stats.graph_breaks, stats.skipped_cudagraphs) == (2, 0, 0, 0)
    assert stats.compile_s > 0
    assert (stats.graphs, stats.replays, stats.capture_s) == (0, 0, 0.0)


def test_a_batch_of_all_rows_works_too(buffers, make_runner):
    runner = make_runner()
    for bucket in (MAX_ROWS, 4):
        run_burst(runner, buffers, bucket)
    assert (runner.stats.programs, runner.stats.recompiles) == (2, 0)


def test_static_batches_are_programs_of_their_own(buffers, make_runner):
    runner = make_runner(is_batch_dynamic=False)
    for bucket in (4, 3, 2):
        run_burst(runner, buffers, bucket)
    assert runner.stats.programs == 3


@pytest.mark.parametrize("mode", ["eager", "default"])
def test_preparing_leaves_live_rows_alone(buffers, make_runner, mode):
    runner = make_runner(mode)
    set_rows(buffers, POSITIONS)
    before = state_of(buffers)
    for _ in range(2):
        runner.prepare(5)
    assert all(map(torch.equal, state_of(buffers), before))


def test_preparing_again_takes_no_time(buffers, make_runner):
    runner = make_runner()
    runner.prepare(2)
    seconds = runner.stats.compile_s
    runner.prepare(2)
    assert runner.stats.compile_s == seconds


def test_a_recompile_is_counted(buffers, make_runner):
    runner = make_runner()
    run_burst(runner, buffers, 4)
    assert runner.stats.recompiles == 0
    runner._step._forward.scale = 3
    run_burst(runner, buffers, 4)
    assert (runner.stats.programs, runner.stats.recompiles) == (2, 1)


def test_the_recompile_limit_is_an_error_and_holds_for_the_runner_alone(buffers, make_runner):
    limit = torch._dynamo.config.recompile_limit
    runner = make_runner(recompile_limit=1, is_batch_dynamic=False)
    runner.prepare(3)
    with pytest.raises(EngineError, match="of 2 rows: recompile_limit=1 programs are there already"):
        runner.prepare(2)
    assert torch._dynamo.config.recompile_limit == limit
    other = make_runner(recompile_limit=1)
    other.prepare(2)


def test_graph_breaks_are_errors(make_runner):
    with pytest.raises(EngineError, match="default cannot compile the decode step of 4 rows"):
        make_runner(forward_class=PrintingForward).prepare(4)


def test_a_compiler_that_is_switched_off_is_an_error(make_runner):
    runner = make_runner()
    with torch.compiler.set_stance("force_eager"), pytest.raises(EngineError, match="compiled nothing"):
        runner.prepare(4)


def test_a_failed_prepare_leaves_live_rows_alone(buffers, make_runner):
    set_rows(buffers, POSITIONS)
    before = state_of(buffers)
    with pytest.raises(EngineError):
        make_runner(forward_class=PrintingForward).prepare(4)
    assert all(map(torch.equal, state_of(buffers), before))


def test_settings_of_the_compiler_are_put_back(buffers, make_runner):
    before = torch._dynamo.config.get_config_copy()
    run_burst(make_runner(recompile_limit=77), buffers, 2)
    assert torch._dynamo.config.get_config_copy() == before


def test_closing_lets_go_of_forward_and_cache(buffers):
    pools = build_pools(6)
    own = build_buffers(2, pools=pools)
    runner = build_step_runner(ToyForward(own.layers), own, "default")
    forward = weakref.ref(runner._step._forward)
    pages = weakref.ref(own.layers[0].pages)
    run_burst_once = runner.prepare
    run_burst_once(2)
    runner.run(2, 1)
    runner.close()
    del own, pools, runner, run_burst_once
    gc.collect()
    assert forward() is None
    assert pages() is None


def test_batches_must_be_prepared_and_fit(make_runner):
    runner = make_runner("eager")
    with pytest.raises(EngineError, match=r"batch of 4 rows was not prepared: call prepare\(4\)"):
        runner.run(4, 1)
    for bucket in (0, MAX_ROWS + 1):
        with pytest.raises(ValueError, match=f"batch of {bucket} rows is outside of the buffers' 1 to 9"):
            runner.prepare(bucket)


@pytest.mark.parametrize("mode", ["reduce_overhead", "max_autotune", "cuda_graph", "compiled_cuda_graph"])
def test_graphs_need_cuda(make_runner, mode):
    with pytest.raises(EngineError, match=f"{mode} captures CUDA graphs, and the model is on cpu"):
        make_runner(mode)


def test_unknown_modes_are_named(make_runner):
    with pytest.raises(ValueError, match="'cuda_graphs' is not a compile mode: eager, default"):
        make_runner("cuda_graphs")


def test_layers_cannot_be_compiled_in_every_mode(make_runner):
    with pytest.raises(EngineError, match="does not go with eager, which compiles no layers"):
        make_runner("eager", region="layer")
    with pytest.raises(ValueError, match="pass it as model="):
        make_runner("default", region="layer")


@pytest.mark.parametrize("mode", ["default", "max_autotune_no_cudagraphs"])
def test_no_compiler_is_an_error(make_runner, mode):
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(EngineError, match=rf"{mode} compiles C\+\+ for the CPU, and no compiler was found"),
    ):
        make_runner(mode)


@pytest.mark.parametrize("mode", TREE_MODES)
def test_trees_are_refused_on_another_thread(mode):
    errors = []

    def try_it():
        with pytest.raises(EngineError, match=f"{mode} works on the main thread alone") as error:
            require_main_thread(mode)
        errors.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert len(errors) == 1
    require_main_thread(mode)


def test_a_recompile_where_graphs_are_promised_is_an_error(buffers, monkeypatch):
    """Trees on a CPU record nothing, which is not what is tested here."""
    counted = itertools.count()
    monkeypatch.setattr(TreeStep, "_num_recorded", lambda self: next(counted))
    options = CompileOptions("reduce_overhead", "default", None, is_batch_dynamic=True)
    step = TreeStep(ToyForward(buffers.layers), buffers, options, CompileStats(), None)
    runner = StepLoop(step, buffers, step._stats)
    run_burst(runner, buffers, 4)
    step._forward.scale = 3
    with pytest.raises(EngineError, match=r"promises CUDA graphs and has none for 4 rows: .*compiled anew"):
        run_burst(runner, buffers, 4)
    assert runner.stats.recompiles == 1
    runner.close()


@pytest.fixture
def make_tree_runner(buffers):
    """Steps of trees on a CPU, for which PyTorch makes no graphs: by torch.compile's mode of that name, or another."""
    runners = []

    def make(torch_mode):
        options = CompileOptions("reduce_overhead", torch_mode, None, is_batch_dynamic=True)
        step = TreeStep(ToyForward(buffers.layers), buffers, options, CompileStats(), None)
        runners.append(StepLoop(step, buffers, step._stats))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def test_graphs_that_the_compiler_skips_are_an_error(make_tree_runner):
    runner = make_tree_runner("reduce-overhead")
    with pytest.raises(
        EngineError, match=r"promises CUDA graphs and has none for 4 rows: (?!none was recorded)"
    ):
        runner.prepare(4)
    assert (runner.stats.skipped_cudagraphs, runner.stats.graphs) == (1, 0)


def test_a_skip_in_the_middle_of_a_session_is_an_error_with_its_reason(make_tree_runner):
    """Told as the trees do it: counted, and raised because the session asks for that."""
    runner = make_tree_runner("default")
    with (
        pytest.raises(EngineError, match="none for 4 rows: skipping cudagraphs due to mutated inputs"),
        runner._step.session(4),
    ):
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs")
    assert runner.stats.skipped_cudagraphs == 1
    assert not torch._inductor.config.triton.cudagraph_or_error


def test_graphs_that_nobody_has_recorded_are_an_error(make_tree_runner):
    runner = make_tree_runner("default")
    with pytest.raises(EngineError, match="has none for 4 rows: none was recorded"):
        runner.prepare(4)
    assert (runner.stats.skipped_cudagraphs, runner.stats.graphs) == (0, 0)
