"""What a request says, and the log, where the AnswerWriter of a plugin raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest

from engine.core.protocols import AnswerWriter, ApiError, Delta, Template, Usage
from engine.server.http.plugin_writer import PluginWriter

PLUGIN = "plugin 'torn' of engine-torn 0.4"


class TornTemplates(dict[int, Template]):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __missing__(self, choice: int) -> Template:
        raise self.error


class TornWriter(AnswerWriter):
    """Every method raises, or what it returns does."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add(self, delta: Delta) -> Iterator[None]:
        yield
        raise self.error

    def body(self, usage: Usage) -> Iterator[bytes]:
        raise self.error

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        yield b"first"
        raise self.error

    def end(self, usage: Usage) -> bytes:
        raise self.error

    def templates(self) -> Mapping[int, Template]:
        return TornTemplates(self.error)

    def reasoning_templates(self) -> Mapping[int, Template]:
        raise self.error

    def error_event(self, error: ApiError) -> bytes:
        raise self.error


CALLS: list[tuple[str, Callable[[AnswerWriter], object]]] = [
    ("add", lambda writer: list(writer.add(Delta(0)))),
    ("body", lambda writer: list(writer.body(Usage(1)))),
    ("events", lambda writer: list(writer.events(Delta(0), lambda: Usage(1)))),
    ("end", lambda writer: writer.end(Usage(1))),
    ("templates", lambda writer: cast("Any", writer.templates())[0]),
    ("reasoning_templates", lambda writer: writer.reasoning_templates()),
    ("error_event", lambda writer: writer.error_event(ApiError(500, "broken"))),
]


@pytest.mark.parametrize("error", [KeyError("tide"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(("method", "call"), CALLS)
def test_a_request_names_the_plugin_and_the_method_when_its_writer_raises(
    method: str, call: Callable[[AnswerWriter], object], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ApiError, match=rf"^{PLUGIN} failed in {method}\(\); see the server's log$") as caught:
        call(PluginWriter(TornWriter(error), PLUGIN))
    assert caught.value.status == 500
    [record] = caplog.records
    assert record.getMessage() == f"{PLUGIN} failed in {method}() of its AnswerWriter"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize(("method", "call"), CALLS)
def test_a_writers_deliberate_refusal_passes_unchanged(
    method: str, call: Callable[[AnswerWriter], object], caplog: pytest.LogCaptureFixture
) -> None:
    error = ApiError(400, f"no {method} today")
    with pytest.raises(ApiError) as caught:
        call(PluginWriter(TornWriter(error), PLUGIN))
    assert caught.value is error
    assert not caplog.records


class PlainWriter(AnswerWriter):
    stream_end = b"the end"

    def add(self, delta: Delta) -> Iterator[None]:
        yield

    def body(self, usage: Usage) -> Iterator[bytes]:
        yield b"body"

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        yield delta.text.encode()

    def end(self, usage: Usage) -> bytes:
        return b"end"

    def reasoning_templates(self) -> Mapping[int, Template]:
        return {0: Template(b"a", b"b")}


def test_a_writer_writes_the_same_when_it_is_wrapped() -> None:
    plain = PlainWriter()
    plain.keep_alive = b"ping"
    writer = PluginWriter(plain, PLUGIN)
    assert (writer.stream_end, writer.keep_alive) == (b"the end", b"ping")
    assert list(writer.add(Delta(0))) == [None]
    assert list(writer.body(Usage(1))) == [b"body"]
    assert list(writer.events(Delta(0, "text"), lambda: Usage(1))) == [b"text"]
    assert writer.end(Usage(1)) == b"end"
    assert writer.templates() is None
    templates = writer.reasoning_templates()
    assert templates is not None
    assert (dict(templates), len(templates)) == ({0: Template(b"a", b"b")}, 1)
    assert writer.error_event(ApiError(500, "broken")) == plain.error_event(ApiError(500, "broken"))
