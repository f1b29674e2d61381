"""Compares two interpreters, one with the GIL and one without, on the same benchmarks.

    python benchmarks/free_threading.py GIL_PYTHON FREE_PYTHON [--runs 5] [--only texts,scheduler] [--json FILE]

Both are interpreters of one version, each with the project and its dependencies installed. Runs alternate, and the
median of each figure counts. A run is one of

- scheduler: benchmarks/scheduler.py, as steps per second of planning and committing
- engine: the demo model on the CPU with one thread, as steps per second of processor time, so that other load
  does not count
- server: benchmarks/server.py, processor time of a front end and of the engine process per streamed token
- latency: benchmarks/worst_latency.py, for two requests that a front end handles in threads
- texts: rendering chats, alone and with tokenizing them, in 1, 2 and 4 threads of one process, as a front end does with
  long ones; templates are Python code, while the tokenizer releases the GIL

"the GIL is off" is 1 where an interpreter that could run without the GIL did so until the end of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.cli.bench.load import say
from engine.cli.bench.report import Row, report, write

HERE = Path(__file__).resolve().parent
Figures = dict[tuple[str, str], float]
"""Values by metric and unit."""

THREADS = (1, 2, 4)
CHATS, REPEATS, MESSAGES, CHARS = 32, 4, 60, 300
"""Chats that the threads share, how often each comes, messages of a chat, and characters of a message."""
LOADS = ((1, 128, 256), (64, 128, 64))
"""Loads of `engine`: requests, prompt tokens, output tokens."""
CASES = "^(3,000 messages of 20 characters|256 prompts of 8,191 characters)"


def run_script(python: str, *arguments: str, **environment: str) -> Mapping[str, Any]:
    """Run a command that writes JSON to a file, and return what it wrote. environment: further variables."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "result.json"
        command = [python, *arguments, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=HERE.parent, env=os.environ | environment)
        result: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result


def scheduler(python: str) -> Figures:
    """Steps per second of planning and committing."""
    rows = run_script(python, str(HERE / "scheduler.py"), "--repeat", "9")["rows"]
    spent: dict[str, float] = {}
    for row in rows:
        load, _, phase = row["metric"].rpartition(": ")
        if row["unit"] == "us/step" and phase in ("schedule", "commit"):
            spent[load] = spent.get(load, 0.0) + row["value"]
    return {(load, "steps/s"): 1e6 / each for load, each in spent.items()}


def engine(python: str) -> Figures:
    """Steps per second of the engine in one process, of its processor time."""
    found = run_script(python, str(Path(__file__)), "--measure", "engine", OMP_NUM_THREADS="1")
    return {(name, "steps/s"): value for name, value in found.items()}


def server(python: str) -> Figures:
    """Processor time of the server per streamed token."""
    found = run_script(python, str(HERE / "server.py"))
    units = {"front end, us per event": "us/event", "engine process, us per output": "us/output"}
    return {(f"256 streams, {name.partition(',')[0]}", unit): found[name] for name, unit in units.items()}


def latency(python: str) -> Figures:
    """The longest gap in a stream while a front end handles a long request in threads."""
    rows = run_script(python, str(HERE / "worst_latency.py"), "--only", CASES)["rows"]
    wanted = {"stream": "gap of another's stream", "took": "time of the request"}
    return {(f"{row['case']}: {wanted[row['metric']]}", "ms"): row["value"] for row in rows if row["metric"] in wanted}


def texts(python: str) -> Figures:
    """Chats per second, rendered and tokenized, by number of threads."""
    found = run_script(python, str(Path(__file__)), "--measure", "texts")
    return {(name, "chats/s" if "threads" in name else "1 or 0"): value for name, value in found.items()}


RUNS: Mapping[str, Callable[[str], Figures]] = {
    "scheduler": scheduler,
    "engine": engine,
    "server": server,
    "latency": latency,
    "texts": texts,
}


