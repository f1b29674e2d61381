from __future__ import annotations

import json
from typing import Any

import pytest

from engine.core.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Malformed, Reasoning
from engine.core.protocols import ApiError, Delta, Usage
from engine.plugins.protocols.anthropic import writer as module
from engine.plugins.protocols.anthropic.errors import error_body
from engine.plugins.protocols.anthropic.writer import MessageWriter

USAGE = Usage(10, 5, 4, 2)
CALL: list[Event] = [CallBegin("f"), CallArguments("{}"), CallEnd()]


def writer(**given: Any) -> MessageWriter:
    return MessageWriter("msg_1", "tiny", lambda: "id", **{"max_tokens": 5, **given})


def whole(*deltas: Delta, usage: Usage = USAGE, **given: Any) -> dict[str, Any]:
    answer = writer(**given)
    for delta in deltas:
        list(answer.add(delta))
    body: dict[str, Any] = json.loads(b"".join(answer.body(usage)))
    return body


def stream(*deltas: Delta, usage: Usage = USAGE, **given: Any) -> list[dict[str, Any]]:
    answer = writer(**given)
    data = b"".join(event for delta in deltas for event in answer.events(delta, lambda: usage)) + answer.end(usage)
    events = []
    for one in data.decode().removesuffix("\n\n").split("\n\n"):
        name, body = one.split("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def last(events: list[Event] | None = None, reason: str = "stop", **others: Any) -> Delta:
    return Delta(0, events=events or [], finish_reason=reason, **others)


def test_a_whole_message() -> None:
    body = whole(Delta(0, events=[Reasoning("why"), Content("a")]), last([Content("b")]))
    assert body == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "why", "signature": "engine/1"},
            {"type": "text", "text": "ab"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


def test_a_stream_begins_with_the_message_and_ends_with_its_reason() -> None:
    events = stream(Delta(0, events=[Content("a")]), last())
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["cache_read_input_tokens"]) == ([], None, 4)
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == start["usage"]


@pytest.mark.parametrize(
    ("delta", "usage", "reason"),
    [
        (last(), USAGE, "end_turn"),
        (last(CALL), USAGE, "tool_use"),
        (last(CALL, stop_string="x"), USAGE, "stop_sequence"),
        (last(CALL, "length"), USAGE, "max_tokens"),
        (last(None, "length"), Usage(10, 4), "model_context_window_exceeded"),
    ],
)
def test_the_reason_why_it_ended_is_the_same_in_a_stream(delta: Delta, usage: Usage, reason: str) -> None:
    body = whole(delta, usage=usage)
    ending = stream(delta, usage=usage)[-2]["delta"]
    assert body["stop_reason"] == reason
    assert body["stop_sequence"] == delta.stop_string
    assert ending == {key: body[key] for key in ending}
    assert ending.get("parse_error") == body.get("parse_error")


BEGUN: list[Event] = [CallBegin("f"), CallArguments('{"path": "/data", "dry_run": ')]
CUT = Malformed("the output ended", at_end=True)


@pytest.mark.parametrize(
    "delta", [last([*BEGUN, CUT], "length"), last([*BEGUN, CUT], stop_string="x"), last(BEGUN, "length")]
)
def test_a_call_has_its_complete_arguments_when_it_is_cut_short(delta: Delta) -> None:
    [call] = whole(delta)["content"]
    assert (call["type"], call["input"]) == ("tool_use", {"path": "/data"})
    assert stream(delta)[-1]["type"] == "message_stop"


@pytest.mark.parametrize(
    "delta",
    [
        last([*BEGUN, Malformed("wrong"), Content("True}}")]),
        last([*BEGUN, Malformed("wrong"), Content("True}}")], "length"),
        last([*BEGUN, Malformed("wrong")], "length"),
        last([*BEGUN, Malformed("wrong")], stop_string="x"),
        last([*BEGUN, CUT]),
        last(BEGUN),
    ],
)
def test_a_call_is_text_or_the_error_of_a_stream_when_it_breaks(delta: Delta) -> None:
    body = whole(delta)
    assert "".join(block["text"] for block in body["content"]).removesuffix("True}}") == (
        '{"name": "f", "arguments": {"path": "/data", "dry_run": '
    )
    assert body["stop_reason"] != "tool_use"
    answer, sent = writer(), []
    with pytest.raises(ApiError, match="the call of 'f'") as raised:
        sent += answer.events(delta, lambda: USAGE)
    assert raised.value.status == 500
    assert b"content_block_stop" not in b"".join(sent)


