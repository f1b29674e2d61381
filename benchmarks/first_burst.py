"""Time to the first token of the first burst of requests after a start, and of two bursts after it.

    python benchmarks/first_burst.py [--cases qwen3-0.6b:256:replicas=2,llama-3.1-8b:64:tp=2] [--json FILE]

A case is MODEL:REQUESTS[:replicas=N | :tp=N]. Each starts a server and sends all requests as soon as the server
listens: 512 random prompt tokens, 64 output tokens, temperature 1. The later bursts take as long as their prompts take;
if the first takes longer, the start left something to be compiled or captured. Random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from models import MODELS, write_model

from engine.cli.bench.level import percentile
from engine.cli.bench.report import Row, report, write
from engine.cli.bench.server_process import Server, running
from engine.core.config import load_config
from engine.server.shared.authority import authority

CASES = "qwen3-0.6b:64,qwen3-0.6b:256,llama-3.1-8b:64"
BURSTS = 3
PAUSE = 1.0
"""Seconds between two bursts."""
COUNTER = re.compile(r"^engine_(kernels_compiled|graphs_captured)_total\S* (\S+)$", re.MULTILINE)


async def stream(server: Server, prompt: list[int], max_tokens: int) -> float:
    """Send one streaming completion; returns the seconds to its first token."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    payload = json.dumps(body | {"temperature": 1.0}).encode()
    host = authority(server.host, server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"error: the server answered {status!r}")
    await reader.readuntil(b"\ndata: ")
    first = time.perf_counter() - begin
    await reader.read()
    writer.close()
    return first


async def burst(server: Server, prompts: list[list[int]], max_tokens: int) -> list[float]:
    """Send all prompts concurrently; returns the seconds to each first token, ascending."""
    return sorted(await asyncio.gather(*(stream(server, prompt, max_tokens) for prompt in prompts)))


def late_work(server: Server) -> dict[str, float]:
    """Kernels compiled and graphs captured while serving, of all replicas."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        found: dict[str, float] = {}
        for name, value in COUNTER.findall(answer.read().decode()):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def measure(case: str, given: list[str], *, small: bool) -> list[Row]:
    """The rows of one case."""
    model, requests, *options = case.split(":")
    names = {"replicas": "server.replicas", "tp": "executor.tensor_parallel"}
    settings: dict[str, Any] = {"model.load_format": "dummy", "model.max_len": 512 if small else 4096, "server.port": 0}
    for option in options:
        name, _, value = option.partition("=")
        settings[names[name]] = value
    settings |= dict(text.split("=", 1) for text in given)
    draw = random.Random(0)
    input_len, output_len = (16, 4) if small else (512, 64)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        settings["model.path"] = str(write_model(Path(directory), model, tokenizer=True))
        with running(load_config(overrides=settings).config) as server:
            for number in range(BURSTS):
                vocab_size = MODELS[model]["vocab_size"]
                prompts = [[draw.randrange(256, vocab_size) for _ in range(input_len)] for _ in range(int(requests))]
                seconds = asyncio.run(burst(server, prompts, output_len))
                for part in (50, 99):
                    value = percentile(seconds, part / 100) * 1e3
                    rows.append(Row(metric=f"TTFT p{part}", case=f"{case}, burst {number + 1}", value=value, unit="ms"))
                time.sleep(PAUSE)
            for name, count in late_work(server).items():
                rows.append(Row(metric=f"{name} while serving", case=case, value=count, unit="count"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="MODEL:REQUESTS[:replicas=N | :tp=N], with commas between")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--small", action="store_true", help="short prompts, to try the script")
    parser.add_argument("--machine", default="", help="name of the machine in the result")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for case in arguments.cases.split(","):
        found = measure(case, arguments.given, small=arguments.small)
        rows += found
        for row in found:
            print(f"{row.case:45} {row.metric:35} {row.value:10.1f} {row.unit}", flush=True)
    if arguments.json:
        write(arguments.json, report("first-burst", arguments.machine, rows, {"given": arguments.given}))


if __name__ == "__main__":
    main()
