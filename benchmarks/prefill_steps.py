"""Time of one step of prompts by its number of tokens, without piecewise CUDA graphs beyond 1,024 tokens and with.

    python benchmarks/prefill_steps.py [--cases qwen3-0.6b:none qwen3-0.6b:int8 qwen3-30b-a3b:none] [--json FILE]

Random weights, prompts of random tokens, one token out, no prefix cache; the fastest of four runs after two, and the
faster of two runs, after one, of 16 prompts of 2048 tokens. "measured" is the engine's own choice of the largest graph,
"all" captures steps of every size. The host's time of a step depends on the machine; the report has that of its phases
too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import write_model

from engine.cli.bench.load import Load, Measured, opened, run_load
from engine.cli.bench.report import Row, report, write
from engine.cli.tables import print_table
from engine.core.config import load_config
from engine.core.engine import Engine

CASES = ("qwen3-0.6b:none", "qwen3-0.6b:int8", "qwen3-30b-a3b:none")
TOKENS = (1000, 1300, 2000, 3000, 4000, 8000)
MAX_LEN = 4096
LIMITS = {"up to 1,024": 1024, "measured": 0, "all": 8192}
"""Which steps have graphs -> executor.max_graph_tokens."""
WARM_UP, RUNS = 2, 4
HOST = ("prepare", "launch")
"""Phases of the host that the report has."""


def fastest(engine: Engine, name: str, lengths: list[int], warm_up: int, runs: int) -> Measured:
    """The fastest of some runs of prompts computed together."""
    load = Load(name="", lengths=tuple((length, 1) for length in lengths))
    measured = [run_load(engine, load, prefix=f"{name}-{number}-") for number in range(warm_up + runs)]
    return min(measured[warm_up:], key=lambda run: run.seconds)


def measure(case: str, limit: str, path: Path, small: bool) -> Iterator[Row]:
    """Start an engine, and time its steps."""
    quant = case.partition(":")[2]
    overrides: dict[str, Any] = {
        "model.path": str(path),
        "model.load_format": "dummy",
        "model.max_len": 256 if small else MAX_LEN,
        "cache.prefix_caching": False,
        "scheduler.max_running": 16 if small else 256,
        "executor.max_graph_tokens": LIMITS[limit],
    }
    overrides |= {"cache.memory": "32MiB"} if small else {"cache.memory_fraction": 0.85}
    overrides |= {} if quant == "none" else {"quant.name": quant}
    name = f"{case}, graphs {limit}"
    begun = time.perf_counter()
    with opened(load_config(overrides=overrides).config) as engine:
        yield Row(metric="start-up", case=name, value=time.perf_counter() - begun, unit="s")
        for tokens in (40, 100) if small else TOKENS:
            lengths = [tokens] if tokens <= MAX_LEN else [tokens // 2] * 2
            run = fastest(engine, str(tokens), lengths, WARM_UP, RUNS)
            yield Row(metric=f"step of {tokens} tokens", case=name, value=run.seconds * 1e3, unit="ms")
            for phase in HOST:
                spent = run.phases.get(phase, 0.0)
                yield Row(metric=f"{phase}, of a step of {tokens}", case=name, value=spent * 1e3, unit="ms")
        count, length = (2, 100) if small else (16, 2048)
        run = fastest(engine, "prefill", [length] * count, 1, 2)
        rate = count * length / run.seconds
        yield Row(metric=f"prefill {count} x {length}", case=name, value=rate, unit="tokens/s")


def main() -> None:
    """Measure the cases, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL:QUANT", help="models of models.py")
    parser.add_argument("--limits", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--small", action="store_true", help="a tiny model and short prompts, to try the script")
    parser.add_argument("--json", type=Path, help="file to write the results to, after each engine")
    arguments = parser.parse_args()
    rows: list[Row] = []
    machine = ""
    with tempfile.TemporaryDirectory() as directory:
        for case in arguments.cases:
            path = write_model(Path(directory), "tiny" if arguments.small else case.partition(":")[0])
            for limit in arguments.limits:
                found = list(measure(case, limit, path, arguments.small))
                rows += found
                shown = [
                    (row.case, row.metric, f"{row.value:,.2f} {row.unit}") for row in found if " of a" not in row.metric
                ]
                print_table(["case", "metric", "value"], shown)
                if arguments.json is not None:
                    machine = machine or device_name()
                    settings = {"small": arguments.small, "max_batch_tokens": 8192}
                    write(arguments.json, report("prefill-steps", machine, rows, settings))


def device_name() -> str:
    """The GPU's name, or cpu."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
