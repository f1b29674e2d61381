"""Sends thousands of hostile requests to a local server and checks that nothing a client sends stops it.

    python scripts/stress/hostile.py http://127.0.0.1:8000 [--requests 5000] [--seed 0] [--api-key KEY] [--json FILE]

The requests follow from the seed. Next to them, a process of its own asks for /health and reads one steady stream. Exit
status 1 when an answer was wrong (a 5xx other than a deliberate 503, an error without OpenAI's shape, no answer), when
/health or the stream paused for longer than --stall, when memory or KV blocks did not come back, or when the server no
longer answers. Only loopback addresses are accepted.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import Case, Maker, cases
from corpus_bodies import SIZES, TYPES, VALID
from corpus_framing import DISCONNECTS, FRAMING, KEYS, LIMITS
from processes import family, find_supervisor, usage
from watch import Watcher
from wire import Target, UsageError, exchange, until, used_blocks
from written import write_report

GROUPS: dict[str, tuple[float, int, Sequence[Maker]]] = {
    "valid": (0.06, 4, VALID),
    "framing": (0.28, 8, FRAMING),
    "limits": (0.04, 1, LIMITS),
    "keys": (0.12, 8, KEYS),
    "types": (0.34, 8, TYPES),
    "sizes": (0.02, 1, SIZES),
    "disconnects": (0.14, 16, DISCONNECTS),
}
"""Name -> share of the requests, number sent at the same time, makers."""
MIB = 2**20


@dataclass
class Outcome:
    """The result of a group of requests."""

    name: str
    requests: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: dict[str, list[str]] = field(default_factory=dict)
    """Name of a case -> what was wrong with each wrong answer."""
    worst_by_case: dict[str, float] = field(default_factory=dict)
    """Name of a case -> longest wait of others, seconds; only of requests sent one by one."""
    worst_health: float = 0.0
    worst_gap: float = 0.0
    late: float = 0.0
    stall: float = 0.0
    peak: int = 0
    """Peak memory of all processes together, bytes."""

    @property
    def wrong(self) -> int:
        """Number of wrong answers."""
        return sum(map(len, self.faults.values()))

    def blame(self, case: str, fault: str) -> None:
        self.faults.setdefault(case, []).append(fault)


class Memory:
    """The resident memory of the server's processes, and its peak since the last reset, sampled by a thread."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._stopped = threading.Event()
        self.peak = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def by_role(self) -> dict[str, int]:
        used = ((one.role, usage(one.pid)) for one in family(self._supervisor))
        return {role: found.memory for role, found in used if found is not None}

    def _sample(self) -> None:
        while not self._stopped.wait(0.25):
            self.peak = max(self.peak, sum(self.by_role().values()))

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(5)


def run_group(
    target: Target, name: str, made: Iterator[Case], at_once: int, watcher: Watcher, memory: Memory, deadline: float
) -> Outcome:
    """Send a group's requests, `at_once` at the same time."""
    outcome, lock = Outcome(name), threading.Lock()
    begin, memory.peak = time.monotonic(), 0
    spans: list[tuple[str, float, float]] = []

    def work() -> None:
        while True:
            with lock:
                case = next(made, None)
            if case is None:
                return
            if time.monotonic() > deadline:
                with lock:
                    outcome.blame(case.name, "was not sent: the time of --seconds was over")
                return
            sent_at = time.monotonic()
            answer = exchange(target, *case.parts, manners=case.manners, timeout=case.timeout, head_only=case.head_only)
            fault = case.fault(answer)
            with lock:
                outcome.requests += 1
                outcome.statuses["unread" if case.expect == "nothing" else str(answer.status)] += 1
                if fault:
                    sent = b"".join(part for part in case.parts if isinstance(part, bytes))[:160]
                    outcome.blame(case.name, f"{fault} [sent {sent!r}]")
                spans.append((case.name, sent_at, time.monotonic()))

    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(work) for _ in range(at_once)]:
            done.result()
    end = time.monotonic()
    time.sleep(0.2)  # until the watcher's last samples are in
    worst = watcher.worst(begin, end)
    outcome.seconds, outcome.peak = end - begin, memory.peak
    outcome.worst_health, outcome.worst_gap, outcome.late = worst["health"], worst["gap"], worst["late"]
    outcome.stall = worst.stall
    if at_once == 1:
        for case_name, sent_at, answered in spans:
            waited = watcher.worst(sent_at, answered).stall
            outcome.worst_by_case[case_name] = max(waited, outcome.worst_by_case.get(case_name, 0.0))
    return outcome


