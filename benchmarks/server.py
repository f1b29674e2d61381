"""Measures the CPU time of the HTTP server: of the front ends and of the engine process per streamed event.

    python benchmarks/server.py [--streams 256] [--interval 20] [--seconds 5] [--workers 1] [--chat] [--json FILE]

The engine is a stand-in that yields one token per stream every `interval` milliseconds. A separate process generates
the load over raw sockets. CPU time (user and system, all threads, as the kernel counts them) does not depend on other
load on the machine as wall time would. The machine must still keep up with the interval: otherwise several tokens share
a write and look too cheap, which shows as `writes per event` below 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

import engine.demo
from engine.core.config import EngineConfig, ExecutorConfig, ModelConfig, ServerConfig
from engine.core.executors import Health
from engine.core.plugin_host import ChosenPlugin
from engine.core.types import CacheInfo, EngineStats, Output, Request, SamplingParams

VOCAB = 400
PROMPT_TOKENS = 512
COMMON_LABELS = r'(model_name|replica)="[^"]*",?'


@attrs.define
class Parts:
    choices: tuple[ChosenPlugin, ...] = (
        ChosenPlugin(extension_point="executors", name="paced", provenance="benchmark", reason="a stand-in"),
    )


class PacedEngine:
    """Yields one token per request at fixed times; the part of `Engine` that the engine process uses."""

    def __init__(self, config: EngineConfig) -> None:
        self._interval = config.executor.options["interval"]
        self._next_step = 0.0
        self._counts: dict[str, int] = {}
        self._cost = 0.0
        self._stats = EngineStats(blocks_total=1)
        self._steps = self._tokens = 0
        self.max_len = 10**6
        self.vocab_size = VOCAB
        self.default_params = SamplingParams()
        self.parts = Parts()
        self.cache_info = CacheInfo(
            num_blocks=1,
            block_size=16,
            weights_bytes=0,
            activation_bytes=0,
            kv_bytes=0,
            budget_bytes=0,
            device="no device",
            dtype="float32",
        )

    def can_add(self, request: Request) -> bool:
        """Whether `add` would not wait; this engine compiles no grammars."""
        return True

    def add(self, request: Request) -> None:
        self._counts[request.id] = 0

    def abort(self, request_id: str) -> None:
        self._counts.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._counts)

    def step(self) -> list[Output]:
        now = time.monotonic()
        self._next_step = max(self._next_step + self._interval, now)
        time.sleep(self._next_step - now)
        start = time.thread_time()
        counts = self._counts
        outputs = []
        for request, count in counts.items():
            counts[request] = count + 1
            outputs.append(Output(request=request, tokens=(64 + (count * 7) % 300,)))
        self._steps += 1
        self._tokens += len(outputs)
        self._cost += time.thread_time() - start
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._counts),
            blocks_total=1,
            steps=self._steps,
            generation_tokens=self._tokens,
            seconds=(("stand-in", self._cost),),
        )

    def check(self) -> Health:
        return Health(ok=True)

    def close(self) -> None:
        pass


def serve(options: argparse.Namespace) -> int:
    """Run the server with the stand-in engine."""
    from engine import server
    from engine.server.supervisor.main import Commands

    config = EngineConfig(
        model=ModelConfig(path=str(Path(engine.demo.__file__ or "").with_name("engine-demo")), served_name="bench"),
        executor=ExecutorConfig(options={"interval": options.interval / 1e3}),
        server=attrs.evolve(ServerConfig(port=0), **({"api_workers": options.workers} if options.workers else {})),
    )
    return server.run(config, commands=Commands(engine=[sys.executable, "-P", __file__, "engine"]))


def load(options: argparse.Namespace, url: str) -> None:
    """Open all streams and read them until the time is over; prints "begun" when each has sent an event."""
    # With few cores, waking this reader at each event would take the core and its caches from the front end.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    address = url.removeprefix("http://").rpartition(":")
    body: dict[str, Any] = {"model": "bench", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    path = "/v1/completions"
    if options.chat:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "x" * PROMPT_TOKENS}]}
    else:
        body |= {"prompt": [65] * PROMPT_TOKENS}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(options.streams):
        connection = socket.create_connection((address[0], int(address[2])))
        connection.sendall(head.encode() + data)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    begun: set[int] = set()
    deadline = 0.0
    while not deadline or time.monotonic() < deadline:
        for key, _ in selector.select(1):
            got = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            assert got, "a stream ended"
            if not deadline:
                assert not got.startswith(b"HTTP/1.1 4"), got
                begun.add(key.fd)
                if len(begun) == options.streams:
                    deadline = time.monotonic() + options.seconds + 1
                    print("begun", flush=True)
    sys.stdin.read()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all threads, seconds."""
    spent = (int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(spent) / 1e9


def num_writes(pid: int) -> int:
    """Number of a process's system calls that wrote data."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw"))


def processes(pid: int) -> Iterator[tuple[str, int]]:
    """Yield (role, process ID) of the server and its children."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    yield ("supervisor" if len(children) > 1 else "front end"), pid
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        yield ("engine" if b"engine" in words else "front end"), child


def sample(pid: int) -> dict[str, float]:
    """CPU seconds by role, and the front ends' number of writes."""
    found = {"supervisor": 0.0, "front end": 0.0, "engine": 0.0, "writes": 0.0}
    for role, process in processes(pid):
        found[role] += cpu_seconds(process)
        if role == "front end":
            found["writes"] += num_writes(process)
    return found


def engine_counters(url: str) -> dict[str, float]:
    """The samples of /metrics by name and labels, but for those of the model and its only replica."""
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {re.sub(COMMON_LABELS, "", name).replace("{}", ""): float(value) for name, _, value in pairs}


def measure(options: argparse.Namespace) -> Mapping[str, float]:
    """Run the server and the load once; the costs by name."""
    same = sys.argv[1:]
    command = [sys.executable, "-P", __file__]
    with subprocess.Popen([*command, "serve", *same], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if line.startswith("Listening on"))
        generator = subprocess.Popen(
            [*command, "load", *same, "--url", url], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        assert generator.stdout is not None
        assert generator.stdin is not None
        assert generator.stdout.readline() == "begun\n"
        time.sleep(0.5)
        before, engine_before = sample(server.pid), engine_counters(url)
        time.sleep(options.seconds)
        after, engine_after = sample(server.pid), engine_counters(url)
        generator.stdin.close()
        generator.wait()
        server.terminate()
    increase = {name: engine_after[name] - engine_before.get(name, 0.0) for name in engine_after}
    tokens = increase["engine_generation_tokens_total"]
    cost = {role: after[role] - before[role] for role in after}
    stand_in = increase['engine_phase_seconds_total{phase="stand-in"}']
    return {
        "tokens": tokens,
        "writes per event": cost["writes"] / tokens,
        "front end, us per event": cost["front end"] / tokens * 1e6,
        "engine process, us per output": (cost["engine"] - stand_in) / tokens * 1e6,
        "stand-in, us per output": stand_in / tokens * 1e6,
        "supervisor, us per event": cost["supervisor"] / tokens * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", default="measure", choices=("measure", "serve", "engine", "load"))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--interval", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--url", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.role == "serve":
        return serve(options)
    if options.role == "engine":
        from engine.server.engine_process import main as engine_process

        return engine_process.run(PacedEngine)  # type: ignore[arg-type]
    if options.role == "load":
        load(options, options.url)
        return 0
    result = measure(options)
    for name, value in result.items():
        print(f"{name:32} {value:12.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
