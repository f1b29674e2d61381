"""Waiting for a step with drafts: asleep until shortly before its end."""

from __future__ import annotations

import pytest

from engine.core.runner.close_wait import CloseWait

CHECK = 2e-6
"""Seconds that asking takes here."""


class Device:
    """A clock, and steps that end at a known time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.end = 0.0
        self.asked = 0
        self.waiting = CloseWait(clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ready(self) -> bool:
        self.asked += 1
        self.now += CHECK
        return self.now >= self.end

    def step(self, seconds: float, kind: str = "a") -> float:
        """Run a step; returns by how much the host was late."""
        launched, self.end, self.asked = self.now, self.now + seconds, 0
        if not self.waiting.wait(kind, launched, self.ready):
            self.now = max(self.now, self.end + 150e-6)  # the caller sleeps until the device wakes it
            self.waiting.ended(kind, launched)
        late = self.now - self.end
        self.now += 1e-3
        return late


def test_the_first_step_of_a_kind_is_left_to_the_caller() -> None:
    device = Device()
    assert device.step(5e-3) > 100e-6
    assert device.asked == 0
    assert device.step(5e-3) < 10e-6
    assert device.step(9e-3, "b") > 100e-6


@pytest.mark.parametrize("drift", [1.0, 1.002, 0.998])
def test_the_host_notices_the_end_at_once_and_asks_for_a_short_time_only(drift: float) -> None:
    device, seconds = Device(), 5e-3
    device.step(seconds)
    for _ in range(200):
        seconds *= drift
        assert device.step(seconds) < 300e-6
        assert device.asked * CHECK < 700e-6
    assert device.step(seconds) < 30e-6


def test_a_step_much_longer_than_expected_is_left_to_the_caller() -> None:
    device = Device()
    for _ in range(3):
        device.step(5e-3)
    device.step(50e-3)
    assert device.asked * CHECK < 700e-6


def test_steps_that_become_much_shorter_are_caught_up_with() -> None:
    device = Device()
    for _ in range(3):
        device.step(5e-3)
    late = [device.step(2e-3) for _ in range(80)]
    assert late[-1] < 30e-6
