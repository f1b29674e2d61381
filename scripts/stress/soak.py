"""Loads a server for a long time with random lengths while a third of the clients hang up, and fits what grows.

    python scripts/stress/soak.py [--seconds 3600] [--clients 32] [--seed 0] [--json FILE] [--plot FILE.png]
        [-- FLAGS OF engine serve]

Starts `engine serve` with these flags (none: the demo model, and a KV cache of 64 MiB), and first sends prompts of all
lengths, so that a CPU engine has all its kernels. The memory of the KV cache becomes resident when it is first written,
so a large one looks like growth until all of it was in use: give --kv-memory. Every --every seconds, the resident
memory, descriptors and threads of each process and the KV blocks by state are written down; pages of files, which the
system drops as it likes, are left out of the memory. At the end the clients leave, and no block may stay used. A line
is fitted to the memory of each process after --warm-up of the time. Exit status 1 when a slope is above --slope,
descriptors or threads of the last tenth exceed those of the tenth after the warm-up, a stream hung, or the server
stopped answering. The picture needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import usage
from serving import Load, Server
from wire import Target, UsageError, exchange, metrics, until, used_blocks
from written import write_report

MIB = 2**20
SPARE = 2
"""Descriptors or threads by which a process may exceed its start: those of a client that is just connecting."""

Sample = dict[str, Any]
"""time: seconds since the start; processes: role -> Usage as a dict; blocks: state -> number; running, waiting."""


def sample(server: Server, begin: float) -> Sample:
    """What the server uses now. Raises UsageError when /metrics does not come."""
    values = metrics(server.target)
    states = {"used": 0.0, "cached": 0.0, "free": 0.0}
    for name, value in values.items():
        for state in states:
            if name.startswith("engine_kv_blocks{") and f'state="{state}"' in name:
                states[state] += value
    found = ((one.role, usage(one.pid)) for one in server.processes())
    return {
        "time": time.monotonic() - begin,
        "processes": {role: used.row() for role, used in found if used is not None},
        "blocks": states,
        "running": _sum(values, "engine_num_requests_running"),
        "waiting": _sum(values, "engine_num_requests_waiting"),
    }


def _sum(values: dict[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.partition("{")[0] == name)


def slopes(samples: Sequence[Sample], warm_up: float) -> dict[str, float]:
    """Role -> growth of its resident memory after the warm-up, bytes per hour; of roles present all the time."""
    late = [one for one in samples if one["time"] >= warm_up * samples[-1]["time"]]
    if len(late) < 3:
        raise UsageError("there are too few samples for a slope; give more --seconds or fewer seconds to --every")
    roles = set.intersection(*(set(one["processes"]) for one in late))
    times = [one["time"] / 3600 for one in late]
    fitted = {}
    for role in sorted(roles):
        sizes = [one["processes"][role]["memory"] for one in late]
        fitted[role] = statistics.linear_regression(times, sizes).slope
    return fitted


def faults(samples: Sequence[Sample], warm_up: float, most: float) -> list[str]:
    """Faults: memory, descriptors or threads that grew. most: maximum growth of a process's memory, MiB per hour."""
    found = []
    for role, slope in slopes(samples, warm_up).items():
        if slope / MIB > most:
            found.append(f"the memory of the {role} grows by {slope / MIB:.1f} MiB per hour (--slope {most:g})")
    late = [one for one in samples if one["time"] >= warm_up * samples[-1]["time"]]
    tenth = max(1, len(late) // 10)
    for what in ("descriptors", "threads"):
        for role in late[-1]["processes"]:
            first, last = (
                [one["processes"][role][what] for one in part if role in one["processes"]]
                for part in (late[:tenth], late[-tenth:])
            )
            if not first:
                found.append(f"the {role} was not there at first: a process was replaced")
            elif max(last) > max(first) + SPARE:
                found.append(f"the {what} of the {role} rose from {max(first)} to {max(last)}")
    return found


def draw(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Draw memory, descriptors, threads and blocks over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 10.0), layout="constrained")
    figure.suptitle(title, fontsize=10)
    minutes = [one["time"] / 60 for one in samples]
    roles = sorted({role for one in samples for role in one["processes"]})
    panels = figure.subplots(4, 1, sharex=True)
    for axes, what, unit in zip(panels, ("memory", "descriptors", "threads"), (MIB, 1, 1), strict=False):
        for role in roles:
            values = [one["processes"].get(role, {}).get(what, float("nan")) / unit for one in samples]
            axes.plot(minutes, values, label=role)
        axes.set_ylabel("memory, MiB" if what == "memory" else what)
    for state in ("used", "cached", "free"):
        panels[3].plot(minutes, [one["blocks"][state] for one in samples], label=state)
    panels[3].set_ylabel("KV blocks")
    panels[3].set_xlabel("minutes")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, format="png", dpi=110)


