"""The lines of `engine top`, for terminals of several sizes."""

from __future__ import annotations

import re

import attrs
import pytest

from engine.cli.top.compute import figures
from engine.cli.top.figures import Figures
from engine.cli.top.screen import Line, State, lines
from engine.cli.top.server import Health
from engine.cli.top.units import duration, percent, rate, seconds, size
from tests.cli.top.scrapes import metrics, two_seconds

STATE = State("http://127.0.0.1:8000", "12:00:00", 2.0, 1754.0, Health(status="ok"))


def shown(replicas: int = 1, **options: bool) -> Figures:
    return figures(two_seconds(metrics(replicas=replicas, **options), metrics(2.0, replicas=replicas, **options)))


def text(screen: list[Line]) -> str:
    return "\n".join(line.text.rstrip() for line in screen)


def test_a_screen_of_80_columns_and_24_lines_shows_every_section_but_the_last() -> None:
    screen = lines(STATE, shown(), 80, 24)
    assert len(screen) <= 24
    assert max(len(line.text) for line in screen) <= 80
    assert (
        text(screen[:20])
        == """\
engine top  http://127.0.0.1:8000  ok  tiny  up 12 m 34 s    every 2 s  12:00:00

Requests   3 running   2 waiting (1 for a grammar)   5.00 finished/s
Tokens     400 generated/s   500 prompt/s   300 prompt/s cached   18.0 per step
p50 / p95  first token 20.0 ms / 38.0 ms   between tokens 10.0 ms / 19.0 ms
KV cache   [||||||::::          ] 30 % used, 20 % cached   hit rate 38 %

Phase     receive schedule submit wait commit  send idle prepare launch  sample
ms/step      1.00     1.00   12.0 2.00   1.00  1.00    -    2.00   8.00    1.00
share       5.0 %    5.0 %   60 % 10 %  5.0 % 5.0 % 10 %  (10 %) (40 %) (5.0 %)
Shares     HTTP 43 %   scheduling 18 %   device 39 %

Roofline   steps/s  ms/step  floor ms  of floor  bandwidth  FLOPs  GB/s  TFLOP/s
decode        45.0    10.00      5.00      50 %       50 %   20 %   500      200
prefill       5.00    10.00      5.00      50 %       50 %   20 %   500      200
all           50.0    10.00      5.00      50 %       25 %   10 %   250      100

Process        CPU   memory  threads       files
supervisor   1.0 %  256 MiB        5  20 of 1024
front end 0   50 %  256 MiB        5  20 of 1024"""
    )


def test_a_screen_of_120_columns_shows_more_of_each_line() -> None:
    wide = text(lines(STATE, shown(), 120, 50))
    assert max(map(len, wide.splitlines())) <= 120
    for part in ("3.00 declined/s", "stop 4.00/s", "about 25.0 evicted/s", "100 blocks", "GC  "):
        assert part in wide


def test_replicas_have_a_table_when_there_are_several() -> None:
    both = text(lines(STATE, shown(2), 120, None))
    assert "Replica" in both
    assert both.count("   up  ") == 2
    assert "Replica" not in text(lines(STATE, shown(), 120, None))


@pytest.mark.parametrize("height", range(1, 40))
def test_a_short_terminal_keeps_what_matters_most_and_names_the_rest(height: int) -> None:
    screen = lines(STATE, shown(8), 80, height)
    assert len(screen) <= height
    assert screen[0].style == "title"
    whole = lines(STATE, shown(8), 80, None)
    if 10 < height < len(whole):
        assert "Requests" in text(screen)
        assert "In a taller terminal: " in text(screen[-1:]) or "more" in text(screen[-2:])


def test_a_table_that_is_too_long_says_how_many_rows_are_missing() -> None:
    screen = text(lines(STATE, shown(30), 80, 40))
    assert "  and " in screen
    rows = len(re.findall(r"^\d+ +up ", screen, re.MULTILINE))
    missing = int(screen.partition("  and ")[2].split()[0])
    assert rows + missing == 30


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in range(1, 130):
        assert max(len(line.text) for line in lines(STATE, shown(2), width, 60)) <= width


def test_faults_and_restarts_are_warnings() -> None:
    state = STATE._replace(health=Health(status="degraded", faults=("replica 1: failed: it hangs",)))
    screen = lines(state, attrs.evolve(shown(), events=("front end 0 was restarted",)), 80, 24)
    assert [line.text for line in screen if line.style == "warning"] == [
        "replica 1: failed: it hangs",
        "front end 0 was restarted",
    ]
    assert "  degraded  " in screen[0].text


def test_a_server_that_does_not_answer_is_said_above_the_last_figures() -> None:
    screen = lines(STATE._replace(problem="it cannot be reached"), shown(), 80, 40)
    assert "  no answer  " in screen[0].text
    assert screen[1] == Line("it cannot be reached", "warning")
    assert "Requests" in text(screen)


def test_before_the_first_interval_the_screen_says_when_figures_come() -> None:
    assert "after 2 s" in text(lines(STATE, None, 80, 24))
    other = text(lines(STATE._replace(notice="another server answers now"), None, 80, 24))
    assert "another server" in other
    assert "after 2 s" not in other


def test_unknown_peaks_say_which_options_give_them() -> None:
    assert "--peak-bandwidth" in text(lines(STATE, shown(peaks=False), 80, None))
    assert "--no-roofline-metrics" in text(lines(STATE, shown(optional=False), 80, None))


def test_text_of_a_server_has_no_control_codes_of_the_terminal() -> None:
    evil = attrs.evolve(shown(), model="\x1b[2Jmodel", events=("\x1b]0;title\x07",))
    assert "\x1b" not in text(lines(STATE, evil, 120, None))


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [*map(rate, (0, 0.0123, 0.5, 4.567, 12.34, 1234.5))] == ["0", "0.012", "0.50", "4.57", "12.3", "1,234"]
    assert [*map(seconds, (2.1e-6, 0.0123, 0.9999, 61.5))] == ["2.10 us", "12.3 ms", "1.00 s", "61.5 s"]
    assert [*map(percent, (0, 0.004, 0.0996, 1.0))] == ["0 %", "0.4 %", "10 %", "100 %"]
    assert [*map(duration, (5, 754, 3661, 90061))] == ["5 s", "12 m 34 s", "1 h 1 m", "1 d 1 h"]
    assert [*map(size, (2048, 2**28, 3 * 2**30))] == ["2 KiB", "256 MiB", "3.00 GiB"]
