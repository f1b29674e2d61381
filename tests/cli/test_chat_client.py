from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.cli.chat_client import CALL, CONTENT, REASONING, ChatClient, Piece, api_base, sse_data
from engine.cli.errors import ServerError
from engine.core.errors import InvalidRequestError
from tests.cli.scripted_server import Answer, ScriptedServer, event, scripted_server


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


def ask(scripted: ScriptedServer, answer: Answer, **parameters: Any) -> list[Piece]:
    """What a client gets for an answer."""
    scripted.answers = [answer]
    client = ChatClient(scripted.url)
    return list(client.stream("parrot", [{"role": "user", "content": "hi"}], parameters))


def test_an_answer_comes_in_pieces(scripted: ScriptedServer) -> None:
    answer = Answer({"role": "assistant", "content": ""}, {"content": "one "}, {"content": None}, {"content": "twö"})
    assert ask(scripted, answer, temperature=0) == [Piece(CONTENT, "one "), Piece(CONTENT, "twö")]
    messages = [{"role": "user", "content": "hi"}]
    assert scripted.asked[-1] == {"model": "parrot", "messages": messages, "stream": True, "temperature": 0}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_a_kind_of_its_own(scripted: ScriptedServer, name: str) -> None:
    assert ask(scripted, Answer({name: "hm"}, {"content": "yes"})) == [Piece(REASONING, "hm"), Piece(CONTENT, "yes")]


def test_reasoning_under_both_names_counts_once(scripted: ScriptedServer) -> None:
    assert ask(scripted, Answer({"reasoning": "hm", "reasoning_content": "hm"})) == [Piece(REASONING, "hm")]


def test_pieces_of_tool_calls_are_joined_by_index(scripted: ScriptedServer) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": function}]}

    answer = Answer(
        call(0, name="weather", arguments=""),
        call(1, name="time", arguments="{"),
        call(0, arguments='{"city": '),
        call(1, arguments="}"),
        call(0, arguments='"Rome"}'),
        finish="tool_calls",
    )
    assert ask(scripted, answer) == [Piece(CALL, 'weather {"city": "Rome"}'), Piece(CALL, "time {}")]


def test_an_answer_that_is_not_streamed_is_read_too(scripted: ScriptedServer) -> None:
    body = b'{"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}'
    assert ask(scripted, Answer(body=body, kind="application/json")) == [Piece(CONTENT, "all")]


def test_an_error_within_a_stream_is_raised(scripted: ScriptedServer) -> None:
    wrong = b'data: {"error": {"message": "the engine failed", "code": "engine_failed"}}\n\n'
    with pytest.raises(ServerError, match=r"^the server ended the answer: the engine failed$"):
        ask(scripted, Answer({"content": "a"}, wrong, finish=None))


@pytest.mark.parametrize("last", [b"", b'data: {"choices": [{"delta": {"content"'])
def test_a_connection_that_ends_early_is_an_error(scripted: ScriptedServer, last: bytes) -> None:
    with pytest.raises(ServerError):
        ask(scripted, Answer({"content": "a"}, last, finish=None))


@pytest.mark.parametrize(
    "odd",
    [
        b": a comment\n\n",
        b"event: ping\ndata: {}\n\n",
        b'data: {"choices": []}\n\n',
        b'data: {"choices": null, "usage": {"total_tokens": 1}}\n\n',
        b'data: {"choices": [null, {"delta": null}]}\n\n',
        b'data: {"choices":\ndata: []}\n\n',
        event({"delta": {"tool_calls": [None, {"index": 0, "function": None}]}}),
    ],
)
def test_events_that_say_nothing_change_nothing(scripted: ScriptedServer, odd: bytes) -> None:
    pieces = ask(scripted, Answer(odd, {"content": "a"}))
    assert [piece for piece in pieces if piece.text.strip()] == [Piece(CONTENT, "a")]


def test_lines_may_end_in_either_way() -> None:
    assert list(sse_data([b"data: a\r\n", b"\r\n", b"data:b\n", b"\n", b"data: [DONE]"])) == ["a", "b", "[DONE]"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no\\nsuch model", "type": "x"}}', "no such model"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"detail": [{"loc": ["a"]}]}', '[{"loc": ["a"]}]'),
        (b"no such model", "no such model"),
        (b"", "Not Found"),
        (b"\x1b[2J no \x9b", "␛[2J no \ufffd"),
        (b"x" * 1000, "x" * 397 + "..."),
    ],
)
def test_a_refusal_is_one_sentence(scripted: ScriptedServer, body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(scripted, Answer(status=404, body=body, finish=None))
    assert str(caught.value) == f"the server answered 404: {said}"


def test_a_failure_of_the_server_is_no_mistake_of_the_user(scripted: ScriptedServer) -> None:
    with pytest.raises(ServerError, match="answered 503: busy"):
        ask(scripted, Answer(status=503, body=b'{"error": {"message": "busy"}}'))


def test_a_missing_key_says_how_to_give_one(scripted: ScriptedServer) -> None:
    with pytest.raises(InvalidRequestError, match="OPENAI_API_KEY"):
        ask(scripted, Answer(status=401, body=b"{}"))


def test_no_redirect_is_followed(scripted: ScriptedServer) -> None:
    moved = Answer(status=307, headers=(("location", "http://evil.example/v1"),), finish=None)
    with pytest.raises(InvalidRequestError, match=r"moved to http://evil\.example/v1; give that as --url"):
        ask(scripted, moved)


def test_what_is_no_api_is_said(scripted: ScriptedServer) -> None:
    with pytest.raises(ServerError, match=r"'<html>'.*check --url"):
        ask(scripted, Answer(body=b"<html>", kind="text/html"))


def test_a_server_that_is_not_there_is_said() -> None:
    with scripted_server() as server:
        url = server.url
    with pytest.raises(ServerError, match="/v1 cannot be reached: Connection refused"):
        ChatClient(url).models()


def test_a_generator_that_is_closed_closes_the_connection(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(finish=None, forever=True)]
    pieces = ChatClient(scripted.url).stream("parrot", [])
    assert next(pieces) == Piece(CONTENT, "more ")
    pieces.close()
    assert scripted.left.wait(30)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("https://example.com/v1/", "https://example.com/v1"),
        ("https://example.com/api/v2", "https://example.com/api/v2"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_api_base_ends_in_a_version(url: str, base: str) -> None:
    assert api_base(url) == base


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "http://", "http://a:b", "http://a/?x=1", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not the URL of a server"):
        api_base(url)


def test_a_key_that_no_header_can_have_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="--api-key"):
        ChatClient("http://localhost", "a\nb")
