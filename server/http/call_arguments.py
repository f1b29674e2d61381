"""The arguments of earlier tool calls, which are JSON within the JSON of a request: decoded for the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.protocols import NUMBERS_PER_VALUE, complete_arguments, have_more_values, template_arguments
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
    return _changed(messages, template_arguments)


def with_objects(messages: Sequence[Message]) -> list[Message]:
    """If the template accepts only objects, arguments that are not JSON objects are replaced by their complete members.

    messages: those of `with_arguments`.
    """
    return _changed(messages, complete_arguments)


def _changed(messages: Sequence[Message], read: Callable[[str], Any]) -> list[Message]:
    """The messages with what `read` makes of arguments that are texts."""
    return [
        {**message, "tool_calls": [_with_arguments(call, read) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_arguments(call: Mapping[str, Any], read: Callable[[str], Any]) -> Mapping[str, Any]:
    function = call["function"]
    given = function["arguments"]
    return call if not isinstance(given, str) else {**call, "function": {**function, "arguments": read(given)}}
