"""The rules of the tree: who imports whom, what core does not know, what is packaged, what is documented and tested."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core import hooks
from engine.core.plugin_host import load_plugins
from engine.plugins import BUILTINS

ROOT = Path(__file__).parent.parent
PACKAGES = ("cli", "core", "demo", "ops", "plugins", "quantize", "server", "testing")
ALLOWED: dict[str, tuple[str, ...]] = {
    "ops": ("core", "ops"),
    "core": ("core", "ops"),
    "demo": ("demo",),
    "plugins": ("core", "ops", "plugins"),
    "quantize": ("core", "plugins", "quantize"),
    "server": ("core", "server"),
    "testing": ("core", "testing"),
    "cli": PACKAGES,
}
"""Package -> packages it may import."""

NO_PLUGIN_NAMES = {
    ("attention/base.py", "none"): "AttentionBackend.graphs",
    ("weights/checkpoint.py", "none"): "model.generation_config",
    ("config/tree.py", "none"): "model.generation_config",
    ("config/tree.py", "fp8"): "a short name of a type in cache.dtype",
    ("layers/factory.py", "none"): "LinearSpec.parallel",
    ("layers/linear.py", "none"): "LinearSpec.parallel",
    ("layers/matmul.py", "none"): "oneDNN's post-operation",
    ("autotune/cache.py", "triton"): "the name of a package in a file's key",
    ("quant/base.py", "none"): "LinearSpec.parallel",
    ("plugin_host/selection.py", "none"): "AttentionBackend.graphs",
    ("plugin_host/selection.py", "triton"): "the package to look for",
    ("weights/tensor_file.py", "int8"): "TensorSpec.dtypes",
}
"""(file in core, string) -> the field it is a value of there; such a word reads like a plugin's name and is none."""

READS_ENVIRONMENT = {"core/autotune/cache.py": "executor.kernel_cache"}
"""File -> the setting that means the same as the one variable it reads (XDG_CACHE_HOME)."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, at any depth, for types only too."""
    parts = ("engine", *file.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    found = modules(package)
    assert found
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in found
        for name in imports(file)
        if name.split(".")[0] == "engine" and len(name.split(".")) > 1 and name.split(".")[1] not in ALLOWED[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_imports_past_the_namespace(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules(package)
        for name in imports(file)
        if name.split(".")[0] in PACKAGES
    ]
    assert not wrong


def plugin_names() -> set[str]:
    """Names that the built-ins register."""
    return {
        one.name
        for registry in load_plugins().seams.values()
        for one in registry
        if one.plugin.entry_point == "builtin"
    }


def string_constants(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_core_contains_no_plugin_name() -> None:
    names = plugin_names()
    assert len(names) > len(BUILTINS)
    found = {
        (str(file.relative_to(ROOT / "core")), text): f"core/{file.relative_to(ROOT / 'core')}:{line}: {text!r}"
        for file in modules("core")
        for line, text in string_constants(file)
        if text in names
    }
    assert not [place for key, place in found.items() if key not in NO_PLUGIN_NAMES]
    assert set(NO_PLUGIN_NAMES) <= set(found), "an exception is not needed any more"


def test_every_module_is_in_a_package() -> None:
    assert not [
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in modules(package)
        if not (file.parent / "__init__.py").exists()
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_refuses_to_be_imported_under_another_name(package: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"engine.{package}" in done.stderr


def test_listing_what_there_is_imports_nothing_heavy() -> None:
    """The modules of the built-ins and what the command line needs before a command runs."""
    modules = ("config.tree", "config.load", "hooks", "plugin_host.registry")
    light = [*BUILTINS, *(f"engine.core.{name}" for name in modules)]
    heavy = ["torch", "transformers", "numpy", "safetensors", "fastapi"]
    code = (
        f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\n"
        "from engine.core.plugin_host import load_plugins\n"
        "for registry in load_plugins().seams.values(): registry.names(), registry.contract\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["core", "plugins"])
def test_nothing_reads_the_environment_or_unpickles(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} uses {name}"
        for file in modules(package)
        for name in imports(file)
        if name.split(".")[0] in ("pickle", "marshal", "shelve") or name in ("os.environ", "os.getenv")
    ]
    wrong += [
        f"{file.relative_to(ROOT)}:{node.lineno} reads os.{node.attr}"
        for file in modules(package)
        if str(file.relative_to(ROOT)) not in READS_ENVIRONMENT
        for node in reads(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert not wrong


def reads(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of which an item is set: what a process sets for libraries that it loads is no setting."""
    nodes = list(ast.walk(tree))
    written = {id(one.value) for one in nodes if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store)}
    return (node for node in nodes if id(node) not in written)


def hook_names() -> list[str]:
    return sorted(name for name, value in vars(hooks).items() if hasattr(value, f"{hooks.PROJECT}_spec"))


def test_the_hooks_are_found() -> None:
    assert {"register_attention", "register_commands", "engine_stopped"} <= set(hook_names())


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_is_documented(hook: str) -> None:
    text = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert re.search(rf"`{hook}\(.*\)`", text), f"docs/plugins.md does not give the signature of {hook}"


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_is_implemented_in_a_test(hook: str) -> None:
    pattern = re.compile(rf"@(staticmethod\()?hookimpl\)?\s+(async )?def {hook}\(")
    tested = [ROOT / "docs" / "plugins.md"]  # tests/test_docs_plugins.py runs it
    tested += [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    assert any(pattern.search(file.read_text(encoding="utf-8")) for file in tested)
