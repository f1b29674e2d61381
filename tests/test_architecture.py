"""The rules of the tree: who imports whom, what core does not know, what is packaged, what is documented and tested."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from engine.core import hooks
from engine.core.plugin_host import load_plugins
from engine.plugins import BUILTINS

ROOT = Path(__file__).parent.parent
PACKAGES = ("cli", "core", "demo", "ops", "plugins", "quantize", "server", "testing")
ALLOWED: dict[str, tuple[str, ...]] = {
    "ops": ("ops",),
    "core": ("core", "demo", "ops"),
    "demo": ("demo",),
    "plugins": ("core", "ops", "plugins"),
    "quantize": ("core", "plugins", "quantize"),
    "server": ("core", "server"),
    "testing": ("core", "testing"),
    "cli": PACKAGES,
}
"""Package -> packages it may import."""

NO_PLUGIN_NAMES = {
    ("wait_policy.py", "torch"): "the package that loads OpenMP",
    ("attention/base.py", "none"): "AttentionBackend.graphs",
    ("engine.py", "priority"): "an argument of Engine.generate",
    ("weights/checkpoint.py", "none"): "model.generation_config",
    ("config/tree.py", "none"): "model.generation_config",
    ("config/tree.py", "fp8"): "a short name of a type in cache.dtype",
    ("layers/expert_layers.py", "none"): "LinearSpec.parallel",
    ("layers/linear.py", "none"): "LinearSpec.parallel",
    ("layers/matmul.py", "none"): "oneDNN's post-operation",
    ("layers/single_layer_factory.py", "none"): "LinearSpec.parallel",
    ("parsers/base.py", "none"): "ToolChoice.mode",
    ("autotune/cache.py", "triton"): "the name of a package in a file's key",
    ("autotune/shipped.py", "triton"): "the same",
    ("compilation/first_start.py", "torch"): "a package whose version counts",
    ("compilation/first_start.py", "triton"): "the same",
    ("quant/base.py", "none"): "LinearSpec.parallel",
    ("quant/experts.py", "none"): "LinearSpec.parallel",
    ("plugin_host/derived.py", "none"): "AttentionBackend.graphs",
    ("plugin_host/derived.py", "triton"): "the package to look for",
    ("text/tokenizer.py", "response_template"): "an attribute of transformers' tokenizers",
    ("weights/tensor_file.py", "int8"): "TensorSpec.dtypes",
}
"""(file in core, string) -> the field it is a value of there; such a word reads like a plugin's name and is none."""

READS_ENVIRONMENT = {"core/autotune/cache.py": "executor.kernel_cache", "core/wait_policy.py": "executor.thread_wait"}
"""File -> the setting that means the same as what it reads (XDG_CACHE_HOME; OMP_WAIT_POLICY and its like)."""
READS_OTHERS_VARIABLES = tuple(f"core/compilation/{name}.py" for name in ("client", "first_start", "head_start"))
"""Files that pass the environment to a process, or ask for or set what Triton, torch and CUDA will read in it."""
UNPICKLES = {"core/compilation/job.py": "pickle"}
"""File -> what it imports: the bytes come from the process that started this one."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def parse(file: Path) -> ast.Module:
    """Syntax tree of a file, which no test changes."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Full names of all modules that a file imports, at any depth, for types only too."""
    parts = ("engine", *file.relative_to(ROOT).with_suffix("").parts)
    names: list[str] = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names += (f"{module}.{alias.name}" for alias in node.names)
    return tuple(names)


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


FOLDERS = sorted(file.parent.name for file in (ROOT / "core").glob("*/__init__.py"))
"""The folders of core."""


OUTSIDE = [*sorted({*PACKAGES} - {"core"}), "benchmarks", "examples", "scripts", "tests/sample_plugin"]


@pytest.mark.parametrize("package", OUTSIDE)
def test_code_outside_core_imports_only_the_public_names_of_its_folders(package: str) -> None:
    """The `__init__` of a folder lists its public names. Modules directly in core (hooks, errors, ...) are public."""
    inside = {
        f"engine.core.{folder}.{file.stem}" for folder in FOLDERS for file in (ROOT / "core" / folder).glob("*.py")
    }
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules(package)
        for name in imports(file)
        if name.rpartition(".")[0] in inside or name in inside
    ]
    assert not wrong


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_public_names_of_a_folder_are_there_for_type_checkers_too(folder: str) -> None:
    package = importlib.import_module(f"engine.core.{folder}")
    file = ROOT / "core" / folder / "__init__.py"
    listed = {
        alias.name: node.module
        for node in ast.walk(parse(file))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if node.module.startswith(f"engine.core.{folder}.")
    }
    assert sorted(listed) == sorted(getattr(package, "__all__", []))
    for name, module in listed.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)


