from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.cli.options import SECTIONS
from engine.core.config import describe, load_config
from engine.core.plugin_host import load_plugins
from engine.core.plugin_host.extension_points import EXTENSION_POINTS

ROOT = Path(__file__).resolve().parents[1]
READMES = [
    page
    for directory in ("benchmarks", "demo", "examples", "tests/sample_plugin")
    for page in (ROOT / directory).rglob("README.md")
]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *READMES])


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """scripts/generate_docs.py as a module, which makes each part once; it imports its neighbours."""
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PARTS = {name: (file, functools.cache(make)) for name, (file, make) in module.PARTS.items()}
    return module


def part(generator: ModuleType, name: str) -> str:
    """The text of a generated part."""
    _, make = generator.PARTS[name]
    return str(make())


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
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("engine.core.", "engine.testing."))
        for alias in node.names
        if f"from {node.module} import {alias.name}`" not in reference
    ]
    assert not missing


def declared_apis(source: str) -> Iterator[tuple[str, str]]:
    """(extension point, api) of each registration and each class of a plugin's source."""
    names = {contract.__name__: point.name for point in EXTENSION_POINTS for contract in point.contracts}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) if name in {point.hook for point in EXTENSION_POINTS}:
                for call in ast.walk(node):
                    if isinstance(call, ast.keyword) and call.arg == "api":
                        yield name.removeprefix("register_"), ast.literal_eval(call.value)
            case ast.ClassDef(bases=[ast.Name(id=base) | ast.Subscript(value=ast.Name(id=base)), *_]) if base in names:
                for one in node.body:
                    if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "api":
                        yield names[base], ast.literal_eval(one.value)


def test_examples_of_plugins_are_written_for_the_current_contracts() -> None:
    current = {point.name: point.api for point in EXTENSION_POINTS}
    found = [(place, *one) for place, source in sources_of_plugins().items() for one in declared_apis(source)]
    assert {"attention", "schedulers", "models", "speculators"} <= {name for _, name, _ in found}
    assert [one for one in found if one[2] != current[one[1]]] == []
    assert [place for place, source in sources_of_plugins().items() if ".page_size" in source] == []


def test_the_reference_has_what_a_public_class_inherits(generator: ModuleType) -> None:
    text = part(generator, "reference")
    factory = text.partition("### LayerFactory")[2].partition("\n### ")[0]
    for method in ("linear", "qkv", "lm_head", "experts", "shard", "all_reduce"):
        assert f"def {method}(self, " in factory
    assert "def __call__(self, run: ForwardPass, " in text.partition("### AttentionBlock")[2].partition("\n### ")[0]
    assert "rms_unit_offset: the same" in text.partition("### NormKind")[2].partition("\n### ")[0]


def test_every_setting_and_option_is_documented(generator: ModuleType) -> None:
    text = part(generator, "settings")
    for setting in describe():
        assert f"| `{setting.path[1]}` |" in text
        assert setting.flag is None or f"`{setting.flag}`" in text
    assert [name for name in SECTIONS if f"### [{name}]" not in text] == []


def test_every_command_is_documented(generator: ModuleType) -> None:
    headings = set(re.findall(r"^## (engine.*)$", part(generator, "commands"), re.MULTILINE))
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
    text = part(generator, "features")
    for registry in load_plugins().seams.values():
        for one in registry:
            if one.plugin.entry_point == "builtin":
                is_native = one.summary.startswith(generator.NATIVE)
                assert (f"`{one.name}`" if is_native else f"`{one.name}`: {one.summary}") in text


def test_a_part_without_content_is_empty(generator: ModuleType) -> None:
    text = "<!-- generated: x -->\nold\n<!-- end: x -->"
    assert generator.fill(text, "x", "") == "<!-- generated: x -->\n<!-- end: x -->"


