"""_rhythm.h: when a reader expects the next message, from what it is told alone."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable

import pytest

from engine.core.shm.futex import SHARES, FutexSignals, Rhythm, Window, native_part

pytestmark = pytest.mark.skipif(FutexSignals.refuses() is not None, reason=str(FutexSignals.refuses()))

US, MS = 1000, 1_000_000
KEPT = 16
WINDOW_MOST = 500 * US
SHARE = 0.08


class Reader:
    """A rhythm, and a clock that only messages move."""

    def __init__(self, share: float = SHARE) -> None:
        self.rhythm = Rhythm(share=int(share * SHARES))
        self.address = ctypes.addressof(self.rhythm)
        self.count = 0
        self.now = 10**15

    def hear(self, intervals: Iterable[int]) -> None:
        for interval in intervals:
            self.count += 1
            self.now += interval
            native_part().rhythm_hear(self.address, self.count, self.now)

    def sleep(self, lateness: Iterable[int]) -> None:
        for late in lateness:
            native_part().rhythm_woke(self.address, self.now, self.now + late)

    def window(self, after: int = 0) -> tuple[int, int, int, int] | None:
        """Wake, begin and end in ns from the last message on, and what may be spun; `after` the last message."""
        window = Window()
        if not native_part().rhythm_expect(self.address, self.now + after, ctypes.addressof(window)):
            return None
        return (*(moment - self.now for moment in (window.wake, window.start, window.to)), window.left)


def jitter(interval: int, spread: int, count: int = 3 * KEPT, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [interval + dice.randint(-spread // 2, spread // 2) for _ in range(count)]


@pytest.mark.parametrize("interval", [100 * US, 300 * US, 1 * MS, 4 * MS, 40 * MS])
@pytest.mark.parametrize("spread", [0, 0.02, 0.05])
def test_regular_messages_have_a_window_of_the_share_around_the_next(interval, spread):
    reader = Reader()
    reader.hear(jitter(interval, min(int(interval * spread), WINDOW_MOST // 2)))
    found = reader.window()
    assert found is not None
    wake, begin, end, left = found
    intervals = list(reader.rhythm.intervals.ns)
    assert wake == begin  # no sleep was ever late
    assert begin <= min(intervals)
    assert end >= max(intervals)
    assert end - begin == left <= min(interval * (1 + spread) * SHARE, WINDOW_MOST)


def test_the_front_of_a_window_is_no_wider_than_the_spread_needs():
    reader = Reader()
    reader.hear([4 * MS] * (KEPT + 1))
    found = reader.window()
    assert found is not None
    assert 0 < 4 * MS - found[1] <= (found[2] - found[1]) / 10


@pytest.mark.parametrize("seed", range(20))
def test_irregular_messages_have_none(seed):
    dice = random.Random(seed)
    uniform, random_arrivals = Reader(), Reader()
    uniform.hear(dice.randint(1 * MS, 8 * MS) for _ in range(200))
    random_arrivals.hear(int(dice.expovariate(1 / (4 * MS))) for _ in range(200))
    assert uniform.window() is None
    assert random_arrivals.window() is None


def test_too_few_messages_have_none():
    reader = Reader()
    reader.hear([4 * MS] * KEPT)  # one interval less
    assert reader.window() is None
    reader.hear([4 * MS])
    assert reader.window() is not None


def test_a_share_of_nothing_has_none():
    reader = Reader(share=0)
    reader.hear([4 * MS] * 50)
    assert reader.window() is None


def test_a_pause_is_expected_by_nobody_and_forgotten_at_once():
    reader = Reader()
    reader.hear([4 * MS] * 20)
    found = reader.window()
    assert found is not None
    end = found[2]
    assert reader.window(after=end - 1) == found
    assert reader.window(after=end) is None
    assert reader.window(after=10**10) is None
    reader.hear([10**10])
    assert reader.window() == found


def test_what_was_spun_is_not_spun_again():
    reader = Reader()
    reader.hear([4 * MS] * 20)
    whole = reader.window()
    assert whole is not None
    reader.rhythm.spun = whole[3] - 1
    assert reader.window() == (*whole[:3], 1)
    reader.rhythm.spun = whole[3]
    assert reader.window() is None
    reader.hear([4 * MS])
    assert reader.window() == whole


def test_misses_end_it_and_a_new_rhythm_begins_it_again():
    reader = Reader()
    reader.hear([4 * MS] * 20)
    missed = 0
    while reader.window() is not None and missed < 100:
        missed += 1
        reader.hear([6 * MS + missed * MS])
    assert missed <= KEPT // 2 + 1
    reader.hear([5 * MS] * (KEPT // 2))
    found = reader.window()
    assert found is not None
    assert found[1] < 5 * MS < found[2]


def test_an_outlier_moves_nothing():
    reader = Reader()
    reader.hear([4 * MS] * 20)
    found = reader.window()
    reader.hear([90 * MS, 4 * MS, 5 * MS])
    reader.sleep([2 * MS])
    reader.sleep([0] * (KEPT - 1))
    assert reader.window() == found


def test_it_wakes_as_much_earlier_as_sleeps_were_late():
    reader = Reader()
    reader.hear([4 * MS] * 20)
    reader.sleep([60 * US, 70 * US] * KEPT)
    found = reader.window()
    assert found is not None
    assert found[1] - found[0] == 70 * US
    reader.sleep([60 * US, 400 * US, 60 * US, 60 * US] * KEPT)  # too rare to be awake 340 us too early each time
    found = reader.window()
    assert found is not None
    assert found[1] - found[0] == 60 * US


def test_sleeps_that_are_later_than_the_interval_is_long_leave_time_to_sleep():
    reader = Reader()
    reader.hear([300 * US] * 20)
    reader.sleep([5 * MS] * KEPT)
    found = reader.window()
    assert found is not None
    assert 0 < found[0] < found[1] - 100 * US


def test_a_wait_that_begins_too_late_to_sleep_spins_only_if_that_reaches_the_window():
    reader = Reader()
    reader.hear([4 * MS] * 20)
    reader.sleep([1 * MS] * KEPT)
    found = reader.window()
    assert found is not None
    wake, begin, _, left = found
    assert reader.window(after=wake - 1) is not None
    assert reader.window(after=wake) is None
    assert reader.window(after=begin - left) is None
    assert reader.window(after=begin - left + 1) == found
    assert reader.window(after=begin + left // 2) == found


def test_messages_that_came_together_are_no_interval():
    reader = Reader()
    reader.hear([4 * MS] * 20)
    kept = reader.rhythm.intervals.count
    reader.count += 2  # two came while it was busy
    reader.hear([12 * MS])
    assert reader.rhythm.intervals.count == kept
    reader.hear([4 * MS])
    assert reader.rhythm.intervals.count == kept + 1
    native_part().rhythm_hear(reader.address, reader.count, reader.now)  # asked twice about the same message
    assert reader.rhythm.intervals.count == kept + 1


def test_no_arithmetic_overflows():
    reader = Reader(share=1)
    reader.hear([2**61 // KEPT] * (KEPT + 1))
    found = reader.window()
    assert found is not None
    assert found[2] - found[1] == WINDOW_MOST
    reader.hear([0] * 50)
    assert reader.window() is None
