from __future__ import annotations

import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.core.logs import (
    FIELDS,
    JsonFormatter,
    Process,
    configure,
    engine_process,
    front_end_process,
    rfc3339,
    supervisor_process,
    worker_process,
)


def formatted(*arguments: object, message: str = "%s", **record: Any) -> dict[str, Any]:
    formatter = JsonFormatter({"process": "engine", "replica": 1}, record.pop("context", None))
    made = logging.LogRecord("engine.here", logging.WARNING, __file__, 1, message, arguments, None)
    made.__dict__.update(record)
    text = formatter.format(made)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets up the logs as a process does that has no handlers; the logging of the tests is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def start(process: Process, **settings: Any) -> None:
        root.handlers = []
        configure(process, **settings)

    yield start
    logging.captureWarnings(False)
    root.handlers = handlers
    root.setLevel(level)


def test_an_entry_has_time_level_process_and_message() -> None:
    found = formatted("two\nlines and \udc80", created=1.75)
    assert found.pop("pid") > 0
    assert found == {
        "time": "1970-01-01T00:00:01.750Z",
        "level": "warning",
        "process": "engine",
        "replica": 1,
        "logger": "engine.here",
        "message": "two\nlines and \\udc80",
    }


def test_an_entry_has_further_fields_and_those_of_the_request() -> None:
    found = formatted(
        **{FIELDS: {"status": 200, "error": ValueError("no JSON")}}, context=lambda: {"request_id": "mine"}
    )
    assert (found["status"], found["error"], found["request_id"]) == (200, "no JSON", "mine")


def test_an_exception_is_a_part_of_its_line() -> None:
    try:
        raise ValueError("wrong\nvalue")
    except ValueError:
        found = formatted(message="failed", exc_info=sys.exc_info())
    assert found["message"] == "failed"
    assert found["exception"].startswith("Traceback (most recent call last):\n")
    assert found["exception"].endswith("ValueError: wrong\nvalue")


def test_times_are_in_utc_with_milliseconds() -> None:
    assert rfc3339(1795426260.9995) == "2026-11-23T09:31:00.999Z"


def test_each_process_has_a_name_and_fields() -> None:
    assert supervisor_process() == Process("server", {"process": "supervisor"})
    assert front_end_process(1) == Process("server", {"process": "front end", "front_end": 1})
    assert engine_process(0, 1) == Process("engine", {"process": "engine", "replica": 0})
    assert engine_process(1, 2).name == "engine 1"
    worker = worker_process(3)
    assert (worker.name, worker.fields["rank"]) == ("worker 3", 3)


def test_text_names_the_process(set_up: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    set_up(engine_process(1, 2), style="text", level="info")
    logging.getLogger("engine.here").info("%d requests", 2)
    logging.getLogger("engine.here").debug("unseen")
    assert re.fullmatch(r"[\d-]+ [\d:,]+ INFO engine 1: 2 requests\n", capsys.readouterr().err)


def test_all_that_python_reports_is_json(set_up: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    set_up(worker_process(2), style="json", level="warning")
    logging.getLogger("engine.here").info("unseen")
    logging.getLogger("engine.core.startup_display").info("starting: weights")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="mine")
    thread.start()
    thread.join()
    try:
        raise OSError("broken")
    except OSError as error:
        sys.excepthook(OSError, error, error.__traceback__)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    startup, warning, of_thread, last = map(json.loads, capsys.readouterr().err.splitlines())
    assert (startup["level"], startup["message"], startup["rank"]) == ("info", "starting: weights", 2)
    assert "DeprecationWarning: old" in warning["message"]
    assert of_thread["message"] == "an unexpected error ends the thread mine"
    assert of_thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert last["level"] == "critical"
    assert last["exception"].endswith("OSError: broken")
