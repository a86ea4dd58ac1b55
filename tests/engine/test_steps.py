"""What is recorded of steps, of requests' times, and of compiling over a driver's life."""

import pytest
from torch import nn

from cbexp.engine.decode.timing import DeviceIdle
from cbexp.engine.types import COMPILE_MODES
from tests.engine.driving import drive


def test_each_step_is_recorded_and_reported(shared_model, make_driver, make_prompts, monkeypatch):
    reported, begun = [], []
    monkeypatch.setattr(DeviceIdle, "begin", lambda idle: begun.append(idle))
    driver = make_driver(
        shared_model("qwen3"),
        num_blocks=64,
        max_batch_tokens=16,
        on_step=lambda index, info: reported.append((index, info)),
    )
    begun.clear()  # of the trial
    drive(driver, make_prompts((10, 20)), max_new_tokens=[3, 4])
    assert begun == [driver._record.idle]  # what the device waits for during `on_step` counts
    assert [info for _, info in reported] == driver.steps
    # Ten tokens of one and six of the other; its other 14; then what is left of each, in one burst.
    assert [(s.kind, s.num_requests, s.num_steps, s.num_tokens, s.num_finished) for s in driver.steps] == [
        ("prefill", 2, 1, 16, 0),
        ("prefill", 1, 1, 14, 0),
        ("decode", 2, 3, 2 + 3, 2),
    ]
    assert [(s.bucket, s.num_padding) for s in driver.steps] == [(None, 0), (None, 0), (2, 1)]
    for step in driver.steps:
        assert step.start_s < step.end_s
        assert step.duration_s == step.end_s - step.start_s
    assert driver.steps[0].cache_used_fraction == pytest.approx((2 + 1) / 64)
    assert driver.steps[-1].cache_used_fraction == pytest.approx((2 + 3) / 64)


def test_step_indices_count_over_the_drivers_life_and_steps_over_a_drive(
    shared_model, make_driver, make_prompts
):
    """A burst counts all of its steps."""
    indices, settings = [], {"max_requests_per_batch": 1, "num_blocks": 64}
    driver = make_driver(shared_model("qwen3"), on_step=lambda index, info: indices.append(index), **settings)
    for _ in range(2):
        drive(driver, make_prompts((5, 5, 5)), max_new_tokens=4)
        assert [step.num_steps for step in driver.steps] == [1, 3] * 3
        assert [step.num_waiting for step in driver.steps] == [2, 2, 1, 1, 0, 0]
    assert indices == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21]


@pytest.mark.parametrize("num_blocks", [64, 20], ids=["roomy", "evicting"])
def test_times_of_a_request(shared_model, make_driver, prompts, num_blocks):
    """Whoever was admitted at first keeps the times of its first life, though it was evicted and read again."""
    driver = make_driver(shared_model("qwen3"), num_blocks=num_blocks)
    driver.add_requests(prompts)
    times = [completion.timings for completion in driver.drive_until_empty().values()]
    for one in times:
        assert one.submitted_s < one.scheduled_s < one.first_token_s <= one.finished_s
    first, last = driver.steps[0], driver.steps[-1]
    at_first = [one for one in times if one.scheduled_s == first.start_s]
    assert len(at_first) == first.num_requests
    assert {one.first_token_s for one in at_first} == {first.end_s}
    assert max(one.finished_s for one in times) == last.end_s
    was_evicted = max(step.num_waiting for step in driver.steps[1:]) > first.num_waiting
    assert was_evicted is (num_blocks == 20)


def test_a_fork_has_the_times_of_its_own_first_step(shared_model, make_driver, prompts):
    driver = make_driver(shared_model("qwen3"))
    driver.add_requests(prompts, num_generations=2)
    times = [completion.timings for completion in driver.drive_until_empty().values()]
    # Of a prompt of one token nothing is left to read.
    assert {one.scheduled_s for one in times[2::2]} == {driver.steps[0].start_s}
    assert {one.scheduled_s for one in times[3::2]} == {driver.steps[1].start_s}
    assert {one.finished_s for one in times} == {driver.steps[-1].end_s}


@pytest.mark.parametrize(
    "mode",
    [
        "eager",
        pytest.param("default", marks=pytest.mark.slow),
        pytest.param("cuda_graph", marks=pytest.mark.gpu),
        pytest.param("reduce_overhead", marks=pytest.mark.gpu),
    ],
)
def test_stats_go_on_over_a_larger_cache_and_other_weights(new_model, make_driver, prompts, mode):
    """Each of both comes with programs and graphs of its own, in place of those before; the check of each counts.

    A check replays seven steps, and a drive of twelve tokens eleven.
    """
    is_compiled, has_graphs = (
        COMPILE_MODES[mode].torch_mode is not None,
        COMPILE_MODES[mode].graphs is not None,
    )
    model = new_model("qwen3", num_hidden_layers=1, head_dim=16).to("cuda" if has_graphs else "cpu")
    driver = make_driver(model, compile_mode=mode, fusion="projections", buckets=(2,))
    assert driver.compile_stats == {}
    before, num_blocks = {"compile_s": 0.0, "capture_s": 0.0, "max_logit_error": 0.0}, []
    for num_times, prompt in enumerate((prompts[2], prompts[-1], prompts[-1]), start=1):
        if num_times == 3:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        drive(driver, [prompt])
        num_blocks.append(driver.resolved["num_blocks"])
        stats = driver.compile_stats
        assert stats["programs"] == num_times * is_compiled
        assert (stats["graphs"], stats["replays"]) == (has_graphs, num_times * (7 + 11) * has_graphs)
        assert (stats["recompiles"], stats["graph_breaks"]) == (0, 0)
        assert (stats["compile_s"] > before["compile_s"]) == is_compiled
        assert (stats["capture_s"] > before["capture_s"]) == (COMPILE_MODES[mode].graphs == "engine")
        assert stats["max_logit_error"] >= before["max_logit_error"]
        assert len(driver._record.checks) == num_times
        assert [result["bucket"] for result in driver.resolved["self_check_results"]] == [2]
        before = stats
    assert num_blocks[0] < num_blocks[1] == num_blocks[2]
    driver.close()
    assert driver.compile_stats == before | {"graphs": 0}
