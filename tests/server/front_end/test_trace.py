"""What a front end records of itself while engines record traces."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.server.front_end.trace import FrontEndTrace
from engine.server.shared.messages import RecordSpans


def join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "trace":
            thread.join()


def test_spans_go_to_each_trace_that_is_recorded(tmp_path: Path) -> None:
    trace = FrontEndTrace()
    directories = [tmp_path / "a", tmp_path / "b"]
    for replica, directory in enumerate(directories):
        directory.mkdir()
        trace.update(RecordSpans(replica, str(directory), "front-end-1", True))
        trace.add("event loop", f"span {replica}", 1, 2)
    for replica, directory in enumerate(directories):
        trace.update(RecordSpans(replica, str(directory), "front-end-1", False))
    assert not trace.active
    join_writers()
    parts = [json.loads((directory / "front-end-1.part.json").read_bytes()) for directory in directories]
    assert [[span[1] for span in part["spans"]] for part in parts] == [["span 0", "span 1"], ["span 1"]]


def test_work_is_a_span_of_its_thread_though_it_raises(tmp_path: Path) -> None:
    trace = FrontEndTrace()
    trace.update(RecordSpans(0, str(tmp_path), "front-end-1", True))
    assert trace.spanned("tokenize", len)("four") == 4
    with pytest.raises(ZeroDivisionError):
        trace.spanned("write", lambda: 1 // 0)()
    with ThreadPoolExecutor(1, thread_name_prefix="text") as threads:
        assert threads.submit(trace.spanned("detokenize", len), "five").result() == 4
    trace.update(RecordSpans(0, str(tmp_path), "front-end-1", False))
    join_writers()
    spans = json.loads((tmp_path / "front-end-1.part.json").read_bytes())["spans"]
    assert [span[:2] for span in spans] == [
        ["event loop", "tokenize"],
        ["event loop", "write"],
        ["text 0", "detokenize"],
    ]
    assert all(begin <= end for _, _, begin, end, *_ in spans)


def test_a_replica_that_is_down_is_recorded_no_more(tmp_path: Path) -> None:
    trace = FrontEndTrace()
    trace.update(RecordSpans(1, str(tmp_path), "front-end-1", True))
    assert trace.active
    trace.drop(1)
    trace.drop(1)
    assert not trace.active
    trace.update(RecordSpans(1, str(tmp_path), "front-end-1", False))
    join_writers()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = FrontEndTrace()
    for begin in (True, False):
        trace.update(RecordSpans(0, str(tmp_path / "gone"), "front-end-1", begin))
    join_writers()
    assert "could not be written" in caplog.text
