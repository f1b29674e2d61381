"""Write the generated parts of README.md and docs/: `make docs`. With --check, only say which are out of date.

A generated part stands between the lines `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from engine.cli.main import app
from engine.cli.options import purpose
from engine.core.settings import Setting, describe
from engine.core.structure import show

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def settings_tables() -> str:
    """Every setting of the configuration tree, one table a section."""
    sections: dict[str, list[Setting]] = {}
    for setting in describe():
        sections.setdefault(setting.path[0], []).append(setting)
    return "\n\n".join(
        f"### [{section}]\n\n{purpose(section)[0].upper()}{purpose(section)[1:]}.\n\n"
        + table(
            ("key", "type", "default", "option", "meaning"),
            (
                (
                    code(setting.path[1]),
                    " or ".join(map(code, setting.choices)) or setting.type_name,
                    code(show(setting.default)[0]),
                    code(setting.flag or ""),
                    setting.help,
                )
                for setting in settings
            ),
        )
        for section, settings in sections.items()
    )


def command_reference() -> str:
    """Every command with its own arguments and options; those made from the configuration are named once."""
    configuration = {setting.flag for setting in describe() if setting.flag}
    parts = []
    for path, command in commands(typer.main.get_command(app), "engine"):
        own = [param for param in command.params if not configuration & set(param.opts)]
        rows = [
            (", ".join(map(code, names(param))), getattr(param, "help", "") or "")
            for param in own
            if param.name not in ("help", "install_completion", "show_completion")
        ]
        text = f"## {path}\n\n{(command.help or '').strip()}"
        if rows:
            text += "\n\n" + table(("argument or option", "meaning"), rows)
        given = {param.opts[0] for param in command.params} & configuration
        if given:
            missing = ", ".join(map(code, sorted(configuration - given)))
            text += "\n\nAnd the options of [the settings](configuration.md#settings)"
            text += f", but not {missing}." if missing else "."
        parts.append(text)
    return "\n\n".join(parts)


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, command) of a command and all below it, without those that plugins add."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


def names(param: Any) -> list[str]:
    """As one types an option, or an argument in capitals."""
    if param.param_type_name == "argument":
        return [param.name.upper()]
    return [*param.opts, *param.secondary_opts]


def results_table() -> str:
    """The figures in benchmarks/results that were measured against something."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    rows = [
        (
            report["benchmark"],
            row["metric"],
            f"{number(row['value'])} {row['unit']}",
            f"{number(row['baseline'])} {row['unit']} ({row['baseline_name']})",
            f"{row['value'] / row['baseline']:.2f} x",
            f"{report['machine']}, {report['date']}, commit {report['commit']}",
        )
        for report in reports
        for row in report["rows"]
        if row.get("baseline")
    ]
    if not rows:
        return "None yet: no file in `benchmarks/results/` compares the engine with anything."
    return table(("benchmark", "metric", "engine", "baseline", "ratio", "measured"), rows)


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(columns: tuple[str, ...], rows: Any) -> str:
    """A Markdown table."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def code(text: str) -> str:
    """Text as code; nothing for nothing."""
    return f"`{text}`" if text else ""


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("docs/configuration.md", settings_tables),
    "commands": ("docs/cli.md", command_reference),
    "results": ("README.md", results_table),
}


def fill(text: str, name: str, content: str) -> str:
    """`text` with the generated part `name` replaced."""
    pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"error: the lines that mark the generated part {name!r} are missing")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def outdated(root: Path = ROOT) -> dict[Path, str]:
    """The files that are not up to date, with what should be in them."""
    found = {}
    for name, (file, make) in PARTS.items():
        path = root / file
        text = path.read_text(encoding="utf-8")
        wanted = fill(text, name, make())
        if wanted != text:
            found[path] = wanted
    return found


def main() -> None:
    stale = outdated()
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run `make docs`", file=sys.stderr)
        raise SystemExit(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
