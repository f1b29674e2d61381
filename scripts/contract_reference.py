"""The reference of the contracts, made from the source: signatures, attribute docstrings and docstrings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES: dict[str, tuple[str, ...]] = {
    "Attention backends": ("core/attention/base.py", "core/attention/batch.py", "core/attention/kv_pool.py"),
    "Quantization methods": ("core/quant/base.py", "core/quant/experts.py", "core/quant/float8.py"),
    "Scheduling policies": ("core/schedulers/policy.py",),
    "Executors": ("core/executors/base.py", "core/executors/deployment.py"),
    "Models": (
        "core/models/base.py",
        "core/models/forward_pass.py",
        "core/layers/layer_factory.py",
        "core/layers/factory.py",
        "core/layers/blocks.py",
        "core/layers/expert_layers.py",
        "core/layers/sparse_mlp.py",
        "core/layers/routing.py",
        "core/layers/expert_tensors.py",
    ),
    "What travels": ("core/types.py",),
    "Devices": ("core/device.py",),
    "Errors": ("core/errors.py",),
    "Hooks": ("core/hooks.py",),
}
"""Section of the reference -> the files whose public classes and functions it lists."""


def contract_reference(root: Path = ROOT) -> str:
    """The whole reference, as Markdown."""
    sections = []
    for title, files in PAGES.items():
        parts = [f"## {title}"]
        for file in files:
            if not (root / file).is_file():
                continue
            module = "engine." + file.removesuffix(".py").replace("/", ".")
            package = module.rpartition(".")[0] if file.count("/") > 1 else module
            tree = ast.parse((root / file).read_text(encoding="utf-8"))
            exported = public_names(root / file)
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in exported:
                    parts.append(describe(node, package))
        sections.append("\n\n".join(parts))
    return "\n\n".join(sections)


def public_names(file: Path) -> set[str]:
    """The names of a file that a plugin may import: those that its room exports; all public ones of a file of core."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    public = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    }
    if file.parent.name == "core":
        return public
    exports = (file.parent / "__init__.py").read_text(encoding="utf-8")
    return public & {
        alias.name for node in ast.walk(ast.parse(exports)) if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def describe(node: ast.ClassDef | ast.FunctionDef, package: str) -> str:
    """One class or function: where it is imported from, what it is, its attributes and its methods."""
    title = f"### {node.name}\n\n`from {package} import {node.name}`"
    if isinstance(node, ast.FunctionDef):
        return f"{title}\n\n{method(node)}"
    parts = [title, text(ast.get_docstring(node))]
    rows = list(attributes(node))
    if rows:
        parts.append(table(rows))
    parts += [
        method(one)
        for one in node.body
        if isinstance(one, ast.FunctionDef) and (not one.name.startswith("_") or one.name == "__init__")
    ]
    return "\n\n".join(part for part in parts if part)


def attributes(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each annotated attribute, and of each property."""
    for place, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            after = node.body[place + 1] if place + 1 < len(node.body) else None
            meaning = ""
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                meaning = text(inspect.cleandoc(after.value.value))
            default = "" if one.value is None else f"`{ast.unparse(one.value)}`"
            yield one.target.id, f"`{ast.unparse(one.annotation)}`", default, meaning


def method(node: ast.FunctionDef) -> str:
    """A method's signature as Python writes it, and its docstring."""
    kinds = {ast.unparse(one) for one in node.decorator_list}
    if "property" in kinds or "cached_property" in kinds:
        head = f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}  # property"
    else:
        head = f"def {node.name}({ast.unparse(node.args)})" + (
            f" -> {ast.unparse(node.returns)}" if node.returns else ""
        )
        head = "@classmethod\n" + head if "classmethod" in kinds else head
        head = "@abstractmethod\n" + head if "abstractmethod" in kinds else head
    return f"```python\n{head}\n```\n\n{text(ast.get_docstring(node))}".rstrip()


def text(docstring: str | None) -> str:
    """A docstring as Markdown: indented examples become code blocks."""
    if not docstring:
        return ""
    parts = []
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(f"```python\n{textwrap.dedent(paragraph)}\n```")
        else:
            parts.append(paragraph)
    return "\n\n".join(parts)


def table(rows: list[tuple[str, str, str, str]]) -> str:
    """Attributes as a Markdown table."""
    lines = [("attribute", "type", "default", "meaning"), ("---",) * 4, *((f"`{name}`", *rest) for name, *rest in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
