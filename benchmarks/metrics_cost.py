"""Measures what metrics, KV events, traces and a profile cost a server under load: output tokens a second.

    python benchmarks/metrics_cost.py [--model qwen3-0.6b | demo] [--concurrency 64,256] [--rounds 5]
        [--kv-memory 22GiB] [--set KEY=VALUE ...] [--json benchmarks/results/h200-metrics-cost.json]

All servers run side by side on one device, with KV caches of one size. One of them at a time is under load, in turn,
so that a change of the machine's speed concerns all. Each round begins with another server. "after a profile" is the
server with the default metrics once more, after a trace of all its processes was started and stopped.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import socket
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from models import MODELS, write_model

from engine.cli.bench.report import Row, report, write
from engine.cli.bench.serve import LoadLevel, apply_load, processes_for
from engine.cli.bench.server_process import Server, running
from engine.core.config import load_config

DEMO = Path(__file__).parent.parent / "demo" / "engine-demo"
ADMIN_KEY = "metrics-cost"
PROFILED = "default metrics, after a profile"


class Collector(http.server.BaseHTTPRequestHandler):
    """Accepts traces."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def servers(collector: int, directory: str) -> dict[str, dict[str, Any]]:
    """Name of a server -> its settings."""
    everything = {
        "cache.metrics": True,
        "kv_events.endpoint": f"tcp://127.0.0.1:{free_port()}",
        "server.otlp_endpoint": f"http://127.0.0.1:{collector}",
        "server.phase_times": True,
    }
    return {
        "no roofline metrics": {"roofline.metrics": False},
        "default metrics": {"server.admin_api_key": (ADMIN_KEY,), "server.profile_dir": directory},
        "KV metrics and events, traces, phase times": everything,
    }


def profile(server: Server) -> None:
    """Start a trace of all processes and stop it."""
    for call in ("start_profile", "stop_profile"):
        address = f"http://{server.host}:{server.port}/{call}"
        head = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, b"{}", head)) as answer:
            answer.read()
        time.sleep(1.0)


def measure(
    running_servers: dict[str, Server], loads: list[LoadLevel], rounds: int
) -> dict[tuple[str, str], list[float]]:
    """(server, level) -> output tokens a second of each round."""
    rates: dict[tuple[str, str], list[float]] = {}
    names = list(running_servers)
    for number in range(-1, rounds):  # round -1 warms the servers up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for load in loads:
                level = apply_load(running_servers[name], load, "", (None, None))
                if failed := len(level.answers) - len(level.served):
                    raise SystemExit(f"error: {failed} requests failed on the server with {name}")
                if number >= 0:
                    rates.setdefault((name, load.name), []).append(level.output_rate)
                    print(f"round {number + 1}, {name}, {load.name}: {level.output_rate:,.0f} tokens/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=[*MODELS, "demo"])
    parser.add_argument("--concurrency", default="64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8, help="requests per concurrent request")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--kv-memory", default="22GiB", help="size of each server's KV cache")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--machine", default="", help="name of the machine in the result")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    os.environ["ENGINE_ADMIN_API_KEY"] = ADMIN_KEY  # a server's configuration file has no secrets
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    given = dict(text.split("=", 1) for text in arguments.given)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        common: dict[str, Any] = {"cache.memory": arguments.kv_memory, "server.port": 0, "model.max_len": 4096}
        path = DEMO
        if arguments.model != "demo":
            path = write_model(Path(directory), arguments.model, tokenizer=True)
            common["model.load_format"] = "dummy"
        common["model.path"] = str(path)
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        loads = [
            LoadLevel(
                concurrency=count,
                requests=arguments.requests * count,
                input_len=arguments.input_len,
                output_len=arguments.output_len,
                vocab_size=vocab_size,
                processes=processes_for(count),
                seed=1,
                timeout=600.0,
            )
            for count in map(int, arguments.concurrency.split(","))
        ]
        kinds = servers(collector.server_address[1], directory)
        started = {
            name: stack.enter_context(running(load_config(overrides=common | settings | given).config))
            for name, settings in kinds.items()
        }
        rates = measure(started, loads, arguments.rounds)
        profile(started["default metrics"])
        rates |= measure({PROFILED: started["default metrics"]}, loads, arguments.rounds)
    base = next(iter(kinds))
    rows = []
    for (name, level), values in rates.items():
        rows.append(
            Row(
                metric="output tokens a second",
                case=f"{name}, {level}",
                value=median(values),
                unit="tokens/s",
                baseline=median(rates["default metrics" if name == PROFILED else base, level]),
                baseline_name="default metrics" if name == PROFILED else base,
            )
        )
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        share = rows[-1].value / (rows[-1].baseline or 1.0) - 1
        print(f"{name:45} {level:17} {rows[-1].value:10,.0f} ({spread}) {share:+.1%} to {rows[-1].baseline_name}")
    if arguments.json:
        settings = {
            "model": arguments.model,
            "input_len": arguments.input_len,
            "output_len": arguments.output_len,
            "requests per concurrent request": arguments.requests,
            "kv_memory": arguments.kv_memory,
            "cores": os.cpu_count(),
            "given": arguments.given,
            "rounds": {f"{name}, {level}": values for (name, level), values in rates.items()},
        }
        write(arguments.json, report("cost of metrics", arguments.machine, rows, settings))


if __name__ == "__main__":
    main()
