"""The arguments of earlier tool calls, which are JSON within the JSON of a request: decoded for the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.protocols import NUMBERS_PER_VALUE, have_more_values, template_arguments
from engine.server.front_end.errors import ApiError

Message = Mapping[str, Any]


def with_arguments(messages: Sequence[Message], max_values: int, parameter: str) -> Sequence[Message]:
    """The messages with the arguments of their tool calls as chat templates expect them.

    max_values: strings, lists and objects that all arguments together may hold, and NUMBERS_PER_VALUE times as many
    numbers. parameter: that of the messages, for refusals. Raises ApiError.
    """
    texts = [
        call["function"]["arguments"]
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance(call["function"]["arguments"], str)
    ]
    if not texts:
        return messages
    if have_more_values(texts, max_values):
        raise ApiError(
            413,
            f"the arguments of the tool calls hold more than {max_values} strings, lists and objects "
            f"(server.max_body_values), or more than {max_values * NUMBERS_PER_VALUE} numbers; send shorter ones",
            param=parameter,
        )
    return [
        {**message, "tool_calls": [_decoded(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _decoded(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    given = function["arguments"]
    return (
        call
        if not isinstance(given, str)
        else {**call, "function": {**function, "arguments": template_arguments(given)}}
    )
