from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.cli.options import SECTIONS
from engine.core.config.load import describe, load_config
from engine.core.plugin_host import load_plugins

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """scripts/generate_docs.py as a module; it imports its neighbours."""
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date(generator: ModuleType) -> None:
    stale = [str(path.relative_to(ROOT)) for path in generator.outdated()]
    assert not stale, f"{', '.join(stale)} is out of date; run `make docs`"


def sources_of_plugins() -> dict[str, str]:
    """Python that plugin authors read: the examples of pages, and of packages."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("plugins", "kernels", "tutorial"))]
    found = {
        f"{page.name}, block {number}": source
        for page in pages
        for number, source in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    }
    packages = [ROOT / "examples", ROOT / "tests" / "sample_plugin"]
    files = [file for package in packages for file in package.rglob("*.py")]
    return found | {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def test_the_reference_has_every_contract_that_an_example_imports() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    missing = [
        f"{place}: from {node.module} import {alias.name}"
        for place, source in sources_of_plugins().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engine.core.")
        for alias in node.names
        if f"from {node.module} import {alias.name}`" not in reference
    ]
    assert not missing


def test_the_reference_has_what_a_public_class_inherits(generator: ModuleType) -> None:
    text = generator.contract_reference()
    factory = text.partition("### LayerFactory")[2].partition("\n### ")[0]
    for method in ("linear", "qkv", "lm_head", "experts", "shard", "all_reduce"):
        assert f"def {method}(self, " in factory
    assert "def __call__(self, run: ForwardPass, " in text.partition("### AttentionBlock")[2].partition("\n### ")[0]
    assert "rms_unit_offset: the same" in text.partition("### NormKind")[2].partition("\n### ")[0]


def test_every_setting_and_option_is_documented(generator: ModuleType) -> None:
    text = generator.settings_tables()
    for setting in describe():
        assert f"| `{setting.path[1]}` |" in text
        assert setting.flag is None or f"`{setting.flag}`" in text
    assert [name for name in SECTIONS if f"### [{name}]" not in text] == []


def test_every_command_is_documented(generator: ModuleType) -> None:
    headings = set(re.findall(r"^## (engine.*)$", generator.command_reference(), re.MULTILINE))
    assert headings >= {
        *("engine serve", "engine generate", "engine chat", "engine quantize"),
        *(f"engine bench {name}" for name in ("throughput", "latency", "serve", "startup")),
        *("engine config show", "engine plugins list", "engine plugins check"),
    }


def test_a_part_that_is_not_up_to_date_is_found(generator: ModuleType, tmp_path: Path) -> None:
    for name in {file for file, _ in generator.PARTS.values()}:
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((ROOT / name).read_text().replace("`--max-running`", "`--max-walking`"))
    assert list(generator.outdated(tmp_path)) == [tmp_path / "docs/configuration.md"]


def test_the_features_are_those_of_the_registry(generator: ModuleType) -> None:
    text = generator.features_table()
    for registry in load_plugins().seams.values():
        for one in registry:
            if one.plugin.entry_point == "builtin":
                is_native = one.summary.startswith(generator.NATIVE)
                assert (f"`{one.name}`" if is_native else f"`{one.name}`: {one.summary}") in text


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
    text = "<!-- generated: x -->\nold\n<!-- end: x -->"
    assert generator.fill(text, "x", "") == "<!-- generated: x -->\n<!-- end: x -->"


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
    assert "Qwen" not in made
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
    write_report(tmp_path / "h200-startup-a.json", [{"metric": "imports", "value": 1.0}])
    write_report(tmp_path / "h200-startup-b.json", [{"metric": "imports", "value": 2.0}])
    assert generator.startup_table().splitlines()[-3:] == ["|  | a | b |", "| --- | --- | --- |", "| imports | 1 | 2 |"]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Any) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid_and_say_how_to_run_them(example: Any) -> None:
    assert f"engine serve --config examples/{example.name}" in example.read_text(encoding="utf-8")
    assert example.name in load_config(example).origins.values()


def test_the_file_in_the_configuration_page_is_valid(tmp_path: Path) -> None:
    [block] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    file = tmp_path / "page.toml"
    file.write_text(block)
    assert load_config(file).config.attention.options == {"tile": 64}


def test_the_readme_plugin_keeps_its_contract(tmp_path: Path) -> None:
    [block] = re.findall(r"```python\n(# shortest\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(block, namespace)
    plugin = ModuleType("readme")
    vars(plugin).update(namespace)
    assert load_plugins(extra=[plugin]).schedulers.get("shortest").load() is namespace["ShortestFirst"]
