"""`engine bench serve`: latency and throughput of streaming completions from a server under load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from engine.cli.bench.ceilings import Bandwidth, MatmulRate
from engine.cli.bench.client import Answered, Answers, Job
from engine.cli.bench.level import Level, print_levels, within
from engine.cli.bench.load import TOKENS, parse_counts, say
from engine.cli.bench.report import Json, Plot, report, write
from engine.cli.bench.roofline import Roofline, configured_roofline, configured_running
from engine.cli.bench.server_process import Server, cpu_seconds, first_api_key, running
from engine.cli.opening import located
from engine.cli.options import configured, given_settings, refuse_settings
from engine.cli.positive_number import positive_number
from engine.core.config import DEFAULT, Resolved, describe, flatten
from engine.core.errors import ConfigError, ExecutorError

if TYPE_CHECKING:
    from engine.core.config import EngineConfig

COMMAND = (sys.executable, "-P", "-c", "from engine.cli.bench.client import main; main()")
SAME = ("input_len", "output_len", "vocab_size", "timeout", "text")
"""Fields of LoadLevel that each Job has unchanged."""
CONNECTIONS = 32
"""Default maximum of concurrent requests per load process."""
LEAD = 0.3
"""Seconds from the moment all load processes are ready to the start of the load, in which they open connections."""


@frozen(kw_only=True)
class LoadLevel:
    """One level of load: either `concurrency` requests at a time or `rate` requests per second."""

    concurrency: int = 0
    rate: float = 0.0
    requests: int
    input_len: int
    output_len: int
    vocab_size: int
    processes: int
    seed: int
    timeout: float
    text: bool = False
    """Send prompts as texts, which the server tokenizes."""

    @property
    def name(self) -> str:
        """The level, as tables show it."""
        return f"concurrency {self.concurrency}" if self.concurrency else f"{self.rate:g} requests/s"

    def jobs(self, server: Server, api_key: str) -> list[Job]:
        """One job per process, of equal size; at most one process per request."""
        count = min(self.processes, self.requests, self.concurrency or self.requests)
        share = attrs.asdict(self, filter=attrs.filters.include(*SAME))
        return [
            Job(
                host=server.host,
                port=server.port,
                model=server.model,
                api_key=api_key,
                requests=_part(self.requests, number, count),
                connections=_part(self.concurrency, number, count),
                rate=self.rate / count,
                seed=self.seed * 1000 + number,
                **share,
            )
            for number in range(count)
        ]


def _part(total: int, number: int, parts: int) -> int:
    return total // parts + (number < total % parts)


def apply_load(server: Server, load: LoadLevel, api_key: str, slo: tuple[float | None, float | None]) -> Level:
    """Apply one level of load to a server and wait for all answers.

    slo: maximum ms for TTFT and TPOT. Raises ExecutorError when a load process fails.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for job in load.jobs(server, api_key):
            processes.append(subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            _write(processes[-1], json.dumps(attrs.asdict(job)))
        for process in processes:
            _read(process)
        begin = time.monotonic() + LEAD
        for process in processes:
            _write(process, repr(begin))
        time.sleep(max(begin - time.monotonic(), 0.0))
        before = cpu_seconds(server.pid) if server.pid is not None else 0.0
        results = [_answers(_read(process)) for process in processes]
        used = cpu_seconds(server.pid) - before if server.pid is not None else None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    answers = tuple(answer for one in results for answer in one.answers)
    served = [one for one in answers if not one.error]
    last = max((one.events[-1] for one in served), default=time.monotonic())
    seconds = last - min(one.sent for one in answers)
    return Level(
        name=load.name,
        answers=answers,
        seconds=seconds,
        input_len=load.input_len,
        cores=None if used is None else used / seconds,
        load_cores=max(one.cpu for one in results) / seconds,
        good=None if slo == (None, None) else sum(within(one, *slo) for one in served),
    )


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ExecutorError(f"a load process exited with status {process.wait()}; its output is above")
    return line


def _answers(line: str) -> Answers:
    report: dict[str, Any] = json.loads(line)
    return Answers(
        answers=tuple(Answered(**{**one, "events": tuple(one["events"])}) for one in report["answers"]),
        cpu=report["cpu"],
    )


def with_share(level: Level, roofline: Roofline, load: LoadLevel, max_running: int) -> Level:
    """The level with its share of the roofline for these requests at this concurrency."""
    if not level.served:
        return level
    concurrent = min(load.concurrency or load.requests, max_running)
    floor = roofline.load([(load.input_len, load.output_len)] * len(level.served), concurrent)
    return attrs.evolve(level, share=floor / level.seconds)


@configured()
def serve(
    *,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Concurrent requests of each level of load; by default 1,64,256.", show_default=False),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="In place of --concurrency: requests per second, at random intervals, as 5,10,20."),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests per level; 0: eight per concurrent request, or 30 s of a rate.", min=0)
    ] = 0,
    input_len: Annotated[int, typer.Option(help="Prompt tokens per request.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Output tokens per request.", min=1)] = 128,
    url: Annotated[
        str, typer.Option(help="Address of a running server to measure, in place of starting one.", show_default=False)
    ] = "",
    server_pid: Annotated[
        int,
        typer.Option(help="With --url: the server's process id, to measure CPU time.", show_default=False, min=0),
    ] = 0,
    load_processes: Annotated[
        int,
        typer.Option(help=f"Processes that generate the load; 0: one per {CONNECTIONS} concurrent requests.", min=0),
    ] = 0,
    slo_ttft: Annotated[
        float | None,
        typer.Option(help="Maximum time to first token for goodput, ms.", show_default=False, callback=positive_number),
    ] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option(
            help="Maximum time per output token for goodput, ms.", show_default=False, callback=positive_number
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Timeout of a level, seconds; running requests become errors.", callback=positive_number),
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and intervals.")] = 0,
    bandwidth: Bandwidth = None,
    matmul: MatmulRate = None,
    output: Json = None,
    plot: Plot = None,
    resolved: Resolved,
) -> None:
    """Latency and throughput of streaming completions over HTTP, from a server that it starts or the one at --url."""
    if url:
        refuse_settings(resolved, but=("model.path",))
    elif server_pid:
        raise ConfigError("--server-pid needs --url; the process of a server started here is known")
    if concurrency is not None and rate is not None:
        raise ConfigError("--concurrency and --rate exclude each other; give one of them")
    resolved = located(resolved, config_only=bool(url))
    config = resolved.config
    common: dict[str, Any] = {"input_len": input_len, "output_len": output_len, "timeout": timeout}
    loads = [
        LoadLevel(
            concurrency=count,
            rate=speed,
            requests=requests or 8 * count or max(round(30 * speed), 1),
            vocab_size=vocab_size(config),
            processes=load_processes or processes_for(count),
            seed=seed + 1 + number,
            **common,
        )
        for number, (count, speed) in enumerate(levels_of(concurrency, rate))
    ]
    with ExitStack() as stack:
        if url:
            server = Server.at(url, first_api_key(config), server_pid or None)
        else:
            server = stack.enter_context(running(served_config(resolved)))
        levels = run_loads(server, loads, first_api_key(config), (slo_ttft, slo_tpot))

    roofline = None if url else configured_roofline(config, bandwidth, matmul)
    if roofline is not None:
        max_running = configured_running(config)
        levels = [with_share(level, roofline, load, max_running) for level, load in zip(levels, loads, strict=True)]
    machine = _machine(config) if not url else f"the server at {url}"
    print_levels(levels, machine, input_len, output_len)
    settings = {
        "model": server.model,
        **common,
        "requests": [load.requests for load in loads],
        "load_processes": [load.processes for load in loads],
        "slo_ttft_ms": slo_ttft,
        "slo_tpot_ms": slo_tpot,
        "seed": seed,
        "given": _given(resolved),
        "ceilings": roofline.ceilings.source if roofline is not None else None,
    }
    if output is not None:
        write(output, report("serve", machine, [row for level in levels for row in level.rows()], settings))
    if plot is not None:
        from engine.cli.bench.plot import plot_serve

        plot_serve(plot, levels, machine)
    if any(not level.served for level in levels):
        raise ExecutorError("every request of a level of load failed")


