from __future__ import annotations

import logging

import pytest

from engine.server.shared.throttled_log import INTERVAL, ThrottledWarning


def test_a_warning_is_logged_at_once_and_then_with_the_number_of_times_per_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    warning = ThrottledWarning(logging.getLogger("test"), "lost: %d (%s)", lambda: now)
    warning.count(1, "first")
    for _ in range(5):
        warning.count(2, "later")
    assert caplog.messages == ["lost: 1 (first)"]
    now += INTERVAL
    warning.count(1, "last")
    assert caplog.messages == ["lost: 1 (first)", "lost: 11 (last)"]
