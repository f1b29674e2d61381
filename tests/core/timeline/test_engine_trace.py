"""Traces and profiles by layer of whole engines: all processes are there, on one clock, session after session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.core import Engine, Request, SamplingParams
from engine.core.errors import ControlBusyError, ControlError, ExecutorError
from engine.core.profiling import RankLayers
from engine.core.timeline import TraceOptions

from .traces import Trace

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CLOCK_ERROR = 200.0
"""us that times of processes may differ: far more than their clocks do, far less than a step takes."""
EXECUTORS = [("uniproc", 1), ("multiproc", 1), ("tp", 2)]


def build(checkpoint: Path, executor: str = "uniproc", ranks: int = 1) -> Engine:
    return Engine(
        model=str(checkpoint),
        executor=executor,
        executor__device="cpu",
        executor__threads=1,
        executor__tensor_parallel=ranks,
        cache__memory="8MiB",
        model__max_len=256,
    )


@pytest.fixture(scope="module", params=EXECUTORS, ids=[name for name, _ in EXECUTORS])
def running(request: Any, engine_checkpoint: Path) -> Iterator[tuple[Engine, int]]:
    """An engine with its number of ranks."""
    name, ranks = request.param
    with build(engine_checkpoint, name, ranks) as engine:
        yield engine, ranks


def load(engine: Engine, count: int = 3) -> None:
    """Queue some requests."""
    for number in range(count):
        engine.add(Request(id=f"r{number}", prompt=tuple(range(5 + number)), params=PARAMS))


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_trace_has_all_processes_on_one_clock(running: tuple[Engine, int], tmp_path: Path) -> None:
    engine, ranks = running
    for session in range(2):  # the second is as whole as the first
        load(engine)
        file = tmp_path / "new" / f"{session}.trace.json.gz"
        engine.start_trace(TraceOptions(path=str(file), steps=4, after=2))
        finish(engine)
        report = engine.trace_report(wait=True)
        assert report is not None
        assert (report.steps, report.cut, report.path) == (4, (), str(file))
        assert report.processes == ("engine", *(f"rank {rank}" for rank in range(ranks)))
        assert report.clock_error_us < CLOCK_ERROR
        assert len(list(file.parent.iterdir())) == session + 1
        trace = Trace(file)
        trace.check()
        phases = {one["name"] for one in trace.slices("engine", "phases")}
        assert {"schedule", "submit", "wait", "commit"} == phases
        steps = list(trace.stages("step").values())
        assert [name for ((name, _, _),) in steps] == ["decode 3"] * 4
        for rank in range(ranks):
            own = trace.slices(f"rank {rank}", "steps")
            assert [one["name"] for one in own] == ["decode 3"] * 4
            for ((_, begin, end),), one in zip(sorted(steps, key=lambda step: step[0][1]), own, strict=True):
                assert begin - CLOCK_ERROR < one["ts"]
                assert one["ts"] + one["dur"] < end + CLOCK_ERROR or rank > 0  # the engine waits for rank 0 alone
            check_profiler(trace, f"rank {rank}", own)
        requests = trace.stages("request")
        assert [slices[0][0] for slices in requests.values()] == [f"request r{number}" for number in range(3)]
        assert all("decode" in {name for name, _, _ in slices} for slices in requests.values())


def check_profiler(trace: Trace, process: str, own: list[Any]) -> None:
    """torch.profiler's slice of each step agrees with our own, and has operators in it."""
    annotated = [
        event
        for event in trace.events
        if event.get("cat") == "user_annotation"
        and event["name"] == "decode 3"
        and trace.processes[event["pid"]].startswith(process)
    ]
    assert len(annotated) == len(own)
    for theirs, ours in zip(annotated, own, strict=True):
        assert ours["ts"] - CLOCK_ERROR < theirs["ts"]
        assert theirs["ts"] + theirs["dur"] < ours["ts"] + ours["dur"] + CLOCK_ERROR
        row, begin, end = theirs["tid"], theirs["ts"], theirs["ts"] + theirs["dur"]
        assert any(
            event["ph"] == "X"
            and event["cat"] == "cpu_op"
            and (event["pid"], event["tid"]) == (theirs["pid"], row)
            and begin <= event["ts"] <= end
            for event in trace.events
        )


