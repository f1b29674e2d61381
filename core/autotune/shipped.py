"""Tuning results that come with the package: one JSON file per device, written by scripts/tune_kernels.py.

A result holds for the versions of Triton and of the kernels that it was measured with. What a machine has measured
itself takes precedence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import nan
from pathlib import Path

from engine.core.autotune.results import TuningResult, TuningResults, file_name

DIRECTORY = Path(__file__).parent / "choices"


def load_shipped(machine: Mapping[str, str], directory: Path = DIRECTORY) -> TuningResults:
    """The results for a machine (`describe_machine`); none for a device or a Triton that nobody measured."""
    path = directory / file_name(machine)
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["machine"]["triton"] != machine["triton"]:
        return {}
    return {
        (op, int(rows)): TuningResult(
            op=op,
            rows=int(rows),
            version=version,
            candidate=candidate,
            seconds=nan,
            default="",
            default_seconds=nan,
        )
        for version, ops in content["choices"].items()
        for op, choices in ops.items()
        for rows, candidate in choices.items()
    }


def store_shipped(machine: Mapping[str, str], results: Iterable[TuningResult], directory: Path = DIRECTORY) -> Path:
    """Write the file of a machine: per version of the kernels and op, in a line, the candidates by number of rows."""
    versions: dict[str, dict[str, dict[int, str]]] = {}
    for result in sorted(results, key=lambda one: (one.version, one.op, one.rows)):
        versions.setdefault(result.version, {}).setdefault(result.op, {})[result.rows] = result.candidate
    path = directory / file_name(machine)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(_format(machine, versions), encoding="utf-8")
    return path


def _format(machine: Mapping[str, str], versions: Mapping[str, Mapping[str, Mapping[int, str]]]) -> str:
    blocks = []
    for version, ops in versions.items():
        lines = [f"   {json.dumps(op)}: {json.dumps(choices)}" for op, choices in ops.items()]
        blocks.append(f"  {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n  }")
    return f'{{\n "machine": {json.dumps(machine)},\n "choices": {{\n' + ",\n".join(blocks) + "\n }\n}\n"