def render_chats() -> dict[str, float]:
    """The figures of `texts`, in this process."""
    import engine.demo
    from engine.core.text import Tokenizer

    tokenizer = Tokenizer.open(Path(engine.demo.__file__ or "").with_name("engine-demo"))
    words = "the quick brown fox jumps over the lazy dog, and says so. "
    roles = ("user", "assistant")
    chats = [
        [
            {"role": roles[at % 2], "content": f"{number} {at} {words * (CHARS // len(words))}"}
            for at in range(MESSAGES - 1)
        ]
        for number in range(CHATS)
    ]
    rates: dict[str, float] = {}
    for name, work in (("rendering", tokenizer.render_chat), ("rendering and tokenizing", tokenizer.chat)):
        for threads in THREADS:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, chats[:threads]))
                begin = time.perf_counter()
                list(pool.map(work, chats * REPEATS))
                rates[f"{name}, {threads} threads"] = REPEATS * CHATS / (time.perf_counter() - begin)
    enabled = getattr(sys, "_is_gil_enabled", lambda: True)()
    return rates | {"the GIL is off": float(not enabled)}


def run_engine() -> dict[str, float]:
    """The figures of `engine`, in this process."""
    import engine.demo
    from engine.cli.bench.load import make_load, opened, run_load
    from engine.core.config import load_config

    path = Path(engine.demo.__file__ or "").with_name("engine-demo")
    overrides = {"model.path": str(path), "executor.device": "cpu", "cache.memory": "256MiB"}
    rates: dict[str, float] = {}
    with opened(load_config(overrides=overrides).config) as opened_engine:
        for count, prompt, output in LOADS:
            load = make_load(count, (prompt, prompt), (output, output), 0)
            run_load(opened_engine, load, prefix="warm-")
            begin = time.process_time()
            steps = run_load(opened_engine, load, prefix="run-").steps
            rates[f"demo model, {load.name}"] = steps / (time.process_time() - begin)
    return rates


MEASUREMENTS: Mapping[str, Callable[[], dict[str, float]]] = {"engine": run_engine, "texts": render_chats}
"""Runs of this file itself, in the interpreter that is measured."""


def build(python: str) -> str:
    """The version of an interpreter, and the flags that it was compiled with."""
    code = "import sys, sysconfig; print(sys.version.split(' (')[0], '|', sysconfig.get_config_var('CFLAGS'))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="with the GIL, then without")
    parser.add_argument("--measure", choices=MEASUREMENTS, help="measure one run in this interpreter")
    parser.add_argument("--runs", type=int, default=5, help="runs of each interpreter")
    parser.add_argument("--only", default=",".join(RUNS), help="names of the runs, with commas")
    parser.add_argument("--machine", default="", help="name of the machine in the result, and its load")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    if arguments.measure:
        rates = MEASUREMENTS[arguments.measure]()
        for name, value in rates.items():
            print(f"{name:40} {value:10.2f}")
        if arguments.json:
            arguments.json.write_text(json.dumps(rates), encoding="utf-8")
        return
    if len(arguments.pythons) != 2 or not set(arguments.only.split(",")) <= set(RUNS):
        parser.error(f"give two interpreters, and of the runs some of {', '.join(RUNS)}")

    rows, loads = [], []
    for name in arguments.only.split(","):
        found: tuple[list[Figures], list[Figures]] = ([], [])
        for number in range(arguments.runs):
            for python, figures in zip(arguments.pythons, found, strict=True):
                loads.append(os.getloadavg()[0])
                figures.append(RUNS[name](python))
            say(f"{name}: run {number + 1} of {arguments.runs}")
        for metric, unit in found[0][0]:
            gil, free = (statistics.median(one[metric, unit] for one in figures) for figures in found)
            rows.append(
                Row(metric=metric, case=name, value=free, unit=unit, baseline=gil, baseline_name="with the GIL")
            )
            print(f"{metric:70} {gil:12.2f} {free:12.2f} {unit:16} {free / gil if gil else 0:6.2f}", flush=True)
    if arguments.json:
        settings = {
            "interpreters": [build(python) for python in arguments.pythons],
            "runs": arguments.runs,
            "cores": len(os.sched_getaffinity(0)),
            "load of the machine": [min(loads), max(loads)],
            "PYTHON_GIL": os.environ.get("PYTHON_GIL"),
        }
        write(arguments.json, report("free-threading", arguments.machine, rows, settings))


if __name__ == "__main__":
    main()
