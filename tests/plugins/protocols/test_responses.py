"""The items and events of a response, without a server: whole and streamed agree, whatever the cut of the text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from engine.core.parsers import Templates
from engine.core.protocols import ApiError, Delta, Usage
from engine.core.types import TokenLogprobs
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.tagged import ReasoningOptions
from engine.plugins.protocols.responses.input import encrypted, template_messages
from engine.plugins.protocols.responses.tools import read_choice, read_tools
from engine.plugins.protocols.responses.writer import Answer, ResponseWriter

TEMPLATES = Templates(chat="<think> {{ tools }} <tool_call>")
TOOLS = read_tools([{"type": "function", "name": "weather"}, {"type": "custom", "name": "patch"}])
SAID = [
    "",
    "It is sunny.",
    '<think>\nhm\n</think>\n\nsunny\n<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>',
    'a <tool_call>{"name": "patch", "arguments": {"input": "\\ud83d\\ude00 \\\\ \\" \\n\\u00e9"}}</tool_call> b',
    '<tool_call>{"name": "patch", "arguments": {"diff": "a"}}</tool_call>',
    '<tool_call>{"name": "patch", "arguments": {"input": 3}}</tool_call>',
    '<tool_call>{"name": "patch", "arguments": {"input": "a", "more": "b"}}</tool_call>',
    '<tool_call>{"name": "patch", "arguments": {"input": "\\ud83d alone"}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>',
    '<tool_call>{"name": "weather", "argu',
]


def writer(*, logprobs: bool = False) -> ResponseWriter:
    answer = Answer(
        name="resp_1",
        fields={"model": "m"},
        offered=TOOLS.offered,
        new_call_id=lambda: "call_1",
        token_bytes=lambda token: bytes([token]),
        top_logprobs=0 if logprobs else None,
        with_encrypted=True,
    )
    return ResponseWriter(answer)


def deltas(said: str, cuts: Sequence[int], merged: bool, finish: str = "stop") -> list[Delta]:
    """What a generation yields for a text that comes in pieces; merged: in a single one."""
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS.offered]
    parsing = Hermes(ReasoningOptions(reasoning=True), TEMPLATES).begin("", tools)
    assert parsing is not None
    ends = sorted({min(cut, len(said)) for cut in cuts} | {0, len(said)})
    pieces = [said[begin:end] for begin, end in pairwise(ends)]
    found: list[Delta] = [Delta(0, events=[])]
    for piece in [*pieces, ""]:
        delta = found[-1] if merged else Delta(0, events=[])
        assert delta.events is not None
        entries = [TokenLogprobs(token=byte, logprob=-1.0, rank=1, top=()) for byte in piece.encode()]
        delta.spans.append((len(delta.events), entries))
        delta.events += parsing.feed(piece) if piece else parsing.end()
        if not merged:
            found.append(delta)
    found[-1].finish_reason = finish
    return found


def whole(given: Sequence[Delta], *, logprobs: bool = False) -> dict[str, Any]:
    one = writer(logprobs=logprobs)
    for delta in given:
        for _ in one.add(delta):
            pass
    return plain(json.loads(b"".join(one.body(Usage(3)))))


def streamed(given: Sequence[Delta], *, logprobs: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    one = writer(logprobs=logprobs)
    data = b"".join(event for delta in given for event in one.events(delta, lambda: Usage(3))) + one.end(Usage(3))
    events = events_of(data)
    return plain(events[-1]["response"]), events


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.partition(b"\ndata: ")[2]) for event in data.split(b"\n\n")[:-1]]


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without ids and times."""
    for item in response["output"]:
        assert item.pop("id")
    return {key: value for key, value in response.items() if not key.endswith("_at")}


def joined(events: Sequence[dict[str, Any]]) -> list[str]:
    """The texts of the items, joined from the deltas of a stream."""
    items = events[-1]["response"]["output"]
    return [
        "".join(one["delta"] for one in events if one["type"].endswith(".delta") and one["output_index"] == index)
        for index in range(len(items))
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SAID),
    st.lists(st.integers(1, 120), max_size=12),
    st.lists(st.integers(1, 120), max_size=12),
    st.sampled_from(["stop", "length"]),
)
@example(SAID[3], list(range(120)), [], "stop")
@example(SAID[7], list(range(120)), [], "stop")
def test_any_cut_gives_the_same_items(said: str, some: list[int], others: list[int], finish: str) -> None:
    first = whole(deltas(said, some, merged=True, finish=finish))
    assert whole(deltas(said, others, merged=False, finish=finish)) == first
    for merged in (False, True):
        response, events = streamed(deltas(said, others, merged, finish))
        assert response == first
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        for item, text in zip(first["output"], joined(events), strict=True):
            part = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
            assert text == part


