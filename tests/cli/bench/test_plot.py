"""Figures."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench import plot
from engine.cli.bench.ceilings import Ceilings
from engine.cli.bench.client import Answered
from engine.cli.bench.latency import Decode, Latency
from engine.cli.bench.level import Level
from engine.cli.bench.load import Measured, make_load
from engine.cli.bench.roofline import Roofline
from engine.cli.bench.startup import Start
from engine.cli.bench.throughput import Result
from engine.core.errors import ConfigError
from engine.core.profiling import ModelCost, ModuleCost

drawn = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def test_without_matplotlib_the_extra_is_named_before_anything_runs(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    for command in ("throughput", "latency", "serve", "startup"):
        done = run("bench", command, "--model", "nowhere", "--plot", str(tmp_path / "x.png"))
        assert done.exit_code == 2
        assert "pip install 'matplotlib" in done.stderr


def test_a_figure_that_could_not_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    plot.check_plot(tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        plot.check_plot(tmp_path / "x.pdf")
    with pytest.raises(ConfigError, match="does not exist"):
        plot.check_plot(tmp_path / "no" / "x.png")


@drawn
def test_each_figure_is_drawn(tmp_path: Path) -> None:
    load = make_load(2, (3, 4), (5, 6))
    run = Measured(seconds=2.0, prompt_tokens=7, output_tokens=11, steps=6, phases={})
    cost = ModelCost(modules=(ModuleCost(name="all", kind="linear", weight_bytes=100, flops_per_row=100),))
    roofline = Roofline(cost=cost, ceilings=Ceilings(bandwidth=1e6, flops=1e9, source="made up"))
    decodes = tuple(Decode(batch=size, step=0.01 * size, phases={}, host=0.002, context=9) for size in (1, 4))
    answers = (Answered(sent=0.0, events=(0.1, 0.2), tokens=2),)
    level = Level(
        name="concurrency 1", answers=answers, seconds=1.0, input_len=4, cores=None, load_cores=0.1, good=None
    )
    start = Start(phases=(("imports", 1.0), ("weights", 2.0)), weights_bytes=10, device="cpu")
    figures = {
        "throughput": lambda path: plot.plot_throughput(path, [Result(load=load, runs=(run,), floor=1.0)], "cpu"),
        "throughput alone": lambda path: plot.plot_throughput(path, [Result(load=load, runs=(run,))], "cpu"),
        "latency": lambda path: plot.plot_latency(path, Latency(decodes=decodes, prefill=None), roofline, "cpu"),
        "serve": lambda path: plot.plot_serve(path, [level, level], "cpu"),
        "startup": lambda path: plot.plot_startup(path, [start, start], "cpu"),
    }
    for name, draw in figures.items():
        draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
