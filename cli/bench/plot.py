"""Draws results as PNG, with matplotlib (extra `plot`), which is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.bench.load import say
from engine.cli.output_file import check_file
from engine.core.errors import ConfigError
from engine.core.extras import install_command

if TYPE_CHECKING:
    from engine.cli.bench.latency import Latency
    from engine.cli.bench.level import Level
    from engine.cli.bench.roofline import Roofline
    from engine.cli.bench.startup import Start
    from engine.cli.bench.throughput import Result


def check_plot(path: Path) -> None:
    """Raise ConfigError, before the measurement, if the figure cannot be drawn or written."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib; install it with `{install_command('plot')}`")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path} is not a PNG file; give a name that ends in .png")
    check_file("--plot", path)


def plot_throughput(path: Path, results: Sequence[Result], machine: str) -> None:
    """Draw the output tokens per second of each load, against the roofline."""
    figure, axes = _figure(f"throughput on {machine}", width=2.5 + 2.2 * len(results))
    places = list(range(len(results)))
    bounds = [one.load.output_tokens / one.floor if one.floor else 0.0 for one in results]
    if any(bounds):
        axes.bar(places, bounds, width=0.7, color="#d9d9d9", label="roofline")
    axes.bar(places, [one.output_rate for one in results], width=0.5, color="#1f77b4", label="measured")
    axes.set_xticks(places, [one.load.name.replace(", ", "\n") for one in results])
    axes.set_ylabel("output tokens/s")
    _save(figure, axes, path)


def plot_latency(path: Path, measured: Latency, roofline: Roofline | None, machine: str) -> None:
    """Draw the time of a decode step by batch size, with its roofline and the part of the host."""
    figure, axes = _figure(f"decode step on {machine}")
    batches = [one.batch for one in measured.decodes]
    axes.plot(batches, [one.step * 1e3 for one in measured.decodes], "o-", color="#1f77b4", label="measured")
    axes.plot(batches, [one.host * 1e3 for one in measured.decodes], "s:", color="#ff7f0e", label="host, not waiting")
    if roofline is not None:
        floors = [roofline.decode(one.batch, one.context) * 1e3 for one in measured.decodes]
        axes.plot(batches, floors, "--", color="#7f7f7f", label="roofline")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel("ms per step")
    _save(figure, axes, path)


def plot_serve(path: Path, levels: Sequence[Level], machine: str) -> None:
    """Draw output tokens per second against time per output token, one point per level of load."""
    figure, axes = _figure(f"serving on {machine}")
    axes.plot([one.tpot.p50 for one in levels], [one.output_rate for one in levels], "o-", color="#1f77b4", label="p50")
    axes.plot([one.tpot.p99 for one in levels], [one.output_rate for one in levels], "o:", color="#ff7f0e", label="p99")
    for one in levels:
        axes.annotate(one.name, (one.tpot.p50, one.output_rate), textcoords="offset points", xytext=(6, -10))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms per output token after the first")
    axes.set_ylabel("output tokens/s")
    _save(figure, axes, path)


def plot_startup(path: Path, starts: Sequence[Start], machine: str) -> None:
    """Draw the seconds to the first token by phase, one bar per start."""
    figure, axes = _figure(f"start-up on {machine}", height=2.0 + 0.6 * len(starts))
    names = list(dict.fromkeys(phase for one in starts for phase, _ in one.phases))
    left = [0.0] * len(starts)
    for name in names:
        spent = [dict(one.phases).get(name, 0.0) for one in starts]
        axes.barh(range(len(starts)), spent, left=left, label=name)
        left = [before + more for before, more in zip(left, spent, strict=True)]
    axes.set_yticks(range(len(starts)), [f"start {number + 1}" for number in range(len(starts))])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the process was started")
    _save(figure, axes, path)


def _figure(title: str, *, width: float = 7.0, height: float = 4.5) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot there is no global state and no window

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=150)
    say(f"drawn to {path}")
