"""Makes one Chrome trace of the parts that processes have written. Run as a process of its own, since it takes seconds
and must not delay steps:

    python -m engine.core.timeline.merge JOB
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.core.timeline.clock import to_unix
from engine.core.timeline.spans import SUFFIX, Part

MAX_EVENTS = 1_000_000
"""Maximum events of a trace; the latest beyond that are left out. That many take 20 MB as a file, 1 GB in the merge."""
FLOW = 2**32
"""Maximum number of flow ids of one part."""
REPORT = "report.json"
LOW_PRIORITY = 10
"""Niceness of the merging process."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One merge: the parts, the trace to write, and limits."""

    parts: str
    """Directory of the parts, which is removed."""
    target: str
    """The trace to write."""
    expected: tuple[str, ...]
    """Names of the parts."""
    patience: float = 10.0
    """Seconds to wait for missing parts."""
    cut: tuple[str, ...] = ()
    """What the engine left out, in sentences."""
    max_events: int = MAX_EVENTS


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that was written, and what is missing in it."""

    path: str
    processes: tuple[str, ...]
    events: int
    bytes: int
    clock_error_us: float
    """Maximum error of times between processes of one machine, us."""
    cut: tuple[str, ...] = ()
    """What is not in the trace, in sentences."""
    steps: int = 0
    """Steps recorded."""


def start_merge(job: Job) -> subprocess.Popen[bytes]:
    """Start the merge in a process of its own; its standard output is a Report, or a sentence with exit code 1."""
    command = [sys.executable, "-P", "-m", "engine.core.timeline.merge", msgspec.json.encode(job).decode()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)


def merge(job: Job) -> Report:
    """Merge the parts, write the trace and remove the parts. Raises OSError if the trace cannot be written."""
    directory = Path(job.parts)
    missing = _wait(directory, job)
    cut = [*job.cut, *(f"{name} has left no record of itself" for name in missing)]
    parts = []
    for name in job.expected:
        if name not in missing:
            parts.append(msgspec.json.decode((directory / f"{name}{SUFFIX}").read_bytes(), type=Part))
    parts.sort(key=lambda part: part.order)
    base = min((pair.unix for part in parts for pair in part.clocks), default=0) // 10**9 * 10**9
    labels: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        if part.cut:
            cut.append(part.cut)
        tracks = _Tracks(number, part, labels)
        events += _own_events(part, tracks, base)
        if part.kineto:
            events += _kineto_events(directory / part.kineto, tracks, base, number)
    events.sort(key=lambda event: event["ts"])
    if len(events) > job.max_events:
        cut.append(f"the trace has the first {job.max_events} of {len(events)} events")
        begun = {(event["id"], event["name"]) for event in events[: job.max_events] if event["ph"] == "b"}
        ends = [event for event in events[job.max_events :] if event["ph"] == "e"]
        events[job.max_events :] = [event for event in ends if (event["id"], event["name"]) in begun]
    error = max((pair.error for part in parts for pair in part.clocks), default=0) / 1000
    target = Path(job.target)
    whole = target.with_suffix(".tmp")
    metadata = {"clock_error_us": error, "cut": cut, "processes": [part.process for part in parts]}
    head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "otherData": metadata}
    with gzip.open(whole, "wb", compresslevel=5) as file:
        file.write(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')
        file.write(b",\n".join(map(msgspec.json.encode, [*labels, *events])))
        file.write(b"\n]}\n")
    whole.rename(target)
    shutil.rmtree(directory)
    return Report(
        path=str(target),
        processes=tuple(part.process for part in parts),
        events=len(events),
        bytes=target.stat().st_size,
        clock_error_us=error,
        cut=tuple(cut),
    )


class _Tracks:
    """Numbers of the processes and threads of one part in the trace; adds their names to `labels`."""

    def __init__(self, number: int, part: Part, labels: list[dict[str, Any]]) -> None:
        self._first = 1000 * (number + 1)
        self._part = part
        self._labels = labels
        self._processes: dict[object, int] = {}
        self._rows: dict[tuple[int, object], int] = {}
        self.own = self.process("own", f"{part.process} (process {part.pid})")

    def process(self, key: object, name: str = "") -> int:
        """The number of a process; gives a new process the next one."""
        if key not in self._processes:
            number = self._processes[key] = self._first + len(self._processes)
            self._label(number, "process_name", name=name or f"{self._part.process} {key}")
            self._label(number, "process_sort_index", sort_index=number)
        return self._processes[key]

    def row(self, process: int, key: object, name: str = "", order: int | None = None) -> int:
        """The number of a row of a process; gives a new row the next one."""
        if (process, key) not in self._rows:
            number = self._rows[process, key] = len(self._rows) + 1
            self._label(process, "thread_name", number, name=name or str(key))
            self._label(process, "thread_sort_index", number, sort_index=number if order is None else order)
        return self._rows[process, key]

    def _label(self, process: int, kind: str, row: int = 0, **args: object) -> None:
        self._labels.append({"ph": "M", "name": kind, "pid": process, "tid": row, "args": args})


def _own_events(part: Part, tracks: _Tracks, base: int) -> Iterator[dict[str, Any]]:
    """The events of the spans that a process recorded of itself."""

    def at(monotonic: int) -> float:
        return (to_unix(part.clocks, monotonic) - base) / 1000

    for span in part.spans:
        begin = at(span.begin)
        yield {
            "ph": "X",
            "cat": "engine",
            "name": span.name,
            "pid": tracks.own,
            "tid": tracks.row(tracks.own, span.row),
            "ts": begin,
            "dur": max(0.0, at(span.end) - begin),
            "args": span.args or {},
        }
    for one in part.stages:
        shared = {"cat": one.kind, "id": f"{tracks.own}:{one.id}", "pid": tracks.own, "tid": 0}
        slices = [(one.name, one.begin, one.end), *one.stages]
        for index, (name, begin, end) in enumerate(slices):
            args = {"args": one.args} if one.args and not index else {}
            yield {"ph": "b", "name": name, "ts": at(begin), **shared, **args}
            yield {"ph": "e", "name": name, "ts": at(end), **shared}


def _kineto_events(file: Path, tracks: _Tracks, base: int, number: int) -> Iterator[dict[str, Any]]:
    """The events of torch.profiler's trace: threads' events in the process itself, GPUs' in processes of their own.

    Its times are Unix times, after a base of its own.
    """
    trace: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1000
    events = trace["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name", event["args"].get("labels", ""))
        for event in events
        if event["ph"] == "M" and event["name"] in ("process_labels", "thread_name")
    }
    for event in events:
        pid, tid = event.get("pid"), event.get("tid")
        if event["ph"] not in ("X", "s", "f", "i") or not isinstance(pid, int):
            continue  # names, which are written again, and notes of the profiler about itself
        label = names.get(("process_labels", pid, 0), "CPU")
        process = tracks.own if label == "CPU" else tracks.process(label)
        row = tracks.row(process, ("kineto", tid), names.get(("thread_name", pid, tid), f"thread {tid}"))
        event |= {"pid": process, "tid": row, "ts": event["ts"] + shift}
        if "id" in event:
            event["id"] = number * FLOW + int(event["id"])
        yield event


def _wait(directory: Path, job: Job) -> list[str]:
    """Wait for the parts; return the names of those that have not come."""
    until = time.monotonic() + job.patience
    while True:
        missing = [name for name in job.expected if not (directory / f"{name}{SUFFIX}").exists()]
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(0.02)


def main() -> int:
    """Merge as the only argument says, and print the report."""
    with contextlib.suppress(OSError):
        os.nice(LOW_PRIORITY)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(merge(msgspec.json.decode(sys.argv[1], type=Job))))
    except (OSError, msgspec.DecodeError) as error:
        sys.stdout.write(f"the trace could not be written: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
