from __future__ import annotations

import io
import itertools
from collections.abc import Callable

import pytest

from engine.core import startup_display
from engine.core.startup import Phases, Progress, format_progress
from engine.core.startup_display import show_startup


def clock(*times: float) -> Callable[[], float]:
    left = iter(times)
    return lambda: next(left)


def test_phases_measures_consecutive_phases() -> None:
    phases = Phases(clock=clock(0, 1, 3, 3, 7))
    with phases.phase("a"):
        pass
    with phases.phase("b"):
        pass
    assert phases.seconds == (("a", 2), ("b", 4))


def test_phases_subtracts_nested_phases_from_the_outer_one() -> None:
    phases = Phases(clock=clock(0, 0, 1, 4, 6))
    with phases.phase("outer"), phases.phase("inner"):
        pass
    assert phases.seconds == (("outer", 3), ("inner", 3))


def test_phases_adds_up_a_repeated_phase_even_if_it_raises() -> None:
    phases = Phases(clock=clock(0, 0, 1, 1, 3))
    with phases.phase("a"):
        pass
    with pytest.raises(ValueError, match="x"), phases.phase("a"):
        raise ValueError("x")
    assert phases.seconds == (("a", 3),)


def test_include_subtracts_phases_of_another_process() -> None:
    phases = Phases(clock=clock(0, 0, 10))
    with phases.phase("executor"):
        phases.include([("weights", 6.0), ("graphs", 3.0)])
    assert phases.seconds == (("executor", 1.0), ("weights", 6.0), ("graphs", 3.0))
    assert sum(seconds for _, seconds in phases.seconds) == 10


def test_listener_gets_begin_and_progress_of_a_phase() -> None:
    reported: list[Progress] = []
    phases = Phases(reported.append, clock(0, 1, 3, 3))
    with phases.phase("weights"):
        phases.progress(5, 10)
    assert reported == [Progress(phase="weights"), Progress(phase="weights", done=5, total=10, seconds=2)]


def test_format_progress_names_phase_amount_and_speed() -> None:
    assert format_progress(Progress(phase="graphs")) == "graphs"
    assert (
        format_progress(Progress(phase="graphs", done=3, total=8, unit="batch sizes")) == "graphs: 3 of 8 batch sizes"
    )
    half = Progress(phase="weights", done=12_300_000_000, total=16_100_000_000, seconds=4.0)
    assert format_progress(half) == "weights: 12.3 of 16.1 GB, 3.1 GB/s"
    assert format_progress(Progress(phase="weights", done=0, total=10**9)) == "weights: 0.0 of 1.0 GB"
    assert format_progress(Progress(phase="graphs", rank=1)) == "rank 1: graphs"


@pytest.mark.parametrize(
    ("done", "rate", "text"),
    [
        (431_000_000, 45.1e6, "431 MB of 1.52 GB (28%), 45.1 MB/s, 24 s left"),
        (0, 0.0, "0 B of 1.52 GB (0%), waiting"),
        (1_000, 100e3, "1 kB of 1.52 GB (0%), 100 kB/s, 4 h 13 min left"),
        (1_000, 10.0, "1 kB of 1.52 GB (0%), 10 B/s"),
        (1_518_400_000, 12e6, "1.52 GB of 1.52 GB (100%), 12 MB/s, 0 s left"),
        (1_519_000_000, 12e6, "1.52 GB of 1.52 GB (100%)"),
    ],
)
def test_format_progress_of_a_download_names_share_speed_and_time_left(done: int, rate: float, text: str) -> None:
    assert format_progress(Progress(phase="x", done=done, total=1_519_000_000, rate=rate)) == f"x: {text}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_one_line_and_erases_it() -> None:
    terminal = Terminal()
    with show_startup(terminal) as listener:
        listener(Progress(phase="weights", done=10**9, total=2 * 10**9, seconds=1.0))
        assert terminal.getvalue() == "\r\x1b[2Kstarting: weights: 1.0 of 2.0 GB, 1.0 GB/s"
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_terminal_line_is_erased_after_an_error() -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="x"), show_startup(terminal):
        raise ValueError("x")
    assert terminal.getvalue() == "\r\x1b[2K"


def test_show_startup_prints_a_line_per_interval_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_show_startup_prints_nothing_for_a_fast_start_without_a_terminal() -> None:
    stream = io.StringIO()
    with show_startup(stream) as listener:
        listener(Progress(phase="weights"))
    assert stream.getvalue() == ""


def test_show_startup_prints_only_downloads_when_lines_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_display, "INTERVAL", 0.0)
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(startup_display.time, "monotonic", lambda: next(seconds))
    terminal = Terminal()
    with show_startup(terminal, lines=False, live=False, prefix="") as listener:
        listener(Progress(phase="weights"))
        for done in range(6):
            listener(Progress(phase="model", done=min(done, 4), total=4, rate=1.0))
    assert terminal.getvalue().splitlines() == [
        "model: 0 B of 4 B (0%), 1 B/s, 4 s left",
        "model: 3 B of 4 B (75%), 1 B/s, 1 s left",
        "model: 4 B of 4 B (100%)",
    ]
