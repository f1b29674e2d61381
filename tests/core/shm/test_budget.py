"""The budget in _ring.c: how much a reader may spin for announcements."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from engine.core.shm.futex import SHARES, Budget, FutexSignals, native_part

pytestmark = pytest.mark.skipif(FutexSignals.refuses() is not None, reason=str(FutexSignals.refuses()))

US, MS = 1000, 1_000_000
ANNOUNCE = 400 * US
SHARE = 0.09


class Reader:
    """A budget, and a clock that only its calls move."""

    def __init__(self, share: float = SHARE, most: int = 2 * ANNOUNCE) -> None:
        self.budget = Budget(share=int(share * SHARES), most=most)
        self.address = ctypes.addressof(self.budget)
        self.now = 10**15

    def covers(self, ns: int) -> bool:
        return bool(native_part().budget_covers(self.address, self.now, ns))

    def pay(self, ns: int) -> None:
        native_part().budget_pay(self.address, ns)

    def spin(self, interval: int, spun: int, messages: int) -> tuple[int, int]:
        """Spin `spun` ns for each message, `interval` ns apart, that is covered; how many were, and ns in all."""
        covered = 0
        for _ in range(messages):
            self.now += interval
            if self.covers(ANNOUNCE):
                covered += 1
                self.now += spun
                self.pay(spun)
        return covered, covered * spun


def test_the_first_announcement_is_covered_and_what_is_saved_has_an_end() -> None:
    reader = Reader()
    assert reader.covers(2 * ANNOUNCE)
    reader.now += 10**12
    assert not reader.covers(2 * ANNOUNCE + 1)
    assert reader.covers(2 * ANNOUNCE)


def test_what_was_paid_comes_back_as_a_share_of_the_time() -> None:
    reader = Reader(share=0.25)
    assert reader.covers(2 * ANNOUNCE)
    reader.pay(2 * ANNOUNCE)
    assert not reader.covers(1)
    reader.now += 1024 * US
    assert reader.covers(256 * US)
    assert not reader.covers(256 * US + 1)


@pytest.mark.parametrize("interval", [2 * MS, 3 * MS, 4 * MS])
def test_decode_steps_are_all_covered(interval: Any) -> None:
    covered, _ = Reader().spin(interval, int(interval * SHARE * 0.95), 1000)
    assert covered == 1000


@pytest.mark.parametrize("interval", [50 * US, 300 * US, 2 * MS])
@pytest.mark.parametrize("spun", [40 * US, 200 * US, ANNOUNCE])
def test_no_more_than_the_share_is_spun_whatever_is_announced(interval: Any, spun: Any) -> None:
    reader = Reader()
    begin = reader.now
    covered, total = reader.spin(interval, spun, 2000)
    assert total <= (reader.now - begin) * SHARE + 2 * ANNOUNCE
    assert covered > 0


def test_steps_that_take_more_than_the_share_are_covered_in_part() -> None:
    covered, _ = Reader().spin(2 * MS, 300 * US, 1000)
    assert 550 < covered < 750


def test_a_spin_that_took_longer_than_there_was_leaves_no_debt() -> None:
    reader = Reader()
    assert reader.covers(ANNOUNCE)
    reader.pay(10**12)
    assert reader.budget.saved == 0


def test_no_arithmetic_overflows() -> None:
    reader = Reader(share=1, most=2 * 10**9)
    reader.now = 2**62
    assert reader.covers(2 * 10**9)
    reader.now = 2**63 - 1
    assert reader.covers(2 * 10**9)
