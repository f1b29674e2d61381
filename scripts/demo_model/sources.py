"""The text to train on, and the held-out text: the standard library of the running Python."""

from __future__ import annotations

import pathlib
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Never trained on, nor shown to the tokenizer. Each of them exists, as one file, in Python 3.11 and later.
HELD_OUT = (
    "calendar", "cmd", "csv", "fnmatch", "fractions", "gettext", "graphlib", "heapq", "netrc", "plistlib", "pprint",
    "sched", "shlex", "textwrap", "timeit", "zipapp",
)  # fmt: skip
EXCLUDED_PACKAGES = {"encodings", "lib2to3", "pydoc_data", "turtledemo", "__phello__"}  # tables, and demonstrations
EXCLUDED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
EXCLUDED_FILES = {"html/entities.py", "__hello__.py", "this.py"}


@dataclass(frozen=True)
class Source:
    """One module of the standard library: its dotted name and its text."""

    module: str
    text: str


def standard_library() -> Iterator[Source]:
    """Every wanted module of this interpreter's standard library, held-out ones too, in order of path."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if is_wanted(relative):
            text = read_source(path)
            if text.strip():
                yield Source(module_name(relative), text)


def is_wanted(relative: pathlib.Path) -> bool:
    """Whether a path below the standard library's root is code of the library proper."""
    top = relative.parts[0].removesuffix(".py")
    return (
        top in sys.stdlib_module_names  # leaves out whatever a distributor or a build put next to the library
        and top not in EXCLUDED_PACKAGES
        and EXCLUDED_FOLDERS.isdisjoint(relative.parts)
        and not relative.name.startswith("test_")
        and relative.as_posix() not in EXCLUDED_FILES
    )


def read_source(path: pathlib.Path) -> str:
    """The text of a Python file, decoded as the file declares; empty if it cannot be."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def module_name(relative: pathlib.Path) -> str:
    """`xml/dom/minidom.py` -> `xml.dom.minidom`; a package's `__init__.py` bears the package's name."""
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def training_sources() -> list[Source]:
    """The modules to train on: all but the held-out ones, each text once."""
    seen: set[str] = set()
    kept = []
    for source in standard_library():
        if source.module not in HELD_OUT and source.text not in seen:
            seen.add(source.text)
            kept.append(source)
    return kept


def held_out_text() -> str:
    """The text of the held-out modules, in the order of their names.

    It is that of the running Python, so two releases give two texts. Raises FileNotFoundError if a module is missing.
    """
    found = {source.module: source.text for source in standard_library() if source.module in HELD_OUT}
    missing = sorted(set(HELD_OUT) - set(found))
    if missing:
        raise FileNotFoundError(f"this Python's standard library has no source file of {', '.join(missing)}")
    return "\n".join(found[name] for name in sorted(found))


def shared_passages(text: str, sources: Sequence[Source], lines: int = 5) -> float:
    """The share of `text`'s passages of this many non-blank lines that occur in the sources too: a check for leaks."""
    known = {passage for source in sources for passage in passages(source.text, lines)}
    found = [passage in known for passage in passages(text, lines)]
    return sum(found) / max(1, len(found))


def passages(text: str, lines: int) -> Iterator[str]:
    """Every run of this many successive non-blank lines, without their indentation."""
    kept = [line.strip() for line in text.split("\n") if line.strip()]
    for begin in range(len(kept) - lines + 1):
        yield "\n".join(kept[begin : begin + lines])
