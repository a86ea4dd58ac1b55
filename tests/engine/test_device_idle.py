"""The device's waiting time between bursts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cbexp.engine.device_idle import DeviceIdle


@dataclass
class Event:
    at_ms: float

    def elapsed_time(self, end_event):
        return end_event.at_ms - self.at_ms


def test_time_between_bursts_is_idle_and_prompts_are_neither():
    idle = DeviceIdle()
    assert idle.share is None
    idle.add(Event(100), Event(190))
    assert idle.share == 0
    idle.add(Event(195), Event(290))
    idle.interrupt()
    idle.add(Event(1000), Event(1005))
    idle.add(Event(1010), Event(1010))
    assert idle.share == pytest.approx((5 + 5) / (90 + 95 + 5 + 10))
