"""The merge of parts into one trace: one clock, one number per process and row, and a sentence for what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.timeline.clock import ClockPair, read_clocks, to_unix
from engine.core.timeline.merge import Job, merge
from engine.core.timeline.spans import Part, Span, Spans, Stages, write_part

from .traces import Trace

UNIX = 1_700_000_000 * 10**9


def part(process: str, order: int, offset: int, **fields: Any) -> Part:
    """A part of a process whose monotonic clock began `offset` ns before the Unix time above."""
    clocks = tuple(ClockPair(offset + at, UNIX + at, 100) for at in (0, 10**9))
    return Part(process=process, pid=order, order=order, clocks=clocks, **fields)


def job(directory: Path, *expected: str, **fields: Any) -> Job:
    return Job(
        parts=str(directory / "parts"), target=str(directory / "a.json.gz"), expected=expected, patience=0.0, **fields
    )


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    directory = tmp_path / "parts"
    directory.mkdir()
    return directory


def test_times_of_processes_agree_after_the_merge(tmp_path: Path, parts: Path) -> None:
    write_part(parts, "b", part("late clock", 2, 7, spans=(Span("row", "same", 7 + 5000, 7 + 6000),)))
    write_part(parts, "a", part("early clock", 1, 10**15, spans=(Span("row", "same", 10**15 + 5000, 10**15 + 6000),)))
    report = merge(job(tmp_path, "a", "b"))
    assert (report.processes, report.events, report.cut) == (("early clock", "late clock"), 2, ())
    assert report.clock_error_us == 0.1
    trace = Trace(report.path)
    trace.check()
    ((one,), (other,)) = (trace.slices(process, "row") for process in report.processes)
    assert (one["ts"], one["dur"]) == (other["ts"], other["dur"]) == (5.0, 1.0)
    assert one["pid"] != other["pid"]
    assert trace.whole["baseTimeNanoseconds"] == UNIX
    assert [file.name for file in tmp_path.iterdir()] == ["a.json.gz"]


def test_rows_and_flows_of_two_ranks_stay_apart(tmp_path: Path, parts: Path) -> None:
    """Both ranks' profilers number GPUs, threads and flows from the same numbers on."""
    for rank in (0, 1):
        kineto = {
            "baseTimeNanoseconds": UNIX - 1000,
            "traceEvents": [
                {"ph": "M", "name": "process_labels", "pid": 9, "tid": 0, "args": {"labels": "CPU"}},
                {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
                {"ph": "X", "name": "launch", "cat": "cuda_runtime", "pid": 9, "tid": 9, "ts": 2.0, "dur": 1.0},
                {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 5, "pid": 9, "tid": 9, "ts": 2.0},
                {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 5, "pid": 0, "tid": 7, "ts": 4.0, "bp": "e"},
                {"ph": "X", "name": "kernel", "cat": "kernel", "pid": 0, "tid": 7, "ts": 4.0, "dur": 3.0},
                {"ph": "X", "name": "note", "cat": "Trace", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 9.0},
            ],
        }
        (parts / f"{rank}.json").write_text(json.dumps(kineto))
        write_part(parts, f"rank{rank}", part(f"rank {rank}", rank, 0, kineto=f"{rank}.json"))
    trace = Trace(merge(job(tmp_path, "rank0", "rank1")).path)
    trace.check()
    kernels = [trace.slices(f"rank {rank} GPU 0", "stream 7") for rank in (0, 1)]
    assert [[(one["name"], one["ts"]) for one in found] for found in kernels] == [[("kernel", 3.0)]] * 2
    flows = [event for event in trace.events if event["ph"] in "sf"]
    assert len({event["id"] for event in flows}) == 2
    assert all(sum(event["id"] == flow["id"] for event in flows) == 2 for flow in flows)
    assert not any(event["name"] == "note" for event in trace.events)


def test_what_is_missing_or_too_much_is_said(tmp_path: Path, parts: Path) -> None:
    spans = tuple(Span("row", str(at), 10 * at, 10 * at + 5) for at in range(10))
    stages = (Stages("request", "r", "request r", 0, 40, (("queue", 0, 20), ("prefill", 20, 40))),)
    write_part(parts, "engine", part("engine", 1, 0, spans=spans, stages=stages, cut="engine left something out"))
    report = merge(job(tmp_path, "engine", "gone", cut=("ended early",), max_events=12))
    Trace(report.path).check()
    assert Trace(report.path).stages("request")  # which end, though later events are left out
    assert report.cut == (
        "ended early",
        "gone has left no record of itself",
        "engine left something out",
        "the trace has the first 12 of 16 events",
    )


def test_spans_beyond_the_limit_are_counted() -> None:
    spans = Spans(limit=2)
    for at in range(5):
        spans.add("row", "name", at, at + 1)
    made = spans.part("engine", 1)
    assert len(made.spans) == 2
    assert made.cut == "engine recorded 2 spans and left out 3 later ones"


def test_unix_time_follows_a_clock_that_is_slewed() -> None:
    pairs = [ClockPair(1000, 50_000, 1), ClockPair(2000, 51_100, 1)]  # Unix time gains a tenth
    assert [to_unix(pairs, at) for at in (1000, 1500, 2000)] == [50_000, 50_550, 51_100]
    assert to_unix(pairs[:1], 1500) == 50_500
    pair = read_clocks()
    assert pair.error >= 0