def test_each_rank_answers_a_profile_by_layer(running: tuple[Engine, int]) -> None:
    engine, ranks = running
    load(engine)
    engine.step()
    engine.call("start_layers")
    for _ in range(6):
        engine.step()
    answers = [msgspec.convert(answer, RankLayers) for answer in engine.call("stop_layers")]
    finish(engine)
    assert [answer.rank for answer in answers] == list(range(ranks))
    for answer in answers:
        rows = {row.name: row for row in answer.rows}
        assert (answer.steps, answer.decodes) == (3, (3,))
        assert sum(row.device_us for row in answer.rows) + answer.idle_us == pytest.approx(answer.step_us)
        assert rows["model.layers.0.mlp.down_proj"].flops == 2 * 3 * 96 // ranks * 64
        assert rows["model.layers.0.mlp.down_proj"].collective_us == 0
        reducing = rows["model.layers.1.post_attention_layernorm"]
        assert (0 < reducing.collective_us < reducing.device_us) == (ranks > 1)


def test_stop_trace_ends_a_recording_with_steps_in_flight(running: tuple[Engine, int], tmp_path: Path) -> None:
    engine, _ = running
    load(engine)
    engine.start_trace(TraceOptions(path=str(tmp_path / "a.json.gz"), steps=100))
    for _ in range(3):
        engine.step()
    with pytest.raises(ControlBusyError, match="a profile is in progress"):
        engine.start_trace(TraceOptions(path=str(tmp_path / "b.json.gz")))
    engine.stop_trace()
    engine.stop_trace()
    finish(engine)
    report = engine.trace_report(wait=True)
    assert report is not None
    assert report.cut == ("3 of 100 steps were recorded",)
    trace = Trace(report.path)
    trace.check()
    assert len(trace.stages("step")) == 3
    queued = trace.stages("request").values()
    assert all({"queue", "prefill"} <= {name for name, _, _ in slices} for slices in queued)
    args = [event["args"] for event in trace.events if event["name"] == "request r0" and event["ph"] == "b"]
    assert [(one["prompt_tokens"], one["finished"]) for one in args] == [(5, False)]


@pytest.fixture(scope="module")
def engine(engine_checkpoint: Path) -> Iterator[Engine]:
    with build(engine_checkpoint) as made:
        yield made


def test_recording_ends_at_its_limits(engine: Engine, tmp_path: Path) -> None:
    for limit, words in ({"max_steps": 2}, "after 2 steps"), ({"max_seconds": 0.0}, "after 0 s"):
        load(engine, 1)
        engine.start_trace(TraceOptions(path=str(tmp_path / "a.json.gz"), activities=(), **limit))
        finish(engine)
        report = engine.trace_report(wait=True)
        assert report is not None
        assert words in report.cut[0]
        assert report.steps <= 2
    engine.start_trace(TraceOptions(path=str(tmp_path / "idle.json.gz"), activities=(), max_seconds=0.0))
    assert engine.trace_report() is None  # which ends it
    report = engine.trace_report(wait=True)
    assert report is not None
    assert report.steps == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 300}, "at most 200 are recorded"),
        ({"after": -1}, "from 0 on"),
        ({"activities": ("gpu",)}, "activities has gpu"),
        ({"nvtx": True}, "NVTX ranges need a GPU"),
        ({"path": "/proc/none/a.json.gz"}, "cannot be written to /proc/none"),
    ],
)
def test_options_that_cannot_be_recorded_are_refused(
    engine: Engine, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ControlError, match=words):
        engine.start_trace(TraceOptions(**{"path": str(tmp_path / "a.json.gz"), **options}))
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_is_stopped_before_its_steps_says_so(engine: Engine, tmp_path: Path) -> None:
    engine.start_trace(TraceOptions(path=str(tmp_path / "a.json.gz"), after=5))
    engine.stop_trace()
    with pytest.raises(ControlError, match="stopped before its first step"):
        engine.trace_report()
    assert list(tmp_path.iterdir()) == []


def test_a_profile_whose_skipped_steps_take_too_long_ends(engine: Engine, tmp_path: Path) -> None:
    """An idle engine runs no steps, and the next profile must not find one in progress."""
    engine.start_trace(TraceOptions(path=str(tmp_path / "a.json.gz"), after=5, max_seconds=0.0))
    with pytest.raises(ControlError, match="the engine ran only 0 of the 5 steps to skip"):
        engine.trace_report()
    assert list(tmp_path.iterdir()) == []
    engine.start_trace(TraceOptions(path=str(tmp_path / "b.json.gz"), activities=()))
    engine.stop_trace()
    assert engine.trace_report(wait=True) is not None


def test_a_rank_that_dies_while_recorded_leaves_no_parts(engine_checkpoint: Path, tmp_path: Path) -> None:
    with build(engine_checkpoint, "multiproc") as engine:
        load(engine)
        engine.start_trace(TraceOptions(path=str(tmp_path / "a.json.gz"), activities=()))
        engine.step()
        executor: Any = engine._executor
        os.kill(executor._workers.workers[0]._process.pid, signal.SIGKILL)
        with pytest.raises(ExecutorError, match="SIGKILL"):
            engine.stop_trace()
    assert list(tmp_path.iterdir()) == []
