"""Reports as JSON: figures with the machine, versions and commit of the measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import asdict, frozen

from engine.cli.bench.load import say
from engine.cli.output_file import output_file
from engine.core.config import served_name

if TYPE_CHECKING:
    from engine.core.engine import Engine

PACKAGES = ("pluggable-llm-engine", "torch", "transformers", "triton", "flashinfer-python", "numpy")


@frozen(kw_only=True)
class Row:
    """One figure, with its baseline if there is one."""

    metric: str
    value: float
    unit: str
    baseline: float | None = None
    baseline_name: str | None = None
    case: str | None = None
    """Distinguishes figures of one metric: batch, load, phase."""
    share: float | None = None
    """Share of the roofline (roofline.py); 1.0: the limit of the machine's bandwidth and matmul rate."""


def _plot_file(path: Path | None) -> Path | None:
    """The callback of --plot: its path, checked before the command runs."""
    if path is not None:
        from engine.cli.bench.plot import check_plot

        check_plot(path)
    return path


Json = Annotated[
    Path | None,
    typer.Option("--json", help="File to write the result to, as JSON.", metavar="FILE", callback=output_file),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="PNG file to draw the result to; needs matplotlib.", metavar="FILE", callback=_plot_file
    ),
]


def engine_settings(engine: Engine) -> dict[str, object]:
    """The settings that the figures of this engine depend on."""
    config = engine.config
    return {
        "model": served_name(config),
        "dtype": engine.cache_info.dtype,
        "plugins": {choice.extension_point: choice.name for choice in engine.parts.choices},
        "kernels": config.executor.kernels,
        "graphs": config.executor.graphs,
        "overlap": config.scheduler.overlap,
        "max_running": config.scheduler.max_running,
        "max_batch_tokens": config.scheduler.max_batch_tokens,
        "max_len": engine.max_len,
        "prefix_caching": config.cache.prefix_caching,
    }


def percent(share: float | None) -> str:
    """A share as a cell of a table; "" for an unknown one."""
    return "" if share is None else f"{share:.0%}"


def report(benchmark: str, machine: str, rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A report, as benchmarks/results/ keeps them. machine: the device; settings: what the figures depend on."""
    return header(benchmark, machine, settings) | {"rows": [asdict(row) for row in rows]}


def header(benchmark: str, machine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that each report begins with: benchmark, date, machine, commit, versions and settings."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "commit": _commit(),
        "versions": _versions(),
        "settings": dict(settings),
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a report as readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    say(f"written to {path}")


def _commit() -> str:
    """The commit of the checkout of this file, with "+" for uncommitted changes; "" in an installed package."""
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
