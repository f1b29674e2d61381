from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from engine.core.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Malformed, Reasoning, Templates
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.tagged import ReasoningOptions
from engine.plugins.protocols.anthropic import signature
from engine.plugins.protocols.anthropic.blocks import BlockEvent, BlockSequence, CollectedBlocks

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}\n</tool_call>'
SAID = (
    "plain",
    "",
    f"<think>\nwhy\n</think>\n\nLet me see.\n{CALL}\n{CALL}",
    f"{CALL}and more",
    '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call> after',
    f"<think>never closed {CALL}",
    CALL[:-30],
)
EVENTS = st.lists(
    st.sampled_from(
        [Reasoning(""), Reasoning("a"), Content(""), Content("b"), Content("\n"), Malformed("wrong"), CallBegin("f")]
    ),
    max_size=8,
)


def feed(sequence: BlockSequence, events: Sequence[Event]) -> list[BlockEvent]:
    return [part for event in events for part in sequence.feed(event)]


def new_id() -> str:
    return "new"


def joined(parts: Sequence[BlockEvent]) -> list[dict[str, Any]]:
    """The blocks that a client makes of a stream; checks that every block is whole and indexes have no gaps."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for part in parts:
        match part["type"]:
            case "content_block_start":
                assert not is_open
                assert part["index"] == len(blocks)
                blocks.append(dict(part["content_block"]))
                texts = []
                is_open = True
            case "content_block_delta":
                assert is_open
                assert part["index"] == len(blocks) - 1
                [(name, text)] = [item for item in part["delta"].items() if item[0] != "type"]
                texts.append(text)
                if name == "partial_json":
                    blocks[-1]["partial_json"] = "".join(texts)
                else:
                    blocks[-1][name] += text
            case "content_block_stop":
                assert is_open
                assert part["index"] == len(blocks) - 1
                is_open = False
    assert not is_open
    return blocks


def collected(parts: Sequence[BlockEvent], *, cut: bool = True) -> list[dict[str, Any]]:
    blocks = CollectedBlocks()
    for part in parts:
        blocks.add(part)
    found = [one for one in blocks.content(cut=cut) if one is not None]
    content: list[dict[str, Any]] = json.loads(msgspec.json.encode(found))
    return content


def parsed(pieces: Sequence[str]) -> tuple[list[BlockEvent], BlockSequence]:
    """The stream of an output in Hermes' format that comes in pieces."""
    parsing = Hermes(ReasoningOptions(reasoning=True), Templates()).begin("", TOOLS)
    assert parsing is not None
    sequence = BlockSequence(new_id)
    parts = [part for piece in pieces for part in feed(sequence, parsing.feed(piece))]
    parts += feed(sequence, parsing.end())
    return [*parts, *sequence.end()], sequence


@given(st.sampled_from(SAID), st.data())
@settings(deadline=None, max_examples=60)
def test_a_text_gives_the_same_blocks_however_it_is_cut(said: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    pieces = [said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    streamed, sequence = parsed(pieces)
    whole, other = parsed([said])
    assert joined(streamed) == joined(whole)
    assert collected(streamed) == collected(whole)
    assert (sequence.has_complete_call, sequence.error) == (other.has_complete_call, other.error)
    for block, same in zip(collected(whole), joined(streamed), strict=True):
        same.pop("partial_json", None)
        assert block.keys() == same.keys()
        if block["type"] != "tool_use":
            assert block == same


@given(EVENTS)
@settings(deadline=None, max_examples=60)
def test_blocks_are_whole_and_numbered_without_gaps(events: list[Event]) -> None:
    sequence = BlockSequence(new_id)
    parts = [*feed(sequence, events), *sequence.end()]
    blocks = joined(parts)
    said = "".join(event.text for event in events if isinstance(event, Content))
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == said
    assert all(block.get("text", block.get("thinking", "x")) for block in blocks), "no block is empty"
    assert len([block for block in blocks if block["type"] == "tool_use"]) == sum(
        isinstance(event, CallBegin) for event in events
    )


def test_an_answer_of_every_kind_of_block() -> None:
    sequence = BlockSequence(new_id)
    events: list[Event] = [
        Reasoning("a"),
        Reasoning("b"),
        Content("c"),
        CallBegin("f", "own"),
        CallArguments('{"x": '),
        CallArguments("1.0}"),
        CallEnd(),
        CallBegin("g"),
        CallArguments("{}"),
        CallEnd(),
    ]
    parts = [*feed(sequence, events), *sequence.end()]
    assert collected(parts) == [
        {"type": "thinking", "thinking": "ab", "signature": signature.SHOWN},
        {"type": "text", "text": "c"},
        {"type": "tool_use", "id": "toolu_own", "name": "f", "input": {"x": 1.0}},
        {"type": "tool_use", "id": "toolu_new", "name": "g", "input": {}},
    ]
    assert [part["type"].removeprefix("content_block_") for part in parts[:5]] == [
        "start",
        "delta",
        "delta",
        "delta",
        "stop",
    ]
    assert parts[3]["delta"] == {"type": "signature_delta", "signature": signature.SHOWN}
    assert parts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert sequence.has_complete_call
    assert sequence.error is None


def test_a_call_is_text_when_it_turns_out_not_to_be_json() -> None:
    parts, sequence = parsed([SAID[4]])
    assert collected(parts, cut=False) == [
        {"type": "text", "text": '{"name": "weather", "arguments": {"city": '},
        {"type": "text", "text": "Rome}} after"},
    ]
    assert not sequence.has_complete_call
    assert sequence.broken_call == "weather"
    assert sequence.error is not None


def test_a_call_is_not_broken_when_the_output_ends_within_it() -> None:
    _, sequence = parsed([SAID[6]])
    assert sequence.open_call == "weather"
    assert sequence.broken_call is None


def test_reasoning_that_is_not_shown_is_carried_by_the_signature() -> None:
    sequence = BlockSequence(new_id, show_thinking=False)
    parts = [*feed(sequence, [Reasoning("wh"), Reasoning("y é"), Content("x")]), *sequence.end()]
    [thinking, _] = collected(parts)
    assert thinking["thinking"] == ""
    assert signature.carried(thinking["signature"]) == "why é"
    assert not any(part.get("delta", {}).get("thinking") for part in parts)


@pytest.mark.parametrize(("given", "text"), [("EqQBCgIYAhIM...", ""), ("", ""), (signature.SHOWN, "")])
def test_another_servers_signature_carries_nothing(given: str, text: str) -> None:
    assert signature.carried(given) == text


@pytest.mark.parametrize("given", [signature.carrying("why")[:-1], "engine/1:é", "engine/1:/w=="])
def test_a_damaged_signature_is_an_error(given: str) -> None:
    with pytest.raises(ValueError, match="damaged"):
        signature.carried(given)
