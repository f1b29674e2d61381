"""The reference of the contracts, made from the source: signatures, attribute docstrings and docstrings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from markdown_text import code, table

ROOT = Path(__file__).resolve().parents[1]
TESTING: dict[str, tuple[str, ...]] = {
    "testing/attention.py": ("AttentionConformance",),
    "testing/quant.py": ("QuantConformance",),
    "testing/schedulers.py": ("PolicyConformance", "View"),
    "testing/executors.py": ("ExecutorConformance",),
    "testing/models.py": ("ModelConformance",),
    "testing/parsers.py": ("ParserConformance", "Example"),
    "testing/parser_grammars.py": ("ParserGrammarConformance",),
    "testing/grammars.py": ("GrammarConformance",),
    "testing/speculators.py": ("SpeculatorConformance",),
    "testing/checkpoints.py": ("make_checkpoint",),
}
"""Files of engine.testing, which are imported one by one -> what of them plugin authors use."""
PLUGIN_HOST: dict[str, tuple[str, ...]] = {
    "core/plugin_host/load.py": ("load_plugins",),
    "core/plugin_host/registry.py": ("Plugins",),
    "core/plugin_host/selection.py": ("resolve", "Parts"),
}
"""Files of the plugin host -> what of them an executor in another process uses."""
OVERRIDDEN = {"QuantConformance": ("store",), "ModelConformance": ("checkpoint", "reference")}
"""Methods of the suites that plugin authors override; the reference has no others of a suite."""
PAGES: dict[str, tuple[str, ...]] = {
    "Attention backends": ("core/attention/base.py", "core/attention/batch.py", "core/attention/kv_pool.py"),
    "Quantization methods": (
        "core/quant/base.py",
        "core/quant/experts.py",
        "core/quant/float8.py",
        "core/autotune/op.py",
    ),
    "Scheduling policies": ("core/schedulers/policy.py",),
    "Executors": (
        "core/executors/base.py",
        "core/executors/deployment.py",
        "core/executors/wire.py",
        "core/executors/control.py",
        "core/executors/frames.py",
        "core/runner/runner.py",
        "core/distributed/rank_group.py",
        "core/distributed/rendezvous.py",
        *PLUGIN_HOST,
    ),
    "Models": (
        "core/models/base.py",
        "core/models/forward_pass.py",
        "core/weights/checkpoint.py",
    ),
    "Layers of models": (
        "core/layers/layer_factory.py",
        "core/layers/blocks.py",
        "core/layers/sparse_mlp.py",
        "core/layers/routing.py",
        "core/layers/norm.py",
        "core/layers/head_norm.py",
        "core/layers/rotary.py",
        "core/layers/embedding.py",
        "core/layers/linear.py",
        "core/layers/lm_head.py",
        "core/layers/activation.py",
        "core/layers/expert_tensors.py",
        "core/layers/base.py",
        "core/distributed/partial_sum.py",
        "core/distributed/scattered_rows.py",
    ),
    "Output parsers": (
        "core/parsers/base.py",
        "core/parsers/sequential.py",
        "core/parsers/call_reader.py",
        "core/parsers/json_scanner.py",
        "core/parsers/output_formats.py",
        "core/parsers/tool_schemas.py",
        "core/parsers/custom_tools.py",
    ),
    "Grammars": ("core/grammars/base.py", "core/grammars/grammar.py"),
    "Speculators": ("core/speculators/base.py", "core/speculators/device.py"),
    "Protocols": (
        "core/protocols/routes.py",
        "core/protocols/conversation.py",
        "core/protocols/answer.py",
        "core/protocols/errors.py",
    ),
    "Requests, steps and results": (
        "core/types/sampling_params.py",
        "core/types/request.py",
        "core/types/step.py",
        "core/types/result.py",
        "core/types/output.py",
        "core/types/cache.py",
        "core/types/statistics.py",
        "core/types/engine_stats.py",
        "core/tokens.py",
    ),
    "Devices": ("core/device.py",),
    "Errors": ("core/errors.py",),
    "Hooks": ("core/hooks.py",),
    "Tests of plugins": tuple(TESTING),
}
"""Section of the reference -> the files whose public classes, functions and type aliases it lists."""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
SHOWN_DECORATORS = ("abstractmethod", "classmethod", "staticmethod")
"""Decorators in the reference: those that say how a method is called, and who defines it."""


def contract_reference(root: Path = ROOT) -> str:
    """The whole reference, as Markdown."""
    sections = []
    for title, files in PAGES.items():
        parts = [f"## {title}"]
        for file in files:
            if not (root / file).is_file():
                continue
            classes = undescribed_classes(root, (root / file).parent)
            module = "engine." + file.removesuffix(".py").replace("/", ".")
            package = module.rpartition(".")[0] if file.count("/") > 1 else module
            exported = public_names(root / file)
            source = (root / file).read_text(encoding="utf-8")
            body = ast.parse(source).body
            for place, node in enumerate(body):
                if name_of(node) not in exported:
                    continue
                if isinstance(node, ast.ClassDef | FunctionNode):
                    parts.append(describe(node, package, classes))
                else:
                    value = f"```python\n{ast.get_source_segment(source, node)}\n```"
                    parts.append(
                        f"{heading(node, package)}\n\n{value}\n\n{text(docstring_after(body, place))}".rstrip()
                    )
        sections.append("\n\n".join(parts))
    return "\n\n".join(sections)


def public_names(file: Path) -> set[str]:
    """Names of a file that plugins may import: its package's exports; of a file of core itself all public ones; of
    engine.testing and the plugin host those listed above."""
    if file.parent.name in ("testing", "plugin_host"):
        listed = {**TESTING, **PLUGIN_HOST}
        return next((set(names) for path, names in listed.items() if file.match(path)), set())
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if file.parent.name == "core":
        documented = {name_of(node) for place, node in enumerate(tree.body) if has_docstring(tree.body, place)}
        return {name for name in documented if not name.startswith("_")} - {""}
    exports = (file.parent / "__init__.py").read_text(encoding="utf-8")
    return {name_of(node) for node in tree.body} & {
        alias.name for node in ast.walk(ast.parse(exports)) if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def name_of(node: ast.stmt) -> str:
    """The name that a statement defines: a class, a function or an assigned name; empty: none."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def docstring_after(body: list[ast.stmt], place: int) -> str:
    """The string that stands after an assignment; empty: there is none."""
    match body[place + 1 : place + 2]:
        case [ast.Expr(value=ast.Constant(value=str(found)))]:
            return inspect.cleandoc(found)
    return ""


