"""Writes the report of a script, in the format of benchmarks/results/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.cli.bench.report import header
from engine.core.device import find_device

FILES = ("json", "plot")


def write_report(file: Path, name: str, options: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write machine, versions, commit and options, then the content; a list of the content has one entry per line."""
    settings = {key: value for key, value in options.items() if key not in FILES and value != []}
    parts = header(name, find_device("cpu").name, settings) | content
    text = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in parts.items())
    file.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(each, default=str) for each in value) + "\n]"
    return json.dumps(value, default=str)