def run_loads(
    server: Server, loads: Sequence[LoadLevel], api_key: str, slo: tuple[float | None, float | None]
) -> list[Level]:
    """Warm the server up with the requests of the largest level and few tokens, then run the levels in turn."""
    largest = max(loads, key=lambda load: (load.concurrency, load.rate))
    count = largest.concurrency or 8
    warm_up = attrs.evolve(
        largest, concurrency=count, rate=0.0, requests=count, output_len=min(16, largest.output_len), seed=0
    )
    apply_load(server, warm_up, api_key, slo)
    levels = []
    for load in loads:
        levels.append(apply_load(server, load, api_key, slo))
        say(f"{load.name}: {levels[-1].output_rate:,.0f} output tokens/s")
    return levels


def levels_of(concurrency: str | None, rate: str | None) -> list[tuple[int, float]]:
    """(concurrency, rate) of each level; one of the two is 0. Raises ConfigError."""
    if rate is None:
        return [(count, 0.0) for count in parse_counts(concurrency or "1,64,256", "--concurrency")]
    try:
        rates = [float(part) for part in rate.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < one < float("inf") for one in rates):
        raise ConfigError(f"--rate {rate!r} is not a list of requests per second; give one, or several as 5,10,20")
    return [(0, one) for one in rates]


def processes_for(concurrency: int) -> int:
    """Number of load processes: enough that none limits the server, at most half of the cores."""
    wanted = -(-concurrency // CONNECTIONS) if concurrency else 4
    return max(min(wanted, (os.cpu_count() or 1) // 2), 1)


def served_config(resolved: Resolved) -> EngineConfig:
    """The configuration of the server to start, on a free port unless one is given."""
    config = resolved.config
    if resolved.origins["server.port"] != DEFAULT:
        return config
    return attrs.evolve(config, server=attrs.evolve(config.server, port=0))


def _given(resolved: Resolved) -> dict[str, str]:
    """Setting -> value, of those that the figures depend on; without secrets."""
    secret = {setting.key for setting in describe() if setting.secret}
    values = flatten(resolved.config)
    return {key: str(values[key]) for key in given_settings(resolved) if key not in secret}


def vocab_size(config: EngineConfig) -> int:
    """Vocabulary size of the model; with --url and no --model that of the demo model, small enough for any server."""
    from engine.core.weights import Checkpoint, read_key

    return read_key(Checkpoint.open(config.model.path).config, "vocab_size", int, TOKENS[1], least=1)


def _machine(config: EngineConfig) -> str:
    from engine.core.device import find_device

    device = find_device(config.executor.device)
    return f"{device.torch_name} ({device.name})"
