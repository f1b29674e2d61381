"""The plugin `transformers` next to the native model: decode steps and prefill of one checkpoint by both.

    python benchmarks/fallback.py [--model llama-3.1-8b] [--prefix h200] [--set KEY=VALUE ...]

Each runs in a process of its own, with random weights. Writes benchmarks/results/PREFIX-fallback.json and prints the
fallback's share of the native speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from attrs import asdict
from models import MODELS, write_model
from own_process import print_result, run_in_own_process

from engine.cli.bench import latency
from engine.cli.bench.load import opened
from engine.cli.bench.report import Row, engine_settings, report, write
from engine.core.config import load_config

RESULTS = Path(__file__).resolve().parent / "results"
NATIVE, FALLBACK = "auto", "transformers"


def measure(plugin: str, model: str, given: list[str], *, small: bool) -> dict[str, Any]:
    """One architecture plugin, in this process: rows, machine and settings."""
    overrides: dict[str, Any] = {
        "model.name": plugin,
        "model.load_format": "dummy",
        "model.max_len": 512 if small else 4096,
        "cache.prefix_caching": False,
        "scheduler.max_running": 2 if small else 64,
    }
    if small:
        overrides["cache.memory"] = "32MiB"
    overrides |= dict(text.split("=", 1) for text in given)
    with tempfile.TemporaryDirectory() as directory:
        overrides["model.path"] = str(write_model(Path(directory), "tiny" if small else model))
        with opened(load_config(overrides=overrides).config) as engine:
            measured = latency.measure(
                engine,
                (1, 2) if small else (1, 64),
                inputs=16 if small else 128,
                steps=16 if small else 128,
                prefill=(2, 64) if small else (16, 2048),
            )
    label = "native" if plugin == NATIVE else plugin
    rows = [
        Row(metric="decode step", case=f"{label}, batch {one.batch}", value=one.step * 1e3, unit="ms")
        for one in measured.decodes
    ]
    if measured.prefill is not None:
        case = f"{label}, {measured.prefill.name}"
        rows.append(Row(metric="prefill", case=case, value=measured.prefill.rate, unit="tokens/s"))
    return {
        "rows": [asdict(row) for row in rows],
        "machine": engine.cache_info.device,
        "settings": engine_settings(engine) | {"model": model, "given": given},
    }


def shares(native: list[Row], fallback: list[Row]) -> list[Row]:
    """The fallback's share of the native speed, row by row."""
    found = []
    for ours, theirs in zip(native, fallback, strict=True):
        ratio = ours.value / theirs.value if ours.unit == "ms" else theirs.value / ours.value
        case = theirs.case.partition(", ")[2] if theirs.case else ""
        found.append(Row(metric=f"share of native {theirs.metric}", case=case, value=ratio, unit="x"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS)
    parser.add_argument("--prefix", default="h200", help="of the result's name: the machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the result")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--small", action="store_true", help="a tiny model and short loads, to try the script")
    parser.add_argument("--here", metavar="PLUGIN", help="in this process: one plugin, printed as JSON")
    arguments = parser.parse_args()
    if arguments.here:
        print_result(lambda: measure(arguments.here, arguments.model, arguments.given, small=arguments.small))
        return
    found: list[dict[str, Any]] = []
    for plugin in (NATIVE, FALLBACK):
        options = ["--here", plugin, "--model", arguments.model]
        options += [f"--set={text}" for text in arguments.given] + ["--small"] * arguments.small
        result = run_in_own_process(__file__, options)
        if "refused" in result:
            sys.exit(f"error: {plugin}: {result['refused']}")
        found.append(result)
    native, fallback = ([Row(**row) for row in one["rows"]] for one in found)
    compared = shares(native, fallback)
    for row in compared:
        print(f"{row.metric}, {row.case}: {row.value:.2f}")
    write(
        arguments.results / f"{arguments.prefix}-fallback.json",
        report("fallback", found[0]["machine"], [*native, *fallback, *compared], found[0]["settings"]),
    )


if __name__ == "__main__":
    main()
