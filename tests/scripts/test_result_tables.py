"""The tables that scripts/result_tables.py makes of benchmark results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/result_tables.py as a module; it imports its neighbours."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("result_tables")


def write_report(file: Any, rows: Any, **settings: Any) -> None:
    report = {
        "machine": "a GPU",
        "date": "2026-01-01",
        "commit": "abc",
        "versions": {"torch": "9"},
        "settings": {"ceilings": "a copy", "model": "llama-3.1-8b", **settings},
        "rows": [{"case": None, "share": None, **row} for row in rows],
    }
    file.write_text(json.dumps(report))


def test_performance_pages_have_only_tables_with_results(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    parts = (
        generator.compared_tables,
        generator.served_tables,
        generator.startup_table,
        generator.ablation_table,
        generator.perplexity_table,
    )
    assert [part() for part in parts] == [""] * len(parts)


def test_the_engine_is_compared_with_transformers(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    assert generator.transformers_table() == ""
    measured = {
        "metric": "32 requests",
        "value": 300.0,
        "unit": "tokens/s",
        "baseline": 100.0,
        "baseline_name": "other",
    }
    alone = {**measured, "metric": "alone", "baseline": None, "baseline_name": None}
    write_report(tmp_path / "cpu-transformers.json", [measured, alone])
    assert generator.transformers_table().splitlines()[-1] == "| 32 requests | 300 | 100 | 3.00 x |"
    assert "alone" not in generator.transformers_table()


def test_results_stand_beside_the_references(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    load = "1000 requests, 512 in / 256 out"
    rows = [
        {"metric": "decode step", "case": "batch 1", "value": 3.8, "share": 0.923},
        {"metric": "output tokens a second", "case": load, "value": 19894.0},
        {"metric": "schedule, of a decode step", "case": "batch 1", "value": 1.0},
    ]
    write_report(tmp_path / "h200-llama-3.1-8b-none.json", rows)
    made = generator.compared_tables()
    assert "### Llama-3.1-8B, bfloat16" in made
    assert "### Qwen" not in made
    assert "| decode step, batch 1, ms | 3.8 | 4.91 | 4.76 | 1.25 x | 92% |" in made
    assert f"| output tokens a second, {load}, tokens/s | 19,894 | 9,850 | 9,947 | 2.00 x |  |" in made
    assert "schedule" not in made

    rows = [{"metric": "TPOT p50", "case": "concurrency 256", "value": 4.68}]
    write_report(tmp_path / "h200-serve-qwen3-0.6b.json", rows)
    assert "| TPOT p50, concurrency 256, ms | 4.68 | 9.36 | 2.00 x |  |" in generator.served_tables()


def test_ablation_and_start_up_are_tables(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    rows = [
        {"metric": "decode step, batch 1", "unit": "ms", "case": "as shipped", "value": 4.0},
        {"metric": "decode step, batch 32", "unit": "ms", "case": "as shipped", "value": 5.0},
        {"metric": "decode step, batch 1", "unit": "ms", "case": "no graphs", "value": 9.0},
    ]
    write_report(tmp_path / "h200-ablation.json", rows)
    assert generator.ablation_table().splitlines()[-2:] == ["| as shipped | 4 | 5 |", "| no graphs | 9 |  |"]
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        row = {"metric": "imports", "case": "first start", "value": seconds}
        write_report(tmp_path / f"h200-startup-{name}.json", [row, row | {"case": "later start", "value": seconds / 2}])
    assert generator.startup_table().splitlines()[-3:] == [
        "|  | a, first start | a, later start | b, first start | b, later start |",
        "| --- | --- | --- | --- | --- |",
        "| imports | 1 | 0.5 | 2 | 1 |",
    ]


def test_perplexities_are_a_table(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    values = {("bf16", "perplexity"): 10.0, ("bf16", "size"): 8.0, ("RTN", "perplexity"): 10.5, ("RTN", "size"): 2.5}
    rows = [{"case": case, "metric": name, "value": value} for (case, name), value in values.items()]
    settings = {"calibration": "some text", "arithmetic": "float32", "refused": {"fp8 KV cache": "no"}}
    write_report(tmp_path / "cpu-quant-perplexity.json", rows, **settings)
    assert generator.perplexity_table().splitlines()[-3:] == [
        "| bf16 | 10.000 | +0.00% | 8.0 |",
        "| RTN | 10.500 | +5.00% | 2.5 |",
        "| fp8 KV cache | not measured |  |  |",
    ]
