"""What KV metrics and KV events cost the engine process, in microseconds of processor time per request.

    python benchmarks/kv_cost.py [--concurrency 64,256] [--requests 2000] [--machine NAME] [--json FILE]

A fake runner returns results immediately, and a new request of random tokens comes for each that ends. The cache is
so small that each new block evicts one, as in a server that has run for a while. All processor time of this process
counts, also that of the thread that publishes events. "events, engine's thread" is without that thread's time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from scheduler import BLOCK_SIZE, answer, policy_of  # benchmarks/scheduler.py

from engine.cli.bench.report import Row, report, write
from engine.core.config import KVEventsConfig
from engine.core.kv_events import EventStream
from engine.core.schedulers import BlockManager, CacheMetrics, CacheObserver, Scheduler, join_observers
from engine.core.tokens import Tokens
from engine.core.types import CacheInfo, Request, SamplingParams

INPUT, OUTPUT = 512, 128
CACHED_REQUESTS = 256
"""Requests whose blocks the cache holds when no request runs."""


def prompts(count: int) -> list[Tokens]:
    draw = Random(1)
    return [Tokens(draw.choices(range(1, 100_000), k=INPUT)) for _ in range(count)]


def cache_info(blocks: int) -> CacheInfo:
    sizes: dict[str, Any] = dict.fromkeys(("weights_bytes", "activation_bytes", "kv_bytes", "budget_bytes"), 0)
    return CacheInfo(num_blocks=blocks, block_size=BLOCK_SIZE, device="none", dtype="float32", **sizes)


def run(
    concurrency: int, inputs: Sequence[Tokens], *, metrics: float | None = None, events: bool = False
) -> tuple[float, float, float]:
    """Microseconds of processor time per request: of all threads, and of this one; and steps per request.

    metrics: share of the blocks that are sampled; None: no metrics.
    """
    blocks = (concurrency + CACHED_REQUESTS) * -(-(INPUT + OUTPUT) // BLOCK_SIZE)
    cache_metrics = None if metrics is None else CacheMetrics(sample=metrics)
    observers: list[CacheObserver] = [] if cache_metrics is None else [cache_metrics]
    stream = (
        EventStream(KVEventsConfig(endpoint="tcp://127.0.0.1:*", max_queue=10**6), cache_info(blocks))
        if events
        else None
    )
    if stream is not None:
        observers.append(stream.recorder)
    scheduler = Scheduler(
        policy_of("fcfs"),
        BlockManager(blocks, BLOCK_SIZE, observer=join_observers(observers)),
        max_batch_tokens=8192,
        max_running=concurrency,
        max_len=4096,
        eos_tokens=frozenset({0}),
        cache_metrics=cache_metrics,
    )
    warm = CACHED_REQUESTS + concurrency  # of the requests, those that fill the cache
    added = done = steps = 0
    begin = begin_own = 0.0
    while done < len(inputs):
        while added < len(inputs) and added - done < concurrency:
            # staggered output lengths at the start, so that requests do not end at the same time
            length = OUTPUT if added >= concurrency else 1 + added * OUTPUT // concurrency
            params = SamplingParams(max_tokens=length, temperature=0.0)
            scheduler.add(Request(id=str(added), prompt=inputs[added], params=params))
            added += 1
        step = scheduler.schedule(0.0)
        assert step is not None
        outputs = scheduler.commit(step, answer(step), 0.0)
        if stream is not None:
            stream.flush()
        steps += 1
        ended = sum(output.finish_reason is not None for output in outputs)
        if done < warm <= done + ended:
            warm, steps = done + ended, 0
            begin, begin_own = time.process_time(), time.thread_time()
        done += ended
    own = time.thread_time() - begin_own
    if stream is not None:
        stream.close()
        if stream.dropped:
            raise SystemExit(f"error: {stream.dropped} batches of events were dropped")
    count = (len(inputs) - warm) / 1e6
    return (time.process_time() - begin) / count, own / count, steps / count / 1e6


CASES: dict[str, dict[str, Any]] = {
    "KV metrics of 1 %": {"metrics": 0.01},
    "KV events": {"events": True},
    "KV metrics of 1 % and KV events": {"metrics": 0.01, "events": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="64,256")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3, help="times; the least counts, as other load only adds time")
    parser.add_argument("--machine", default="", help="name of the machine in the result")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    inputs = prompts(arguments.requests)
    rows = []
    for concurrency in map(int, arguments.concurrency.split(",")):
        runs = [
            [run(concurrency, inputs, **settings) for settings in ({}, *CASES.values())]
            for _ in range(arguments.repeat)
        ]
        base, *found = [tuple(map(min, zip(*same, strict=True))) for same in zip(*runs, strict=True)]
        name = f"concurrency {concurrency}"
        print(f"{name}: scheduling takes {base[0]:,.0f} us per request, in {base[2]:.2f} steps; in addition, us:")
        rows.append(Row(metric="scheduling", value=base[0], unit="us/request", case=name))
        for case, times in zip(CASES, found, strict=True):
            print(f"    {case:35} {times[0] - base[0]:7.0f}, of which the engine's thread {times[1] - base[1]:7.0f}")
            rows.append(Row(metric=case, value=times[0] - base[0], unit="us/request", case=name))
            rows.append(Row(metric=f"{case}, engine's thread", value=times[1] - base[1], unit="us/request", case=name))
    if arguments.json is not None:
        settings = {"requests": arguments.requests, "input_len": INPUT, "output_len": OUTPUT}
        write(arguments.json, report("kv-cost", arguments.machine, rows, settings))


if __name__ == "__main__":
    main()