def fill(target: Target, longest: int, clients: int, draw: random.Random) -> None:
    """Send prompts of all lengths, 16 per power of two, and batches of all sizes that the clients can make.

    A CPU engine keeps the kernels that oneDNN compiles for each number of rows of a step. Their memory has a limit, for
    which the engine's budget allows, but with random lengths rare numbers come after hours, and look like a leak.
    """
    lengths = {min(rows + rows * part // 16, longest) for rows in (1, 2, 4, 8, 16, 32, 64) for part in range(16)}
    lengths |= {min(2**power * (16 + part) // 16, longest) for power in range(7, 20) for part in range(1, 17)}
    bodies: list[dict[str, Any]] = [
        {"prompt": [draw.randrange(10, 256) for _ in range(length)], "max_tokens": 1} for length in sorted(lengths)
    ]
    bodies += [{"prompt": [10, 11, 12], "n": size, "max_tokens": 2} for size in range(1, clients + 1)]
    for body in bodies:
        request = target.post("/v1/completions", {"model": target.model, "ignore_eos": True, **body})
        answer = exchange(target, request, timeout=120)
        if answer.status != 200:
            raise UsageError(f"{len(body['prompt'])} tokens: {answer}")


def soak(server: Server, options: argparse.Namespace) -> tuple[list[Sample], dict[str, Any], list[str]]:
    """Load the server; the samples, what became of the streams, and what went wrong."""
    longest = min(options.longest, server.target.max_len - 1)
    lengths = (max(1, longest * 3 // 4), max(1, longest // 4))
    fill(server.target, longest, options.clients, random.Random(options.seed))
    load = Load(
        server.target, options.clients, seed=options.seed, hang_up=1 / 3, lengths=lengths, patience=options.patience
    )
    begin, samples, failures = time.monotonic(), [], []
    try:
        while (now := time.monotonic()) < begin + options.seconds:
            samples.append(sample(server, begin))
            time.sleep(max(0.0, options.every - (time.monotonic() - now)))
    except UsageError as error:
        failures.append(f"the server stopped answering after {time.monotonic() - begin:.0f} s: {error}")
    if not load.stop():
        failures.append("clients did not end")
    counts = load.count()
    for kind in ("hung", "ended", "refused"):
        if counts[kind]:
            failures.append(f"{counts[kind]} streams {kind}")
    if not failures and not until(lambda: used_blocks(server.target) == 0, 20):
        failures.append(f"{used_blocks(server.target):g} KV blocks stay used after all clients have left")
    return samples, dict(counts), failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--longest", type=int, default=2000, help="maximum tokens of a request, within the context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=float, default=0.3, help="share of the time that the slope leaves out")
    parser.add_argument("--slope", type=float, default=8.0, help="maximum growth of a process's memory, MiB per hour")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which a stream counts as hung")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("flags", nargs="*", help="after --: flags of engine serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        try:
            server = Server(options.flags or ["--kv-memory", "64MiB"], Path(directory))
            try:
                samples, counts, failures = soak(server, options)
            finally:
                server.stop()
            failures += [f"left behind: {left}" for left in server.remains()]
            fitted = slopes(samples, options.warm_up)
            failures += faults(samples, options.warm_up, options.slope)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    first, last = samples[0]["processes"], samples[-1]["processes"]
    for role, used in last.items():
        before = first.get(role, used)
        sizes = f"{before['memory'] / MIB:.0f} to {used['memory'] / MIB:.0f} MiB"
        sizes += f", {fitted.get(role, 0) / MIB:+.1f} MiB/h"
        print(f"{role:12} {sizes}; {used['descriptors']} descriptors, {used['threads']} threads")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    for failure in failures:
        print(f"FAILED: {failure}")
    content = {
        "streams": counts,
        "slopes_mib_per_hour": {role: slope / MIB for role, slope in fitted.items()},
        "failures": failures,
        "samples": samples,
    }
    if options.json is not None:
        write_report(options.json, "soak", vars(options), content)
    if options.plot is not None:
        title = f"{options.clients} clients for {options.seconds / 60:.0f} minutes, a third of them hanging up"
        draw(options.plot, samples, title)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
