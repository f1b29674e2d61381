"""Texts made of marks, calls and words in any order: every parser reads them the same however they are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from engine.testing.parsers import Answer, Example, ParserConformance
from tests.plugins.parsers import test_conformance as suites

EACH = [
    suites.TestHermes,
    suites.TestLlama3,
    suites.TestMistral,
    suites.TestDeepSeek,
    suites.TestGptOss,
    suites.TestReasoningTags,
    suites.TestResponseTemplate,
]
WORDS = [
    "weather",
    " in ",
    "Rome",
    "\n",
    "<",
    "[",
    "{",
    "}",
    '"',
    '{"name": "f", "arguments": {"city": "Rome"}}',
    '{"a": 1}',
    r"""{"it\'s": [True, None,],}""",
]


@pytest.mark.parametrize("suite", EACH, ids=lambda suite: suite.parser.__name__)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_cut_of_any_text_gives_the_same_events(suite: type[ParserConformance], data: st.DataObject) -> None:
    conformance = suite()
    marks = [
        *(suite.parser.special_tokens or ("<call>", "</call>")),
        "<think>",
        "</think>",
        "assistant",
        "final",
        " to=functions.f",
        ";",
        ",",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(marks + WORDS), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    example = Example(text, prompt=data.draw(st.sampled_from(["", "<think>\n"])))
    whole = conformance.parse(example, text)
    assert conformance.parse(example, text, cuts) == whole
    answer = Answer.of(whole)
    for call in answer.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    found = answer.content + answer.reasoning + "".join(call.arguments for call in answer.calls)
    for word in ("weather", "Rome"):
        assert found.count(word) == text.count(word) or answer.calls, (word, text)
