from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.server.http.request_bodies import ChatBody, CompletionBody
from engine.server.http.structured_output import parameter_of_grammar, requested_grammar

GIVEN = [
    {"json": {}},
    {"json": False},
    {"json": True},
    {"json": {"type": "object"}, "json_object": False},
    {"json_object": True},
    {"regex": "a"},
]


@pytest.mark.parametrize("given", GIVEN)
def test_the_parameter_is_structured_outputs_when_it_asks_for_a_grammar(given: dict[str, Any]) -> None:
    fields = {"model": "tiny", "structured_outputs": given}
    completion = msgspec.convert(fields | {"prompt": ""}, CompletionBody)
    chat = msgspec.convert(fields | {"messages": []}, ChatBody)
    for body in (completion, chat):
        assert requested_grammar(body) is not None
        assert parameter_of_grammar(body) == "structured_outputs"


@pytest.mark.parametrize("given", [None, {}, {"json_object": False}])
def test_the_parameter_is_response_format_when_nothing_else_asks(
    given: dict[str, Any] | None,
) -> None:
    fields = {"model": "tiny", "messages": [], "structured_outputs": given}
    body = msgspec.convert(fields | {"response_format": {"type": "json_object"}}, ChatBody)
    assert requested_grammar(body) is not None
    assert parameter_of_grammar(body) == "response_format"
