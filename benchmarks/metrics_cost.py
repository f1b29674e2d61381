"""Measures what metrics, KV events, traces and a profile cost a server under load: output tokens per second.

    python benchmarks/metrics_cost.py [--servers off,default,sampled,everything] [--concurrency 64,256] [--rounds 5]
        [--seconds 2.5] [--model qwen3-0.6b | demo] [--set KEY=VALUE ...] [--json FILE]

The servers run side by side on one device, with KV caches of one size:

    off         `--no-roofline-metrics`
    default     the default metrics
    sampled     in addition KV metrics, of 1 % of the blocks, and traces of all requests
    everything  in addition KV events and phase times
    profiled    the default metrics, after a trace of all its processes was started and stopped
    again       the server `off` once more: what differs here is the measurement's own error

One of them at a time is under load. A round has one load per server, in an order that changes, and gives the ratio of
each server to `off` (of `profiled` to `default`). The result is the median of the rounds' ratios; of 5 rounds, the
least and the most enclose the true median with a probability of 94 %. The tokens that count are those between the end
of the first `concurrency` requests and the beginning of the last as many, while all connections are busy. Prompts
differ from round to round, so that none is found in the prefix cache.

Processor time is that of all processes of a server, per output token.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import attrs
from attrs import frozen
from models import MODELS, write_model

from engine.cli.bench.level import Level
from engine.cli.bench.report import Row, report, write
from engine.cli.bench.serve import LoadLevel, apply_load, processes_for
from engine.cli.bench.server_process import Server, running
from engine.core.config import load_config

DEMO = Path(__file__).parent.parent / "demo" / "engine-demo"
ADMIN_KEY = "metrics-cost"
SERVERS = ("off", "default", "sampled", "everything", "profiled", "again")
BASELINES = {"profiled": "default"}
"""What a server is compared with, if not with `off`."""
MIN_REQUESTS = 4
"""Requests per connection and load: one at the beginning and one at the end do not count."""


class Collector(http.server.BaseHTTPRequestHandler):
    """Accepts traces."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def collect() -> None:
    """Be a collector of traces, whose port is printed."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextmanager
def collector() -> Iterator[int]:
    """A collector in a process of its own, which takes no time from the load; yields its port."""
    with subprocess.Popen([sys.executable, __file__, "--collect"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def settings_of(name: str, collector_port: int, directory: str) -> dict[str, Any]:
    """The settings in which a server differs from the others."""
    if name == "off":
        return {"roofline.metrics": False}
    if name == "profiled":
        return {"server.admin_api_key": (ADMIN_KEY,), "server.profile_dir": directory}
    settings: dict[str, Any] = {}
    if name in ("sampled", "everything"):
        settings |= {"cache.metrics": True, "server.otlp_endpoint": f"http://127.0.0.1:{collector_port}"}
    if name == "everything":
        settings |= {"kv_events.endpoint": f"tcp://127.0.0.1:{free_port()}", "server.phase_times": True}
    return settings


def profile(server: Server) -> None:
    """Start a trace of all processes and stop it."""
    for call in ("start_profile", "stop_profile"):
        address = f"{server.url}/{call}"
        head = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, b"{}", head)) as answer:
            answer.read()
        time.sleep(1.0)


@frozen
class Measured:
    """What one load has shown."""

    rate: float
    """Output tokens per second while all connections are busy."""
    processor: float
    """Microseconds of the server's processor time per output token."""


def measured(level: Level, concurrency: int) -> Measured:
    """The figures of a load. Raises SystemExit if a request has failed."""
    if level.errors:
        raise SystemExit(f"error: {sum(level.errors.values())} requests failed: {next(iter(level.errors))}")
    answers = level.served
    begin = sorted(one.events[-1] for one in answers)[concurrency - 1]
    end = sorted(one.sent for one in answers)[-concurrency]
    tokens = sum(one.tokens * sum(begin < event <= end for event in one.events) / len(one.events) for one in answers)
    everything = sum(one.tokens for one in answers)
    return Measured(tokens / (end - begin), 1e6 * (level.cores or 0.0) * level.seconds / everything)


def sized(load: LoadLevel, rate: float, seconds: float) -> LoadLevel:
    """The load with as many requests as take `seconds` at a rate of output tokens, a whole number per connection."""
    each = round(rate * seconds / load.output_len / load.concurrency)
    return attrs.evolve(load, requests=load.concurrency * max(MIN_REQUESTS, each + 2))