@pytest.mark.parametrize("said", [text for text in SAID if "ud83d" not in text])
def test_log_probabilities_are_those_of_the_contents_bytes(said: str) -> None:
    cuts = range(len(said))
    first = whole(deltas(said, cuts, merged=True), logprobs=True)
    assert streamed(deltas(said, cuts, merged=False), logprobs=True)[0] == first
    for item in first["output"]:
        if item["type"] == "message":
            [part] = item["content"]
            assert "".join(one["token"] for one in part["logprobs"]) == part["text"]


BROKEN = [  # by an escape that JSON does not have, or by the end of the output
    ('a <tool_call>{"name": "patch", "arguments": {"input": "rm -r a\\d b"}}</tool_call> c', "stop"),
    ('a <tool_call>{"name": "patch", "arguments": {"input": "rm -r a\\d b"}}</tool_call> c', "length"),
    ('a <tool_call>{"name": "patch", "arguments": {"input": "rm -r a', "stop"),
]
CUT = 'a <tool_call>{"name": "patch", "arguments": {"input": "rm -r a'


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("said", "finish"), BROKEN)
def test_a_call_of_a_custom_tool_is_text_when_it_breaks(said: str, finish: str, merged: bool) -> None:
    response = whole(deltas(said, range(80), merged, finish))
    before, text = response["output"]
    assert before["content"][0]["text"] == "a"
    assert (text["type"], text["status"]) == ("message", "completed" if finish == "stop" else "incomplete")
    call = said.partition("<tool_call>")[2]
    assert text["content"][0]["text"] == call.replace("</tool_call>", "")
    assert "arguments" in response["parse_error"]


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("said", "finish"), BROKEN)
def test_a_stream_fails_when_a_call_of_a_custom_tool_breaks(said: str, finish: str, merged: bool) -> None:
    one, sent = writer(), []
    given = deltas(said, range(80), merged, finish)
    with pytest.raises(ApiError, match="the call of 'patch', a part of which was sent") as raised:
        sent.extend(event for delta in given for event in one.events(delta, lambda: Usage(3)))
    sent.append(one.error_event(raised.value))
    events = events_of(b"".join(sent))
    done = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ["message"]
    assert not any(event["type"] == "response.custom_tool_call_input.done" for event in events)
    assert events[-1]["type"] == "response.failed"
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_call_of_a_custom_tool_is_incomplete_when_the_length_cuts_it() -> None:
    given = deltas(CUT, range(80), merged=False, finish="length")
    response = whole(given)
    call = response["output"][1]
    assert (response["status"], call["status"], call["input"]) == ("incomplete", "incomplete", "rm -r a")
    found, events = streamed(given)
    assert found == response
    done = [event["type"] for event in events if event["type"].endswith("done")]
    assert done.count("response.output_item.done") == 1, "of the message; clients run a call when its item is done"
    assert "response.custom_tool_call_input.done" not in done


def test_a_response_that_fails_has_no_call_that_has_not_ended() -> None:
    one = writer()
    for delta in deltas(CUT, range(80), merged=False)[:-1]:
        list(one.events(delta, lambda: Usage(3)))
    [event] = events_of(one.error_event(ApiError(504, "too slow")))
    assert [item["type"] for item in event["response"]["output"]] == ["message"]


def test_a_stream_that_fails_ends_with_the_response_so_far() -> None:
    one = writer()
    given = deltas("It is sunny.", [3, 6], merged=False)[:2]
    data = b"".join(event for delta in given for event in one.events(delta, lambda: Usage(3)))
    events = events_of(data + one.error_event(ApiError(504, "too slow")))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "too slow"})
    assert response["output"][0]["content"][0]["text"] == "It"  # a space may turn out to stand before a mark
    assert events[-1]["sequence_number"] == len(events) - 1


def test_a_stream_that_fails_before_its_first_event_has_the_events_that_clients_wait_for() -> None:
    data = writer().error_event(ApiError(400, "no"))
    events = [json.loads(event.partition(b"\ndata: ")[2]) for event in data.split(b"\n\n")[:-1]]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "invalid_prompt", "message": "no"}


