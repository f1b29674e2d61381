"""The rows by which vLLM and SGLang were measured (references.json), for this engine: one process per case.

    python benchmarks/vllm_table.py [--prefix h200] [--cases qwen3-0.6b:none,llama-3.1-8b:fp8] [--set KEY=VALUE ...]

Writes benchmarks/results/PREFIX-MODEL-QUANT.json for each case; `make docs` makes the tables. Random weights, token-id
prompts, greedy, ignore_eos; context 4096, 0.85 of the memory, no prefix cache, at most 256 running. Decode steps: 128
in, the time of 129 tokens less that of one, the better of two runs each, over 128. Prefill: 16 prompts of 2048, the
better of two. Throughput: one run each of 1000 requests of 512 in and 256 out, and of 256 with both from 100 to 1024.
Llama-3.2-1B and Qwen3-4B have other batches and one more load, as vLLM had when it was measured with them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models import write_model

REFERENCED = {
    "qwen3-0.6b:none": "qwen3-0.6b",
    "llama-3.1-8b:none": "llama-3.1-8b",
    "llama-3.1-8b:fp8": "llama-3.1-8b",
    "llama-3.1-8b:int8": "llama-3.1-8b",
    "llama-3.1-8b:w4a16": "llama-3.1-8b-w4a16",
    "llama-3.2-1b:none": "llama-3.2-1b",
    "qwen3-4b:none": "qwen3-4b",
    "qwen3-4b:fp8": "qwen3-4b",
}
"""MODEL:QUANT, as in the result's name -> name in models.py. A w4a16 model's config.json says how it is quantized."""
CASES = REFERENCED | {
    "qwen3-0.6b:fp8": "qwen3-0.6b",
    "qwen3-0.6b:int8": "qwen3-0.6b",
    "qwen3-0.6b:w4a16": "qwen3-0.6b-w4a16",
}
"""The same, and cases in which vLLM and SGLang were not measured."""
ONLINE = ("fp8", "int8")
"""QUANT of cases that are quantized while loading, by the plugin of this name."""
LATER = ("llama-3.2-1b:none", "qwen3-4b:none", "qwen3-4b:fp8")
"""Cases in which vLLM was measured with LATER_BATCHES and LATER_LOADS."""
BATCHES = (1, 8, 32, 64, 128, 256)
LATER_BATCHES = (1, 96, 256)
LATER_LOADS = ((1000, (300, 300), (200, 200)),)
"""(Requests, prompt tokens, output tokens), measured after the loads of all cases."""
RESULTS = Path(__file__).resolve().parent / "results"


def run_case(case: str, file: Path, given: list[str], *, small: bool) -> None:
    """Measure one case in this process, and write its result."""
    from engine.cli.bench import latency, throughput
    from engine.cli.bench.load import make_load, opened
    from engine.cli.bench.report import Row, engine_settings, report, write
    from engine.cli.bench.roofline import measured_roofline
    from engine.core.config import load_config
    from engine.core.engine import Engine  # noqa: F401  (start-up counts from here, as theirs does: all imported)

    begun = time.perf_counter()
    model, _, quant = case.partition(":")
    overrides: dict[str, Any] = {
        "model.load_format": "dummy",
        "model.max_len": 512 if small else 4096,
        "cache.prefix_caching": False,
        "scheduler.max_running": 256,
    }
    if quant in ONLINE:
        overrides["quant.name"] = quant
    overrides |= {"cache.memory": "32MiB"} if small else {"cache.memory_fraction": 0.85}
    overrides |= dict(text.split("=", 1) for text in given)
    later = case in LATER
    batches, prefill, loads = LATER_BATCHES if later else BATCHES, (16, 2048), [*throughput.PRESETS.values()]
    if later:
        loads += LATER_LOADS
    if small:
        batches, prefill, loads = (1, 2), (2, 64), [(4, (8, 8), (4, 4))]
    with tempfile.TemporaryDirectory() as directory:
        overrides["model.path"] = str(write_model(Path(directory), "tiny" if small else CASES[case]))
        with opened(load_config(overrides=overrides).config) as engine:
            ready = time.perf_counter() - begun
            measured = latency.measure(engine, batches, steps=16 if small else 128, prefill=prefill)
            results = [throughput.measure(engine, make_load(*shape), 1) for shape in loads]
    roofline = measured_roofline(engine, None, None)
    if roofline is not None:
        most = engine.config.scheduler.max_running
        results = [throughput.with_floor(result, roofline, most) for result in results]
    machine = engine.cache_info.device
    latency.print_latency(measured, roofline, machine)
    throughput.print_results(results, machine)
    rows = [
        *measured.rows(roofline),
        *(row for result in results for row in throughput.rows_of(result)),
        Row(metric="start-up", value=ready, unit="s"),
    ]
    settings = engine_settings(engine) | {
        "model": model,
        "quant": quant,
        "given": given,
        "ceilings": roofline.ceilings.source if roofline is not None else None,
        "weights_floor_ms": roofline.weights() * 1e3 if roofline is not None else None,
    }
    write(file, report("vllm-table", machine, rows, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default="h200", help="of the results' names: the machine")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--cases", default=",".join(CASES), help="MODEL:QUANT, with commas between")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--small", action="store_true", help="a tiny model and short loads, to try the script")
    parser.add_argument("--here", action="store_true", help="in this process: exactly one case")
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        parser.error(f"unknown cases {', '.join(unknown)}; known: {', '.join(CASES)}")
    if arguments.here:
        [case] = cases
        file = arguments.results / f"{arguments.prefix}-{case.replace(':', '-')}.json"
        run_case(case, file, arguments.given, small=arguments.small)
        return
    failed = []
    for case in cases:
        command = [sys.executable, __file__, "--here", "--cases", case, "--prefix", arguments.prefix]
        command += ["--results", str(arguments.results)]
        command += [f"--set={text}" for text in arguments.given] + ["--small"] * arguments.small
        if subprocess.run(command, check=False).returncode:
            failed.append(case)
    if failed:
        sys.exit(f"error: no result for {', '.join(failed)}; the errors are above")


if __name__ == "__main__":
    main()
