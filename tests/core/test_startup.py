from __future__ import annotations

import io
import itertools
from collections.abc import Callable

import pytest

from engine.core import startup_display
from engine.core.startup import Phases, Progress, sentence
from engine.core.startup_display import show_startup


def clock(*times: float) -> Callable[[], float]:
    left = iter(times)
    return lambda: next(left)


def test_phases_one_after_the_other() -> None:
    phases = Phases(clock=clock(0, 1, 3, 3, 7))
    with phases.phase("a"):
        pass
    with phases.phase("b"):
        pass
    assert phases.seconds == (("a", 2), ("b", 4))


def test_an_inner_phase_does_not_count_for_the_outer_one() -> None:
    phases = Phases(clock=clock(0, 0, 1, 4, 6))
    with phases.phase("outer"), phases.phase("inner"):
        pass
    assert phases.seconds == (("outer", 3), ("inner", 3))


def test_a_phase_that_comes_again_is_added_up_also_after_an_error() -> None:
    phases = Phases(clock=clock(0, 0, 1, 1, 3))
    with phases.phase("a"):
        pass
    with pytest.raises(ValueError, match="x"), phases.phase("a"):
        raise ValueError("x")
    assert phases.seconds == (("a", 3),)


def test_what_another_process_measured_is_included() -> None:
    phases = Phases(clock=clock(0, 0, 10))
    with phases.phase("executor"):
        phases.include([("weights", 6.0), ("graphs", 3.0)])
    assert phases.seconds == (("executor", 1.0), ("weights", 6.0), ("graphs", 3.0))
    assert sum(seconds for _, seconds in phases.seconds) == 10


def test_a_listener_is_told() -> None:
    told: list[Progress] = []
    phases = Phases(told.append, clock(0, 1, 3, 3))
    with phases.phase("weights"):
        phases.progress(5, 10)
    assert told == [Progress(phase="weights"), Progress(phase="weights", done=5, total=10, seconds=2)]


def test_sentences() -> None:
    assert sentence(Progress(phase="graphs")) == "graphs"
    assert sentence(Progress(phase="graphs", done=3, total=8, unit="batch sizes")) == "graphs: 3 of 8 batch sizes"
    half = Progress(phase="weights", done=12_300_000_000, total=16_100_000_000, seconds=4.0)
    assert sentence(half) == "weights: 12.3 of 16.1 GB, 3.1 GB/s"
    assert sentence(Progress(phase="weights", done=0, total=10**9)) == "weights: 0.0 of 1.0 GB"
    assert sentence(Progress(phase="graphs", rank=1)) == "rank 1: graphs"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_goes_away() -> None:
    terminal = Terminal()
    with show_startup(terminal) as listener:
        listener(Progress(phase="weights", done=10**9, total=2 * 10**9, seconds=1.0))
        assert terminal.getvalue() == "\r\x1b[2Kstarting: weights: 1.0 of 2.0 GB, 1.0 GB/s"
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_a_terminal_is_clean_after_an_error() -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="x"), show_startup(terminal):
        raise ValueError("x")
    assert terminal.getvalue() == "\r\x1b[2K"


def test_without_a_terminal_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0, 3)
    monkeypatch.setattr(startup_display.time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    with show_startup(stream) as listener:
        for done in range(4):
            listener(Progress(phase="weights", done=done * 10**9, total=4 * 10**9, seconds=done))
    assert stream.getvalue().splitlines() == [
        "starting: weights: 1.0 of 4.0 GB, 1.0 GB/s",
        "starting: weights: 3.0 of 4.0 GB, 1.0 GB/s",
    ]


def test_without_a_terminal_a_quick_start_says_nothing() -> None:
    stream = io.StringIO()
    with show_startup(stream) as listener:
        listener(Progress(phase="weights"))
    assert stream.getvalue() == ""


def test_lines_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_display, "INTERVAL", 0.0)
    stream = io.StringIO()
    with show_startup(stream, lines=False) as listener:
        listener(Progress(phase="weights"))
    assert stream.getvalue() == ""
