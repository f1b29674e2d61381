"""What a request of any protocol asks of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec
from attrs import frozen

from engine.core.grammars import Grammar
from engine.core.parsers import (
    JsonScanner,
    ToolChoice as ToolChoice,  # noqa: PLC0414  (a public name of this package too)
)
from engine.core.protocols.partial_json import completing
from engine.core.unicode import decode_json


@frozen(kw_only=True)
class FunctionTool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments; None: the function takes none."""
    strict: bool = False
    """Whether the arguments must keep to the schema."""
    where: str = "tools"
    """Where the function stands in the request, for refusals: `tools[0].function`."""


@frozen(kw_only=True)
class ParameterNames:
    """What a protocol calls its parameters, for refusals. Sampling parameters have the engine's names."""

    messages: str = "messages"
    tools: str = "tools"
    tool_choice: str = "tool_choice"
    max_tokens: str = "max_tokens"
    logprobs: str = "top_logprobs"
    grammar: str = "response_format"
    effort: str = "reasoning_effort"
    variables: str = "chat_template_kwargs"
    prediction: str = "prediction"


@frozen(kw_only=True)
class Conversation:
    """What a request asks of the model, independent of its protocol."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates expect them. Each has `role` (system, user, assistant or tool) and `content`, a text; perhaps
    `name`. An assistant's may have `reasoning_content`, a text, and `tool_calls` ({"id", "type": "function",
    "function": {"name", "arguments"}}), with arguments as an object, or as JSON, which the server decodes with
    `template_arguments`. A tool's has `tool_call_id`."""
    tools: Sequence[FunctionTool] = ()
    tool_choice: ToolChoice = attrs.field(factory=ToolChoice)
    parallel_calls: bool = True
    """Whether there may be several tool calls."""
    variables: Mapping[str, Any] = attrs.field(factory=dict)
    """Additional variables of the chat template."""
    effort: str | None = None
    """How much to reason, in the template's words; "none" turns reasoning off. None: the template's default."""
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    """Sampling parameters by the names of SamplingParams, as the client gave them, unchecked; None: the model's
    default. `stop` may be a text, `logit_bias` is a mapping. max_tokens, logprobs and grammar have their own fields."""
    max_tokens: int | None = None
    """Maximum tokens of the answer, reasoning included; None: the model's default, else what the context holds."""
    may_exceed_context: bool = False
    """Whether prompt and max_tokens together may be more than the context holds, which then ends the answer."""
    logprobs: int | None = None
    """Number of most likely tokens to report for each token; 0: only the token itself; None: no log probabilities."""
    grammar: Grammar | None = None
    """What the content must match, after the reasoning, if there is any; next to tools, there may be calls instead."""
    n: int = 1
    """Number of answers."""
    priority: int = 0
    salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    cache_key: str | None = None
    """Requests of one key go to the same replica, if it is not overloaded."""
    prediction: str | None = None
    """The expected answer, without reasoning: saves time where the answer agrees, and never changes it. None: none."""
    names: ParameterNames = attrs.field(factory=ParameterNames)


def template_arguments(text: str) -> Any:
    """The arguments of a call, JSON, as the object that chat templates expect.

    An empty text is no arguments. A text that is no JSON object, as of a call that was cut short, stays a text. Half of
    a surrogate pair is read as U+FFFD.
    """
    if not text.strip():
        return {}
    try:
        found = decode_json(text.encode(), msgspec.json.decode)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def complete_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object. Of a text that is not a JSON object, only the complete members."""
    scanner = JsonScanner()
    begun = scanner.feed(text.lstrip())[1] + scanner.held
    steps = completing(begun)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = template_arguments(end.value)
            return found if isinstance(found, dict) else {}
