from __future__ import annotations

import pytest

from engine.core import phase_timer
from engine.core.phase_timer import PhaseTimer


def test_phase_timer_adds_up_blocks_including_those_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr(phase_timer, "perf_counter", lambda: next(times))
    timer = PhaseTimer()
    with timer:
        pass
    assert timer.seconds == 1.0
    with pytest.raises(ValueError, match="x"), timer:
        raise ValueError("x")
    assert timer.seconds == 3.0
