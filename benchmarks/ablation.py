"""What each optimization is worth: times of decode steps, and output tokens per second, with one changed at a time.

    python benchmarks/ablation.py [--model llama-3.1-8b] [--prefix h200] [--only LABEL,...] [--set KEY=VALUE ...]

Each variant runs in a process of its own, with random weights. Writes benchmarks/results/PREFIX-ablation.json; `make
docs` makes the table. A variant that the machine or a plugin refuses is listed under "refused", with the message.
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

from engine.cli.bench import latency, throughput
from engine.cli.bench.load import make_load, opened
from engine.cli.bench.report import Row, engine_settings, report, write
from engine.core.config import load_config
from engine.plugins.schedulers.fcfs import FirstComeFirstServed

RESULTS = Path(__file__).resolve().parent / "results"
ALL = "as shipped"


class SeveralSteps(FirstComeFirstServed):
    """First come, first served, with several decode steps issued together while no request waits."""

    count = 1

    def decode_steps(self, running: Any, waiting: Any) -> int:
        """`count`, or 1 while requests wait to be admitted."""
        return 1 if waiting else self.count


VARIANTS: dict[str, dict[str, str]] = {
    ALL: {},
    "plain kernels": {"executor.kernels": "plain"},
    "no graphs": {"executor.graphs": "off"},
    "no overlap": {"scheduler.overlap": "off"},
    "attention: torch": {"attention.name": "torch"},
    "attention: triton": {"attention.name": "triton"},
    "attention: flashinfer": {"attention.name": "flashinfer"},
    "4 decode steps at once": {"steps": "4"},
    "8 decode steps at once": {"steps": "8"},
}
"""Label -> settings; "steps" is `SeveralSteps.count`."""


def measure(label: str, model: str, given: list[str], *, small: bool) -> dict[str, Any]:
    """One variant, in this process: rows, machine and settings."""
    settings = dict(VARIANTS[label])
    steps = settings.pop("steps", None)
    policy = None
    if steps is not None:
        policy = SeveralSteps()
        policy.count = int(steps)
    overrides: dict[str, Any] = {
        "model.load_format": "dummy",
        "model.max_len": 512 if small else 4096,
        "cache.prefix_caching": False,
        "scheduler.max_running": 256,
    }
    if small:
        overrides["cache.memory"] = "32MiB"
    overrides |= dict(text.split("=", 1) for text in given)
    overrides |= settings
    batches, load = (
        ((1, 2), make_load(4, (8, 8), (4, 4))) if small else ((1, 32, 256), make_load(512, (128, 128), (128, 128)))
    )
    with tempfile.TemporaryDirectory() as directory:
        overrides["model.path"] = str(write_model(Path(directory), "tiny" if small else model))
        with opened(load_config(overrides=overrides).config, policy) as engine:
            measured = latency.measure(engine, batches, steps=16 if small else 128, prefill=None)
            result = throughput.measure(engine, load, 2)
    rows = [
        *(
            Row(metric=f"decode step, batch {one.batch}", case=label, value=one.step * 1e3, unit="ms")
            for one in measured.decodes
        ),
        Row(metric=f"output tokens a second, {load.name}", case=label, value=result.output_rate, unit="tokens/s"),
    ]
    return {
        "rows": [asdict(row) for row in rows],
        "machine": engine.cache_info.device,
        "settings": engine_settings(engine) | {"model": model, "given": given},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS)
    parser.add_argument("--prefix", default="h200", help="of the result's name: the machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the result")
    parser.add_argument("--only", default=",".join(VARIANTS), metavar="LABEL,...", help="of " + ", ".join(VARIANTS))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--small", action="store_true", help="a tiny model and short loads, to try the script")
    parser.add_argument("--here", action="store_true", help="in this process: one variant, printed as JSON")
    arguments = parser.parse_args()
    labels = arguments.only.split(",")
    unknown = [label for label in labels if label not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {', '.join(unknown)}; known: {', '.join(VARIANTS)}")
    if arguments.here:
        print_result(lambda: measure(labels[0], arguments.model, arguments.given, small=arguments.small))
        return

    rows: list[Row] = []
    refused: dict[str, str] = {}
    machine, settings = "", {}
    for label in labels:
        options = ["--here", "--only", label, "--model", arguments.model]
        options += [f"--set={text}" for text in arguments.given] + ["--small"] * arguments.small
        found = run_in_own_process(__file__, options)
        if "refused" in found:
            refused[label] = found["refused"]
        else:
            rows += [Row(**row) for row in found["rows"]]
            machine, settings = found["machine"], settings or found["settings"]
        print(f"{label}: {refused.get(label, 'measured')}", file=sys.stderr)
    if not rows:
        sys.exit("error: no variant could be measured; the refusals are above")
    write(
        arguments.results / f"{arguments.prefix}-ablation.json",
        report("ablation", machine, rows, settings | {"refused": refused}),
    )


if __name__ == "__main__":
    main()