def test_a_custom_tool_with_other_arguments_keeps_them() -> None:
    def read(arguments: str) -> tuple[str, str]:
        said = f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'
        response = whole(deltas(said, range(200), merged=False))
        return response["output"][0]["input"], response.get("parse_error", "")

    assert read('{"input": "a\\tb"}') == ("a\tb", "")
    assert read('{"input": ""}') == ("", "")
    assert read(r'{"input": "a\ud83d"}') == ("a\ufffd", "")
    for arguments in ('{"diff": "a"}', '{"input": 3}', "{}"):
        text, error = read(arguments)
        assert text == arguments
        assert "patch with arguments other than the text `input`" in error
    assert read('{"input": "a", "more": "b"}')[0] == "a"


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return asyncio.run(template_messages(items, instructions))


def test_items_of_one_turn_are_one_message() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"call_{number}", "name": "f", "arguments": '{"a": 1}'}

    def output(number: int) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": f"call_{number}", "output": "2"}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": text}]}

    def called(number: int) -> dict[str, Any]:
        return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

    def result(number: int) -> dict[str, Any]:
        return {"role": "tool", "content": "2", "tool_call_id": f"call_{number}", "name": "f"}

    found = messages(
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        thought("e"),
        thought("f"),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "g", "annotations": []}]},
        call(1),
        call(2),
        output(2),
        output(1),
        thought("h"),
        call(3),
        output(3),
        {"role": "system", "content": "i"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "j"}]},
        thought("k"),
        instructions="a",
    )
    assert found == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": "g", "reasoning_content": "e\nf", "tool_calls": [called(1), called(2)]},
        result(2),
        result(1),
        {"role": "assistant", "content": "", "reasoning_content": "h", "tool_calls": [called(3)]},
        result(3),
        {"role": "system", "content": "i"},
        {"role": "assistant", "content": "j", "reasoning_content": "k"},
    ]


def test_items_of_one_turn_are_one_message_in_any_order() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": str(number), "name": "f", "arguments": "{}"}

    def output(number: int) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": str(number), "output": ""}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    def text(said: str) -> dict[str, Any]:
        return {"role": "assistant", "content": said}

    for items, content, reasoning, calls in (
        ((text("a"), call(1), text("mid"), call(2)), "amid", None, ["1", "2"]),
        ((thought("b"), call(1), thought("c"), text("d")), "d", "b\nc", ["1"]),
        ((call(1), text("e")), "e", None, ["1"]),
        ((text("f"), text("g")), "f\ng", None, []),
    ):
        found = messages(*items, output(2), output(1), text("next"))
        assert [message["role"] for message in found] == ["assistant", "tool", "tool", "assistant"]
        assert (found[0]["content"], found[0].get("reasoning_content")) == (content, reasoning)
        assert [one["id"] for one in found[0].get("tool_calls", ())] == calls
        assert found[-1]["content"] == "next"


def test_reasoning_is_read_from_the_fullest_field() -> None:
    item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "c"}],
        "encrypted_content": encrypted("é"),
    }
    assert messages(item)[0]["reasoning_content"] == "c"
    assert messages(item | {"content": None})[0]["reasoning_content"] == "é"
    assert messages(item | {"content": None, "encrypted_content": None})[0]["reasoning_content"] == "s"
    assert messages({"type": "reasoning", "summary": []}) == []


@pytest.mark.parametrize("role", [None, 1, ["user"], {"user": 1}, "tool"])
def test_a_message_is_refused_by_name_when_its_role_is_unknown(role: Any) -> None:
    with pytest.raises(ApiError, match=r"input\[0\]\.role must be one of") as caught:
        messages({"type": "message", "role": role, "content": "x"})
    assert caught.value.param == "input[0].role"


@pytest.mark.parametrize("given", ["engine-1:é", "engine-1:x", "engine-1:/w==", "other", 1, ["engine-1:"]])
def test_encrypted_content_is_refused_by_name_when_this_server_did_not_make_it(given: Any) -> None:
    with pytest.raises(ApiError, match="was not made by this server") as caught:
        messages({"type": "reasoning", "encrypted_content": given})
    assert caught.value.param == "input[0].encrypted_content"


@pytest.mark.parametrize("name", [None, 1, [], {}, "other"])
def test_a_tool_choice_is_refused_when_it_allows_a_tool_that_is_not_offered(name: Any) -> None:
    with pytest.raises(ApiError, match="none of the functions that are offered") as caught:
        read_choice({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name}]}, TOOLS)
    assert caught.value.param == "tool_choice"


def test_long_inputs_are_read_in_time_that_grows_with_their_length() -> None:
    text = "x" * 1000
    systems = [{"role": "system", "content": text}] * 5000
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}] * 5000
    assert [len(one["content"]) for one in messages(*systems, *thoughts)] == [5000 * 1002 - 2, 0]