def test_other_calls_stay_when_one_breaks() -> None:
    body = whole(last([*CALL, *BEGUN, Malformed("wrong"), Content("x"), *CALL]))
    assert [block["type"] for block in body["content"]] == ["tool_use", "text", "text", "tool_use"]
    assert body["stop_reason"] == "tool_use"


def test_what_could_not_be_parsed_is_said() -> None:
    assert whole(last([Malformed("wrong"), Content("x")]))["parse_error"] == "wrong"
    assert stream(last([Malformed("wrong")]))[-2]["delta"]["parse_error"] == "wrong"


def test_text_that_is_not_parsed_is_one_block() -> None:
    body = whole(Delta(0, "a"), Delta(0, "b", finish_reason="stop"), usage=Usage(3, 2))
    assert body["content"] == [{"type": "text", "text": "ab"}]
    assert "output_tokens_details" not in body["usage"]


def test_an_answer_without_text_has_no_block() -> None:
    assert whole(last())["content"] == []
    assert [event["type"] for event in stream(last())] == ["message_start", "message_delta", "message_stop"]


def test_further_text_is_an_event_of_the_open_block_or_begins_one() -> None:
    answer = writer()
    templates = answer.templates()

    def events(data: bytes) -> list[Any]:
        return [json.loads(one.partition(b"data: ")[2]) for one in data.split(b"\n\n")[:-1]]

    def text(said: str) -> list[Any]:
        template = templates[0]
        return events(template.before + json.dumps(said).encode() + template.after)

    def others(delta: Delta) -> list[Any]:
        return events(b"".join(answer.events(delta, lambda: USAGE)))

    def delta(index: int, said: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": said}}

    others(Delta(0, events=[]))
    begun = text("a")
    assert ([event["type"] for event in begun[:-1]], begun[-1]) == (["content_block_start"], delta(0, "a"))
    assert text("b") == [delta(0, "b")]
    assert others(Delta(0, events=[Content("c")])) == [delta(0, "c")]
    others(Delta(0, events=CALL))
    assert text("d")[-1] == delta(2, "d")
    assert text("e") == [delta(2, "e")]
    others(Delta(0, events=[*CALL, Content("f")]))
    assert text("g") == [delta(4, "g")]
    assert others(last()) == [{"type": "content_block_stop", "index": 4}]


def test_further_thinking_is_an_event_of_the_open_block_or_begins_one() -> None:
    def streamed(*, templates: bool) -> bytes:
        answer = writer()
        texts, thoughts, data = answer.templates(), answer.reasoning_templates(), b""
        assert thoughts is not None
        for event in [*map(Reasoning, "abc"), *map(Content, "de"), *map(Reasoning, "fg"), Content("h")]:
            if templates:
                template = (texts if isinstance(event, Content) else thoughts)[0]
                data += template.before + json.dumps(event.text).encode() + template.after
            else:
                data += b"".join(answer.events(Delta(0, events=[event]), lambda: USAGE))
        return data

    assert streamed(templates=True) in streamed(templates=False)
    hidden: Any = {"show_thinking": False}
    assert writer(**hidden).reasoning_templates() is None


def test_a_stream_with_nothing_to_send_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [Delta(0, events=[Reasoning("a")]) for _ in range(3)]
    given: Any = {"show_thinking": False}
    assert "ping" not in [event["type"] for event in stream(*deltas, last(), **given)]
    monkeypatch.setattr(module, "PING_SECONDS", -1)
    events = [event["type"] for event in stream(*deltas, last(), **given)]
    assert events.count("ping") == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_each_status_has_its_type_of_error(status: int, kind: str) -> None:
    assert error_body(ApiError(status, "why")) == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_an_error_in_a_stream_is_an_event() -> None:
    event = writer().error_event(ApiError(500, "why"))
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(event.partition(b"data: ")[2]) == error_body(ApiError(500, "why"))


def test_an_error_has_the_id_of_its_request() -> None:
    error = ApiError(500, "why")
    assert "request_id" not in error_body(error)
    error.request_id = "req-1"
    assert error_body(error)["request_id"] == "req-1"


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_look_for() -> None:
    message = error_body(ApiError(400, "it holds 5 tokens", code="context_length_exceeded"))["error"]["message"]
    assert message == "prompt is too long: it holds 5 tokens"
