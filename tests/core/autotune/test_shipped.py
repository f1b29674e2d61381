"""Tuning results that come with the package: used where nothing else is known, and only where they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from engine.core.autotune import cache as cache_module, shipped
from engine.core.autotune.cache import TuningCache
from engine.core.autotune.results import TuningResult
from engine.core.autotune.shipped import DIRECTORY, load_shipped, store_shipped
from engine.core.autotune.task import TuningTask
from engine.core.autotune.tuner import tune_tasks
from engine.core.layers.skinny_linear import SkinnyGemm
from engine.plugins.quant.w8a8_tuning import W8A8Op
from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

MACHINE = {"device": "GPU 1 / 80 GB", "pytorch": "1", "triton": "2"}
RESULT = TuningResult(
    op="sum", rows=4, version="1", candidate="left", seconds=2e-6, default="right", default_seconds=float("inf")
)


class Op:
    """Has two candidates, of which the timer prefers the default."""

    key, version = "sum", "1"

    def __init__(self) -> None:
        self.chosen: list[str] = []

    def candidates(self, rows: int) -> list[str]:
        return ["right", "left"]

    def refine(self, rows: int, ranked: Any) -> list[str]:
        return []

    def name(self, candidate: str) -> str:
        return candidate

    def choose(self, rows: int, candidate: str) -> None:
        self.chosen.append(candidate)


class Timer:
    """Says that all candidates are equally fast."""

    def prepare(self, wanted: Any) -> None:
        pass

    def seconds(self, task: Any, candidate: str) -> float:
        return 1.0


def tune(directory: Path) -> tuple[list[str], int]:
    """What is chosen, and how many tasks are measured."""
    op: Any = Op()
    report = tune_tasks([TuningTask(rows=4, ops=[op])], TuningCache(directory, MACHINE), Timer())
    assert [result.candidate for result in report.results] == op.chosen
    return op.chosen, report.measured


@pytest.fixture
def shipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes results as if they came with the package."""
    directory = tmp_path / "choices"
    monkeypatch.setattr(cache_module, "load_shipped", lambda machine: load_shipped(machine, directory))

    def ship(*results: TuningResult, machine: Any = MACHINE) -> None:
        store_shipped(machine, results, directory)

    return ship


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    other = evolve(RESULT, version="2", rows=8)
    path = store_shipped(MACHINE, [other, RESULT], tmp_path)
    assert path.name == "GPU-1-80-GB.json"
    loaded = load_shipped(MACHINE, tmp_path)
    assert {key: (one.version, one.candidate) for key, one in loaded.items()} == {
        ("sum", 4): ("1", "left"),
        ("sum", 8): ("2", "left"),
    }
    assert str(loaded["sum", 4]) == "sum, 4 rows: left"
    assert load_shipped(MACHINE | {"pytorch": "other"}, tmp_path)
    assert load_shipped(MACHINE | {"triton": "other"}, tmp_path) == {}
    assert load_shipped(MACHINE | {"device": "other"}, tmp_path) == {}


def test_a_shipped_result_is_used_without_a_measurement_and_not_stored(tmp_path: Path, shipping: Any) -> None:
    shipping(RESULT)
    assert tune(tmp_path) == (["left"], 0)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("outdated", [evolve(RESULT, version="0"), evolve(RESULT, candidate="gone")])
def test_an_outdated_shipped_result_is_measured_again(outdated: TuningResult, tmp_path: Path, shipping: Any) -> None:
    shipping(outdated)
    assert tune(tmp_path) == (["right"], 1)


def test_results_of_the_machine_itself_take_precedence_as_long_as_they_hold(tmp_path: Path, shipping: Any) -> None:
    assert tune(tmp_path) == (["right"], 1)
    shipping(RESULT)
    assert tune(tmp_path) == (["right"], 0)
    TuningCache(tmp_path, MACHINE).store({("sum", 4): evolve(RESULT, version="0", candidate="right")})
    assert tune(tmp_path) == (["left"], 0)


def shipped_files() -> list[Path]:
    """The files of the package: one or more."""
    found = list(DIRECTORY.glob("*.json"))
    assert found, f"there are no results in {DIRECTORY}"
    return found


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    for path in shipped_files():
        machine = shipped.json.loads(path.read_text())["machine"]
        results = load_shipped(machine)
        assert results
        assert store_shipped(machine, results.values(), tmp_path).read_text() == path.read_text()


def test_shipped_results_are_of_the_current_kernels() -> None:
    """Change the versions in the files to those of the classes if the kernels compute as before; else tune again."""
    classes: dict[str, Any] = {"w8a8": W8A8Op, "weight-only": WeightOnlyOp}
    for path in shipped_files():
        for result in load_shipped(shipped.json.loads(path.read_text())["machine"]).values():
            op = classes.get(result.op.partition(" ")[0], SkinnyGemm)
            assert result.version == op.version.fget(object.__new__(op)), f"{op.__name__} of {path.name}"
