from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from engine.cli.options import SECTIONS
from engine.core.settings import describe, load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """scripts/generate_docs.py as a module."""
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date(generator):
    stale = [str(path.relative_to(ROOT)) for path in generator.outdated()]
    assert not stale, f"{', '.join(stale)} is out of date; run `make docs`"


def test_every_setting_and_option_is_documented(generator):
    text = generator.settings_tables()
    for setting in describe():
        assert f"| `{setting.path[1]}` |" in text
        assert setting.flag is None or f"`{setting.flag}`" in text
    assert [name for name in SECTIONS if f"### [{name}]" not in text] == []


def test_every_command_is_documented(generator):
    headings = set(re.findall(r"^## (engine.*)$", generator.command_reference(), re.MULTILINE))
    assert headings >= {
        *("engine serve", "engine generate", "engine chat", "engine bench throughput"),
        *("engine config show", "engine plugins list", "engine plugins check"),
    }


def test_a_part_that_is_not_up_to_date_is_found(generator, tmp_path):
    for name in ("README.md", "docs/configuration.md", "docs/cli.md"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((ROOT / name).read_text().replace("`--max-running`", "`--max-walking`"))
    assert list(generator.outdated(tmp_path)) == [tmp_path / "docs/configuration.md"]


def test_results_are_a_table_of_what_was_compared(generator, tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    assert "None yet" in generator.results_table()
    measured = {"metric": "output", "value": 300.0, "unit": "tokens/s", "baseline": 100.0, "baseline_name": "other"}
    report = {
        "benchmark": "compare",
        "date": "2026-01-01",
        "machine": "a CPU",
        "commit": "abc",
        "rows": [measured, {**measured, "metric": "alone", "baseline": None, "baseline_name": None}],
    }
    (tmp_path / "one.json").write_text(json.dumps(report))
    rows = generator.results_table().splitlines()[2:]
    assert rows == [
        "| compare | output | 300 tokens/s | 100 tokens/s (other) | 3.00 x | a CPU, 2026-01-01, commit abc |"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid_and_say_how_to_run_them(example):
    assert f"engine serve --config examples/{example.name}" in example.read_text(encoding="utf-8")
    assert example.name in load_config(example).origins.values()


def test_the_file_in_the_configuration_page_is_valid(tmp_path):
    [block] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    file = tmp_path / "page.toml"
    file.write_text(block)
    assert load_config(file).config.attention.options == {"tile": 64}


def test_the_readme_plugin_keeps_its_contract(tmp_path):
    [block] = re.findall(r"```python\n(from engine\.core\.hooks.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(block, namespace)
    from engine.core.registry import load_plugins

    plugin = ModuleType("readme")
    vars(plugin).update(namespace)
    assert load_plugins(extra=[plugin]).schedulers.get("shortest").load() is namespace["ShortestFirst"]