def imported_at_run_time(body: list[ast.stmt], known: set[str]) -> Iterator[str]:
    """Modules that importing a module imports: not what stands in functions, or for type checkers alone."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported_at_run_time(node.body + node.orelse, known)
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            yield from imported_at_run_time(node.body, known)


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {
        ".".join(
            ("engine", *(file.parent if file.stem == "__init__" else file.with_suffix("")).relative_to(ROOT).parts)
        ): file
        for package in PACKAGES
        for file in modules(package)
    }
    graph = {
        name: set(imported_at_run_time(parse(file).body, set(files))) & set(files) - {name}
        for name, file in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


@cache
def classes_by_name() -> dict[str, ast.ClassDef]:
    """The classes of all packages."""
    return {
        node.name: node
        for package in PACKAGES
        for file in modules(package)
        for node in ast.walk(parse(file))
        if isinstance(node, ast.ClassDef)
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_method_says_what_it_does_unless_it_overrides_one_that_does(package: str) -> None:
    """A method needs a docstring unless a base class of that name documents it."""
    classes = classes_by_name()

    def methods(node: ast.ClassDef) -> dict[str, bool]:
        return {
            one.name: ast.get_docstring(one) is not None
            for one in node.body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            if not any(ast.unparse(decorator).endswith(".setter") for decorator in one.decorator_list)
        }

    def overrides(node: ast.ClassDef, method: str) -> bool:
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if name not in classes:
                return True  # of another library, which documents it
            if methods(classes[name]).get(method) or overrides(classes[name], method):
                return name != "Generic"
        return False

    wrong = [
        f"{file.relative_to(ROOT)}: {node.name}.{method}"
        for file in modules(package)
        for node in parse(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method, documented in methods(node).items()
        if not documented and not method.startswith("_") and not overrides(node, method)
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
    for node in ast.walk(parse(file)):
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


CHOOSES_KERNELS = ("core/autotune", "core/layers", "ops", "plugins/attention", "plugins/quant")
"""Packages that contain kernels or choose them."""

FAMILY = re.compile(
    r"(?<![a-z])(cohere|deepseek|falcon|gemma|glm|gpt.?oss|granite|llama|minimax|ministral|mistral|mixtral|olmo|phi|qwen"
    r"|smollm|starcoder)(?![a-z])",
    re.IGNORECASE,
)
"""Names of model families."""

NO_FAMILY_NAMES = {
    ("core/layers/rotary.py", "llama3"): "rope_type",
    ("core/layers/rotary.py", "_llama3"): "its function",
    ("plugins/quant/__init__.py", "experts of 4-bit numbers with a scale per 32: gpt-oss checkpoints"): "a summary",
    (
        "plugins/quant/mxfp4.py",
        "the checkpoint is not quantized; it needs one with quant_method mxfp4 in config.json, as gpt-oss",
    ): "a refusal",
}
"""(file, string or name) -> what it is, other than a condition for a kernel."""


def names_and_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and texts of all identifiers and strings of a module but its docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value
        for text in (getattr(node, part, None) for part in ("id", "attr", "arg", "name")):
            if isinstance(text, str):
                yield getattr(node, "lineno", 0), text


def test_no_kernel_is_chosen_by_the_name_of_a_model() -> None:
    found = {
        (str(file.relative_to(ROOT)), text): f"{file.relative_to(ROOT)}:{line}: {text!r}"
        for package in CHOOSES_KERNELS
        for file in modules(package)
        for line, text in names_and_strings(parse(file))
        if FAMILY.search(text)
    }
    assert not [place for key, place in found.items() if key not in NO_FAMILY_NAMES]
    assert set(NO_FAMILY_NAMES) <= set(found), "an exception is not needed any more"


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
    modules = ("config.tree", "config.load", "hooks", "plugin_host.load")
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
        if UNPICKLES.get(str(file.relative_to(ROOT))) != name
    ]
    wrong += [
        f"{file.relative_to(ROOT)}:{node.lineno} reads os.{node.attr}"
        for file in modules(package)
        if str(file.relative_to(ROOT)) not in (*READS_ENVIRONMENT, *READS_OTHERS_VARIABLES)
        for node in reads(parse(file))
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


@cache
def implemented_in_tests() -> frozenset[str]:
    """Names of the hooks that a test implements."""
    pattern = re.compile(r"@(?:staticmethod\()?hookimpl\)?\s+(?:async )?def (\w+)\(")
    tested = [ROOT / "docs" / "plugins.md"]  # tests/test_docs_plugins.py runs it
    tested += [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    return frozenset(name for file in tested for name in pattern.findall(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("hook", hook_names())
def test_every_hook_is_implemented_in_a_test(hook: str) -> None:
    assert hook in implemented_in_tests()
