"""The device's waiting time between bursts and batches of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from cbexp.engine import decoder
from cbexp.engine.burst import BurstRunner
from cbexp.engine.compile_modes import GRAPH_MODES
from cbexp.engine.device_idle import DeviceIdle
from cbexp.engine.paged_engine import PagedEngine
from cbexp.engine.step_loop import StepLoop
from tests.engine.driving import drive


@dataclass
class Event:
    at_ms: float
    is_over: bool = True

    def query(self):
        return self.is_over

    def synchronize(self):
        assert self.is_over

    def elapsed_time(self, end_event):
        assert self.is_over and end_event.is_over
        return end_event.at_ms - self.at_ms


def test_time_between_pieces_of_work_is_idle():
    idle = DeviceIdle()
    assert idle.share is None
    idle.begin()
    idle.add(Event(100), Event(190))
    assert idle.share == 0
    idle.add(Event(195), Event(290))
    assert idle.share == pytest.approx(5 / 190)


def test_time_between_drives_counts_as_neither():
    idle = DeviceIdle()
    idle.add(Event(100), Event(190))
    idle.begin()
    idle.add(Event(1000), Event(1005))
    idle.add(Event(1010), Event(1010))
    assert idle.share == pytest.approx(5 / (90 + 5 + 5))


def test_work_that_still_runs_is_counted_later_and_in_its_place():
    idle, end = DeviceIdle(), Event(190, is_over=False)
    idle.add(Event(100), end)
    idle.add(Event(200), Event(290))
    assert idle.share is None
    end.is_over = True
    assert idle.share == pytest.approx(10 / 190)


# In a whole drive: the wiring

PREFILL_MS, STEP_MS, HOST_MS = 100.0, 10.0, 1.0


@pytest.fixture
def device_clock(monkeypatch):
    """Events of a device on which a batch of prompts takes `PREFILL_MS` and a decode step `STEP_MS`.

    It waits `HOST_MS` for the host before each of them; whether a mode has graphs does not matter.
    """
    clock = SimpleNamespace(at_ms=0.0)

    def passing(owner, name, duration_ms, is_before=False):
        original = getattr(owner, name)

        def timed(self, *arguments):
            clock.at_ms += duration_ms(arguments) if is_before else 0
            result = original(self, *arguments)
            clock.at_ms += 0 if is_before else duration_ms(arguments)
            return result

        monkeypatch.setattr(owner, name, timed)

    passing(PagedEngine, "step", lambda arguments: HOST_MS, is_before=True)
    passing(PagedEngine, "_run_forward", lambda arguments: PREFILL_MS)
    passing(StepLoop, "run", lambda arguments: STEP_MS * arguments[1])
    monkeypatch.setattr(BurstRunner, "_record_event", lambda runner: Event(clock.at_ms))
    monkeypatch.setattr(decoder, "GRAPH_MODES", ("eager",))
    return clock


def expected_share(drives):
    """Of the steps of some drives: nothing is idle before the first of each."""
    batches = sum(step.bucket is None for steps in drives for step in steps)
    decode_steps = sum(step.num_steps for steps in drives for step in steps if step.bucket is not None)
    idle_ms = HOST_MS * sum(len(steps) - 1 for steps in drives)
    return idle_ms / (idle_ms + PREFILL_MS * batches + STEP_MS * decode_steps)


@pytest.mark.usefixtures("device_clock")
@pytest.mark.parametrize("settings", [{"num_blocks": 100}, {"num_blocks": 20}], ids=["roomy", "evicting"])
def test_a_drive_counts_every_burst_and_every_batch_of_prompts(shared_model, make_driver, prompts, settings):
    driver = make_driver(
        shared_model("qwen3"), max_requests_per_batch=3, max_batch_tokens=24, max_burst=4, **settings
    )
    drives = []
    for _ in range(2):
        drive(driver, prompts)
        drives.append(list(driver.steps))
        assert driver.compile_stats["device_idle_share"] == pytest.approx(expected_share(drives))
    assert min(sum(step.bucket is None for step in steps) for steps in drives) > 3
    assert min(sum(step.bucket is not None for step in steps) for steps in drives) > 3


def test_without_events_nothing_is_measured(shared_model, make_driver, prompts, monkeypatch):
    """As on a CPU; and in a mode without graphs, whose bursts have gaps that events do not show, nothing is told."""
    driver = make_driver(shared_model("qwen3"), num_blocks=100)
    drive(driver, prompts)
    assert driver.compile_stats["device_idle_share"] is None
    monkeypatch.setattr(decoder, "GRAPH_MODES", ("eager",))
    assert driver.compile_stats["device_idle_share"] is None


def test_a_mode_without_graphs_tells_no_share(shared_model, make_driver, prompts, device_clock, monkeypatch):
    driver = make_driver(shared_model("qwen3"), num_blocks=100)
    drive(driver, prompts)
    assert driver.compile_stats["device_idle_share"] is not None
    monkeypatch.setattr(decoder, "GRAPH_MODES", GRAPH_MODES)
    assert driver.compile_stats["device_idle_share"] is None