def check(options: argparse.Namespace) -> tuple[list[Outcome], dict[str, Any], list[str]]:
    """Run all groups; their outcomes, what was measured around them, and what failed."""
    target = Target.at(options.url, options.api_key)
    memory = Memory(options.pid or find_supervisor(target.port))
    watcher = Watcher(target)
    deadline = time.monotonic() + options.seconds
    outcomes, failures = [], []
    groups = {name: group for name, group in GROUPS.items() if name in options.groups.split(",")}
    try:
        for name, (share, at_once, makers) in groups.items():  # what a first request of each kind loads stays loaded
            warm_up = cases(makers, target, round(options.requests * share * options.warm_up), options.seed + 10**6)
            run_group(target, name, warm_up, at_once, watcher, memory, deadline)
        before = settle(target, memory)
        for number, (name, (share, at_once, makers)) in enumerate(groups.items()):
            made = cases(makers, target, math.ceil(options.requests * share), options.seed + number)
            outcomes.append(run_group(target, name, made, at_once, watcher, memory, deadline))
            print(f"{name}: {outcomes[-1].requests} requests in {outcomes[-1].seconds:.1f} s", file=sys.stderr)
    finally:
        watcher.close()
    blocks_free = until(lambda: used_blocks(target) == 0, 20)
    after = settle(target, memory)
    memory.close()
    if not blocks_free:
        failures.append(f"{used_blocks(target):g} KV blocks are still used after all clients have left")
    for role, size in after.items():
        engine = role.startswith(("engine", "worker"))
        most = options.engine_growth if engine else options.growth
        if size > before.get(role, 0) + most * MIB:
            grown = (size - before.get(role, 0)) / MIB
            option = "--engine-growth" if engine else "--growth"
            failures.append(f"the {role} keeps {grown:.0f} MiB more than before ({option} {most:g})")
    for role in before.keys() - after.keys():
        failures.append(f"the {role} has ended")
    failures += [f"{one.name}: {one.wrong} wrong answers" for one in outcomes if one.faults]
    failures += [
        f"{one.name}: others waited {one.stall:.2f} s (--stall {options.stall:g})"
        for one in outcomes
        if one.stall > options.stall
    ]
    failures += sorted(set(watcher.errors))[:10]
    answer = exchange(target, target.get("/health?deep=1"), timeout=30)
    if answer.status != 200:
        failures.append(f"the server no longer answers: {answer}")
    return outcomes, {"before": before, "after": after, "blocks_free": blocks_free}, failures


def settle(target: Target, memory: Memory) -> dict[str, int]:
    """Memory by role once no request is left, at its lowest within two seconds."""
    until(lambda: used_blocks(target) == 0, 20)
    lowest: dict[str, int] = {}
    for _ in range(8):
        for role, size in memory.by_role().items():
            lowest[role] = min(size, lowest.get(role, size))
        time.sleep(0.25)
    return lowest


def table(outcomes: Sequence[Outcome]) -> str:
    """The groups; then, longest first, how long others waited for what was sent one by one; then the wrong answers."""
    names = ("requests", "seconds", "wrong", "/health", "stream", "machine", "peak")
    lines = [f"{'group':12}" + "".join(f"{name:>11}" for name in names) + "  statuses"]
    for one in outcomes:
        statuses = ", ".join(f"{status} x {count}" for status, count in sorted(one.statuses.items()))
        times = "".join(f"{seconds * 1e3:8.0f} ms" for seconds in (one.worst_health, one.worst_gap, one.late))
        numbers = f"{one.requests:11}{one.seconds:11.1f}{one.wrong:11}{times}{one.peak / MIB:7.0f} MiB"
        lines.append(f"{one.name:12}{numbers}  {statuses}")
    waits = [(seconds, f"{one.name}: {case}") for one in outcomes for case, seconds in one.worst_by_case.items()]
    lines += ["", "longest wait of others for /health or the next event, less what the machine was late:"]
    lines += [f"{seconds * 1e3:8.0f} ms  {case}" for seconds, case in sorted(waits, reverse=True)]
    for one in outcomes:
        lines += [f"wrong, {len(all_)} x {one.name}: {case}: {all_[0]}" for case, all_ in one.faults.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server, on this machine")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="", help="the server's key; then every wrong key must be refused")
    parser.add_argument("--pid", type=int, default=0, help="process ID of the server; 0: the one that listens there")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of the whole run")
    parser.add_argument("--stall", type=float, default=1.0, help="maximum wait of other clients, seconds")
    parser.add_argument("--growth", type=float, default=64.0, help="memory that a process may keep, MiB")
    parser.add_argument(
        "--warm-up", type=float, default=0.05, help="requests before the first look at the memory, as a share"
    )
    parser.add_argument(
        "--engine-growth",
        type=float,
        default=400.0,
        help="the same of an engine, whose KV cache and compiled kernels become resident when first used, MiB;"
        " serve with a small --kv-memory",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.groups.split(",")) - set(GROUPS):
        parser.error(f"--groups has {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    try:
        outcomes, around, failures = check(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(outcomes))
    for role, size in around["after"].items():
        print(f"{role}: {around['before'].get(role, 0) / MIB:.0f} MiB before, {size / MIB:.0f} MiB after")
    for failure in failures:
        print(f"FAILED: {failure}")
    print(
        f"{sum(one.requests for one in outcomes)} requests, seed {options.seed}: {'failed' if failures else 'passed'}"
    )
    if options.json is not None:
        content = {"groups": [vars(one) for one in outcomes], **around, "failures": failures}
        write_report(options.json, "hostile-requests", vars(options), content)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