def heading_ids(page: str) -> set[str]:
    """The anchors of the headings of a Markdown page, by GitHub's rule.

    An id is the heading in lower case, without punctuation and with hyphens for spaces; a repeated one gets a number.
    """
    ids: set[str] = set()
    seen: Counter[str] = Counter()
    without_code = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#{1,6} +(.*?) *$", without_code, re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)  # of a link
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        ids.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return ids


def test_heading_ids_are_those_of_github() -> None:
    page = """\
# A title: with `code_name`, [a link](x.md#y) & more

## Same
```sh
# a comment
```
## Same
### [section]
### engine bench --url
## Überblick
## Same
"""
    assert heading_ids(page) == {
        "a-title-with-code_name-a-link--more",
        *("same", "same-1", "same-2"),
        "section",
        "engine-bench---url",
        "überblick",
    }


def dead_links(page: Path) -> list[str]:
    """The links of a page to files and headings that are not there."""
    dead = []
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        if not target.startswith("https://") and not (
            file.exists() and (not anchor or anchor in heading_ids(file.read_text(encoding="utf-8")))
        ):
            dead.append(f"{target}#{anchor}" if anchor else target)
    return dead


def test_dead_links_are_those_to_missing_files_and_headings(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("## Two words\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[](#top) [](other.md#two-words) [](other.md) [](https://example.com/#x)"
        " [](#gone) [](other.md#top) [](missing.md#top) [](missing.md)"
    )
    assert dead_links(page) == ["#gone", "other.md#top", "missing.md#top", "missing.md"]


def test_pages_are_those_for_readers() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert names >= {
        "README.md",
        "docs/index.md",
        "benchmarks/json_schema_suite/README.md",
        "demo/engine-demo/README.md",
        "examples/third_party_models/README.md",
        "examples/third_party_speculator/README.md",
        "tests/sample_plugin/README.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_hold_no_marks_of_a_merge_conflict(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.startswith(("<<<<<<< ", ">>>>>>> "))]


def test_packages_to_install_are_those_of_the_extras() -> None:
    """By their own names: an index may have the engine in another version, or another program of that name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    requirements = {one for extra in extras.values() for one in extra if not one.startswith("pluggable-llm-engine")}
    commands = {
        (page.name, quoted)
        for page in PAGES
        for quoted in re.findall(r"pip install (?:-e )?'([^']+)'", page.read_text(encoding="utf-8"))
        if not quoted.startswith(".")  # a checkout
    }
    assert {page for page, _ in commands} >= {"executors.md", "profiling.md", "structured-output.md"}
    assert [(page, quoted) for page, quoted in sorted(commands) if quoted not in requirements] == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_valid_and_say_how_to_run_them(example: Any) -> None:
    assert f"engine serve --config examples/{example.name}" in example.read_text(encoding="utf-8")
    assert example.name in load_config(example).origins.values()


def test_the_file_in_the_configuration_page_is_valid(tmp_path: Path) -> None:
    [block] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(), re.DOTALL)
    file = tmp_path / "page.toml"
    file.write_text(block)
    assert load_config(file).config.attention.options == {"tile": 64}


def test_the_readme_quotes_the_load_of_the_performance_page(generator: ModuleType) -> None:
    loads = part(generator, "loads")
    [row] = re.findall(r"^\| 1000/1000 \|(.*)\|$", loads, re.MULTILINE)
    [commit] = re.findall(r"commit (\w+)\. Ceilings", loads)
    steady, *_, published, _ = (cell.strip() for cell in row.split("|"))
    [quoted] = re.findall(
        r"serves ([\d,]+) output tokens per second \([^)]*1000 in / 1000 out[^)]*commit (\w+); TensorRT-LLM publishes"
        r" ([\d,]+)\)",
        " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()),
    )
    assert quoted == (steady, commit, published)


def test_the_readme_plugin_keeps_its_contract(tmp_path: Path) -> None:
    [block] = re.findall(r"```python\n(# shortest\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(block, namespace)
    plugin = ModuleType("readme")
    vars(plugin).update(namespace)
    assert load_plugins(extra=[plugin]).schedulers.get("shortest").load() is namespace["ShortestFirst"]