def measure(
    servers: Mapping[str, Server], loads: Sequence[LoadLevel], rounds: int, seconds: float
) -> dict[tuple[str, str], list[Measured]]:
    """(server, level) -> figures of each round."""
    found: dict[tuple[str, str], list[Measured]] = {}
    names = list(servers)
    sizes: dict[str, LoadLevel] = {}
    for name in names:  # warm up all servers; the first also shows how many requests take `seconds`
        for load in loads:
            level = apply_load(servers[name], load, "", (None, None))
            sizes.setdefault(load.name, sized(load, measured(level, load.concurrency).rate, seconds))
    if "profiled" in servers:
        profile(servers["profiled"])
    for number in range(rounds):
        shift = number // 2 % len(names)
        order = names[shift:] + names[:shift]
        for load in loads:
            for name in order if number % 2 == 0 else reversed(order):
                job = attrs.evolve(sizes[load.name], seed=number + 2)
                one = measured(apply_load(servers[name], job, "", (None, None)), load.concurrency)
                found.setdefault((name, load.name), []).append(one)
                print(
                    f"round {number + 1}, {name}, {load.name}: {one.rate:,.0f} tokens/s, {one.processor:.1f} us/token",
                    flush=True,
                )
    return found


def ratios(found: Mapping[tuple[str, str], list[Measured]], name: str, level: str) -> list[tuple[float, float]]:
    """Per round, the ratios of a server to its baseline: of the rates and of the processor times."""
    base = baseline(found, name, level)
    return [
        (one.rate / other.rate, one.processor / other.processor if other.processor else 1.0)
        for one, other in zip(found[name, level], found[base, level], strict=True)
    ]


def baseline(found: Mapping[tuple[str, str], list[Measured]], name: str, level: str) -> str:
    """The server that a server is compared with."""
    wanted = BASELINES.get(name, "off")
    return wanted if (wanted, level) in found else next(iter(found))[0]


def rows_of(found: Mapping[tuple[str, str], list[Measured]]) -> Iterator[Row]:
    """The rows of the report, which are printed too."""
    for name, level in found:
        case, base = f"{name}, {level}", baseline(found, name, level)
        own, other = found[name, level], found[base, level]
        rate = median(one.rate for one in own)
        yield Row(
            metric="output tokens a second",
            case=case,
            value=rate,
            unit="tokens/s",
            baseline=median(one.rate for one in other),
            baseline_name=base,
        )
        processor = median(one.processor for one in own)
        yield Row(metric="processor time", case=case, value=processor, unit="us/token")
        text = f"{name:11} {level:16} {rate:8,.0f} tokens/s, {processor:5.1f} us/token"
        if name != base:
            of_rates, of_times = zip(*ratios(found, name, level), strict=True)
            changes = [100 * (ratio - 1) for ratio in of_rates]
            for statistic, choose in (("median", median), ("least", min), ("most", max)):
                yield Row(metric=f"change to {base}, {statistic}", case=case, value=choose(changes), unit="%")
            text += f"; to {base}: {median(changes):+.1f} % ({min(changes):+.1f} to {max(changes):+.1f})"
            text += f", processor time {100 * (median(of_times) - 1):+.1f} %"
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="off,default,sampled,everything", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--model", default="qwen3-0.6b", choices=[*MODELS, "demo"])
    parser.add_argument("--concurrency", default="64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each load that count, about")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--kv-memory", default="22GiB", help="size of each server's KV cache")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--machine", default="", help="name of the machine in the result")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collect:
        collect()
        return
    names = arguments.servers.split(",")
    if unknown := [name for name in names if name not in SERVERS]:
        parser.error(f"--servers: {', '.join(unknown)} is not among {', '.join(SERVERS)}")
    if "again" in names and "off" not in names:
        parser.error("--servers: again needs off")
    os.environ["ENGINE_ADMIN_API_KEY"] = ADMIN_KEY  # a server's configuration file has no secrets
    given = dict(text.split("=", 1) for text in arguments.given)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        port = stack.enter_context(collector())
        common: dict[str, Any] = {"cache.memory": arguments.kv_memory, "server.port": 0}
        path = DEMO
        if arguments.model != "demo":
            path = write_model(Path(directory), arguments.model, tokenizer=True)
            common |= {"model.load_format": "dummy", "model.max_len": 4096}
        common["model.path"] = str(path)
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        loads = [
            LoadLevel(
                concurrency=count,
                requests=MIN_REQUESTS * count,
                input_len=arguments.input_len,
                output_len=arguments.output_len,
                vocab_size=vocab_size,
                processes=processes_for(count),
                seed=1,
                timeout=600.0,
            )
            for count in map(int, arguments.concurrency.split(","))
        ]
        started: dict[str, Server] = {}
        for name in names:
            if name != "again":
                settings = common | settings_of(name, port, directory) | given
                started[name] = stack.enter_context(running(load_config(overrides=settings).config))
        found = measure(
            {name: started["off" if name == "again" else name] for name in names},
            loads,
            arguments.rounds,
            arguments.seconds,
        )
    rows = list(rows_of(found))
    if arguments.json:
        settings = {
            "model": arguments.model,
            "input_len": arguments.input_len,
            "output_len": arguments.output_len,
            "seconds": arguments.seconds,
            "kv_memory": arguments.kv_memory,
            "cores": os.cpu_count(),
            "given": arguments.given,
            "rounds": {
                f"{name}, {level}": [attrs.asdict(one) for one in values] for (name, level), values in found.items()
            },
        }
        write(arguments.json, report("cost of metrics", arguments.machine, rows, settings))


if __name__ == "__main__":
    main()
