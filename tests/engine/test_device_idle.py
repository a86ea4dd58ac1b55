"""The device's waiting time between bursts and batches of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cbexp.engine.device_idle import DeviceIdle


@dataclass
class Event:
    at_ms: float
    is_over: bool = True

    def query(self):
        return self.is_over

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
