"""What a request says, and the log, where an output parser raises by mistake."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar
from engine.core.parsers import Content, Event, Malformed, OutputRules, Parser, Parsing, Templates
from engine.core.plugin_host import guarded
from engine.core.protocols import ApiError, Conversation
from engine.core.types import Output, Request
from engine.server.front_end.phase_times import PhaseTimes
from engine.server.front_end.request_group import RequestGroup
from engine.server.http.generation import Generation
from engine.server.http.output_rules import planned_output
from engine.server.http.parsed_output import OutputFormat, ParsedOutput
from engine.server.http.service import Service
from tests.server.fake_front_end import ByteTokenizer

OWNER = "parser 'torn' of engine-torn 0.4"


class Raising(Parser[None]):
    """Every method raises `error`."""

    api = "1"
    describes_format = True
    error: BaseException

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return True

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing:
        raise self.error

    def grammar(self, rules: OutputRules) -> Grammar:
        raise self.error

    def template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        raise self.error

    def new_call_id(self) -> str:
        raise self.error


class TornParsing(Parsing):
    reasoning = False

    def feed(self, text: str) -> Sequence[Event]:
        raise KeyError("tide")

    def end(self) -> Sequence[Event]:
        raise SystemExit(3)


def raising(error: BaseException) -> Parser[Any]:
    parser: Parser[Any] = guarded(Raising, OWNER, ())(None, Templates())
    cast("Any", parser).error = error
    return parser


def service_of(parser: Parser[Any]) -> Service:
    service = Service.__new__(Service)
    service.parser = parser
    service.parser_tokens = frozenset()
    return service


def begin_an_output(parser: Parser[Any]) -> None:
    """Give the request of a parsed output its first token."""
    group = RequestGroup(lambda *_: None, range(1))
    client: Any = SimpleNamespace(phases=PhaseTimes(), submit=lambda *_: group)
    output_format = OutputFormat(begin=partial(parser.begin, "", ()), owner=OWNER)
    request = Request(id="x", prompt=(1,))
    with Generation(client, cast("Any", ByteTokenizer("")), [request], 1, output_format) as generation:
        group.put(0, (97,), Output(request="x", tokens=(97,)))
        generation.events(None, lambda delta: iter(()))


CALLS: list[tuple[str, Callable[[Parser[Any]], object]]] = [
    ("begin", begin_an_output),
    ("grammar", lambda parser: planned_output(service_of(parser), Conversation(messages=[]), (), "")),
    ("template_message", lambda parser: service_of(parser).render([{}])),
    ("new_call_id", lambda parser: service_of(parser).new_call_id()),
]


@pytest.mark.parametrize(("method", "call"), CALLS)
@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_request_names_the_parser_and_its_method_when_it_raises(
    method: str, call: Callable[[Parser[Any]], object], kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    error = kind("torn")
    with pytest.raises(ApiError) as caught:
        call(raising(error))
    assert caught.value.status == 500
    said = f"{OWNER} failed in {method}(): {kind.__name__}: torn (tests/server/http/test_parser_faults.py"
    assert caught.value.message.startswith(said)
    [record] = caplog.records
    assert record.getMessage() == caught.value.message
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize(("method", "call"), CALLS)
def test_a_parsers_deliberate_refusal_passes_unchanged(
    method: str, call: Callable[[Parser[Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((InvalidRequestError, ApiError), match=f"^no {method} today$") as caught:
        call(raising(InvalidRequestError(f"no {method} today")))
    assert not isinstance(caught.value, ApiError) or caught.value.status == 400
    assert not caplog.records


def test_a_request_names_the_parser_when_reading_its_output_fails(caplog: pytest.LogCaptureFixture) -> None:
    parsed = ParsedOutput(TornParsing(), one_call=False, owner=OWNER)
    with pytest.raises(ApiError, match=r"'torn' of engine-torn 0.4 failed in feed\(\): KeyError: 'tide' \(.*line \d+"):
        parsed.feed("a", 1)
    with pytest.raises(ApiError, match=r"'torn' of engine-torn 0.4 failed in end\(\): SystemExit: 3 \(.*line \d+"):
        parsed.end()
    assert len(caplog.records) == 2


def test_a_request_names_the_parser_when_it_returns_no_event() -> None:
    class Texts(TornParsing):
        def feed(self, text: str) -> Sequence[Event]:
            return [Content("a"), cast("Any", text)]

        def end(self) -> Sequence[Event]:
            return cast("Any", None)

    parsed = ParsedOutput(Texts(), one_call=False, owner=OWNER)
    with pytest.raises(ApiError, match=r"'torn' of engine-torn 0.4 failed in feed\(\): TypeError: it returned 'tide' "):
        parsed.feed("tide", 1)
    with pytest.raises(ApiError, match=r"'torn' of engine-torn 0.4 failed in end\(\): TypeError"):
        parsed.end()


@pytest.mark.parametrize("by_model", [False, True])
def test_a_call_is_broken_at_the_end_only_where_the_model_ended_the_output(by_model: bool) -> None:
    """Whether or not the parser says that the end of the output is what breaks the call."""

    class Cut(TornParsing):
        def end(self) -> Sequence[Event]:
            return [Content("a"), Malformed("a call is not complete")]

    content, malformed = ParsedOutput(Cut(), one_call=False, owner=OWNER).end(by_model=by_model)
    assert content == Content("a")
    assert malformed == Malformed("a call is not complete", at_end=not by_model)


def test_ctrl_c_while_a_parser_reads_is_not_its_fault() -> None:
    class Interrupted(TornParsing):
        def feed(self, text: str) -> Sequence[Event]:
            signal.raise_signal(signal.SIGINT)
            return ()

    with pytest.raises(KeyboardInterrupt):
        ParsedOutput(Interrupted(), one_call=False, owner=OWNER).feed("a", 1)
