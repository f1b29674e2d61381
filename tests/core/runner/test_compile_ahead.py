"""What the first start of a configuration does beforehand, on one rank and on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.core.compilation.client import SHARED
from engine.core.config.tree import EngineConfig
from engine.core.distributed.rank_group import OneRank
from engine.core.runner import compile_ahead as module
from engine.core.runner.compile_ahead import compile_ahead, end_compile_ahead, tune_first_rank_first

CONFIG = EngineConfig()


class Rank(OneRank):
    """One of two ranks; notes what it calls."""

    ranks = 2

    def __init__(self, rank: int, log: list[Any]) -> None:
        self.rank = rank
        self.log = log

    def minimum(self, number: int) -> int:
        self.log.append("minimum")
        return number

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.log.append("alone")
        yield
        self.log.append("no longer alone")


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    @contextmanager
    def record_launches() -> Iterator[None]:
        calls.append("recording")
        yield

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "record_launches", record_launches)
    monkeypatch.setattr(module, "begin_tuning", lambda factory, directory: calls.append(factory))
    monkeypatch.setattr(module, "tune", lambda factory, directory: calls.append(f"tune {factory}"))
    monkeypatch.setattr(SHARED, "wait", lambda: calls.append("wait"))
    return calls


def test_the_first_start_tunes_and_records_and_later_ones_do_nothing(log: list[Any]) -> None:
    factories: list[Any] = ["target", "drafter"]
    compile_ahead(CONFIG, OneRank(), factories, lambda: log.append("launch"))
    assert log == ["target", "drafter", "recording", "launch"]
    end_compile_ahead(CONFIG)
    log.clear()
    compile_ahead(CONFIG, OneRank(), factories, lambda: log.append("launch"))
    assert log == []


def test_the_first_rank_records_alone_and_all_wait_for_it(log: list[Any]) -> None:
    compile_ahead(CONFIG, Rank(0, log), [], lambda: log.append("launch"))
    assert log == ["minimum", "alone", "recording", "launch", "no longer alone", "wait", "minimum"]
    log.clear()
    compile_ahead(CONFIG, Rank(1, log), [], lambda: log.append("launch"))
    assert log == ["minimum", "wait", "minimum"]


def test_a_start_goes_on_where_recording_fails(log: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("out of order")

    compile_ahead(CONFIG, Rank(0, log), [], fail)
    assert log[-2:] == ["wait", "minimum"]
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are compiled one after another, since they could not be recorded: out of order"
    ]


def test_the_first_rank_measures_and_the_others_then_find_its_results(log: list[Any]) -> None:
    factories: list[Any] = ["target", "drafter"]
    tune_first_rank_first(CONFIG, Rank(0, log), factories)
    assert log == ["tune target", "tune drafter", "minimum"]
    log.clear()
    tune_first_rank_first(CONFIG, Rank(1, log), factories)
    assert log == ["minimum", "tune target", "tune drafter"]
    log.clear()
    tune_first_rank_first(CONFIG, OneRank(), factories)
    assert log == ["tune target", "tune drafter"]