def has_docstring(body: list[ast.stmt], place: int) -> bool:
    """Whether a statement is a class or a function, or an assignment that a string explains."""
    return isinstance(body[place], ast.ClassDef | FunctionNode) or bool(docstring_after(body, place))


def undescribed_classes(root: Path, room: Path) -> dict[str, ast.ClassDef]:
    """The classes of a package that have no section of their own in the reference, by name."""
    pages = {root / file for files in PAGES.values() for file in files}
    return {
        node.name: node
        for file in sorted(room.glob("*.py"))
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (file not in pages or node.name not in public_names(file))
    }


def heading(node: ast.stmt, package: str) -> str:
    """The name that a statement defines, and where it is imported from."""
    return f"### {name_of(node)}\n\n`from {package} import {name_of(node)}`"


def describe(node: ast.ClassDef | FunctionNode, package: str, classes: dict[str, ast.ClassDef]) -> str:
    """One class or function: where it is imported from, what it is, its attributes and its methods.

    classes: base classes whose members are described with the classes derived from them.
    """
    title = heading(node, package)
    if isinstance(node, FunctionNode):
        return f"{title}\n\n{method(node)}"
    parts = [title, text(ast.get_docstring(node))]
    bases = list(lineage(node, classes))
    rows = [row for one in bases for row in attributes(one)]
    if rows:
        parts.append(table(("attribute", "type", "default", "meaning"), rows))
    described: set[str] = set()
    for base in bases:
        methods = [
            one for one in base.body if isinstance(one, FunctionNode) and is_described(one, base, own=base is node)
        ]
        parts += [method(one) for one in methods if one.name not in described]
        described |= {one.name for one in methods}
    return "\n\n".join(part for part in parts if part)


def lineage(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """A class, and those of `classes` that it derives from."""
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from lineage(classes[base.id], classes)


def is_described(node: FunctionNode, of: ast.ClassDef, *, own: bool) -> bool:
    """Whether a method of a class is in the reference: not an override that its base class describes.

    own: whether `of` is the class described, not a base class; its constructor is in the reference too.
    """
    if node.name == "__init__":
        return own
    if of.name.endswith("Conformance"):
        return node.name in OVERRIDDEN.get(of.name, ())
    if node.name.startswith("_") and node.name != "__call__":
        return False
    overloaded = any(ast.unparse(one) == "overload" for one in node.decorator_list)
    return not overloaded and (ast.get_docstring(node) is not None or not of.bases)


def attributes(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each annotated attribute, and of each property."""
    for place, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            meaning = text(docstring_after(node.body, place))
            yield code(one.target.id), code(ast.unparse(one.annotation)), code(default_of(one.value)), meaning


def default_of(value: ast.expr | None) -> str:
    """The default that an attribute's value declares, as Python; empty: the attribute is required."""
    match value:
        case None:
            return ""
        case ast.Call(func=ast.Name(id="field") | ast.Attribute(attr="field"), keywords=arguments):
            given = {argument.arg: ast.unparse(argument.value) for argument in arguments}
            return f"{given['factory']}()" if "factory" in given else given.get("default", "")
    return ast.unparse(value)


def method(node: FunctionNode) -> str:
    """A method's signature as Python writes it, and its docstring."""
    kinds = [ast.unparse(one) for one in node.decorator_list]
    if "property" in kinds or "cached_property" in kinds:
        head = f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}  # property"
    else:
        shown = "".join(f"@{kind}\n" for kind in kinds if kind in SHOWN_DECORATORS)
        keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        head = f"{shown}{keyword} {node.name}({ast.unparse(node.args)}){returns}"
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
