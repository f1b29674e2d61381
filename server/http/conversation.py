"""The layer that all conversation protocols share: from a conversation to the engine's requests and the parsed answer.

A protocol, such as /v1/chat/completions, is three things on top of it:

1. It decodes its own body (request_bodies.read) and refuses what it cannot honour.
2. It builds a `Conversation`: messages as chat templates expect them, functions, sampling parameters by the engine's
   names, and `ParameterNames`, so that refusals name the parameters of the protocol.
3. It writes the answer with an `AnswerWriter` of its own (answer_writer.py), which receives `Delta`s. `delta.said` are
   the parser's events of a choice (engine.core.parsers): Reasoning, Content, CallBegin, CallArguments, CallEnd and
   Malformed; `delta.logprobs` the log probabilities of its tokens; `delta.finish_reason` is set with the last one.
   `Usage` has the token counts.

`respond` does all between: checks, the chat template, tokens, grammar and parser, and sends the answer. Limits of keys,
timeouts, the request log, turns between streams and the end of a request whose client has left apply to every protocol,
because they belong to the application, the generation and the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from engine.core.grammars import Grammar
from engine.core.parsers import ToolChoice
from engine.core.types import SamplingParams
from engine.server.front_end.errors import excerpt
from engine.server.http import params as parameters
from engine.server.http.answer_writer import AnswerWriter
from engine.server.http.errors import invalid
from engine.server.http.job import Job
from engine.server.http.output_rules import planned_output
from engine.server.http.responses import SendResponse
from engine.server.http.service import TEMPLATE_ARGUMENTS, ChatPrompt, Service
from engine.server.http.tools import FunctionTool, offered_tools

EFFORT = "reasoning_effort"
"""Variable of chat templates that say how much to reason."""
ENABLE_THINKING = "enable_thinking"
"""Variable of chat templates that turn reasoning on and off."""


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


@frozen(kw_only=True)
class Conversation:
    """What a request asks of the model, in no protocol's own terms."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates expect them. Each has `role` (system, user, assistant or tool) and `content`, a text; perhaps
    `name`; of an assistant, `reasoning_content`, a text, and `tool_calls` ({"id", "type": "function", "function":
    {"name", "arguments"}}), arguments an object or, if they are none, a text; of a tool, `tool_call_id`."""
    tools: Sequence[FunctionTool] = ()
    tool_choice: ToolChoice = attrs.field(factory=ToolChoice)
    parallel_calls: bool = True
    """Whether there may be several tool calls."""
    variables: Mapping[str, Any] = attrs.field(factory=dict)
    """Additional variables of the chat template."""
    effort: str | None = None
    """How much to reason, in the template's words; none turns reasoning off."""
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    """Sampling parameters by the engine's names, as the client gave them, unchecked (params.checked_params); None: the
    model's default. max_tokens, logprobs and grammar have fields of their own."""
    max_tokens: int | None = None
    """Of the answer, reasoning included; None: the model's default, else what the context holds."""
    logprobs: int | None = None
    """Number of most likely tokens to report for each token; 0: only the token itself; None: no log probabilities."""
    grammar: Grammar | None = None
    """What the content must match, after the reasoning, if there is any; next to tools, there may be calls instead."""
    n: int = 1
    """Number of answers."""
    priority: int = 0
    salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    names: ParameterNames = attrs.field(factory=ParameterNames)


async def respond(
    service: Service, name: str, conversation: Conversation, writer: AnswerWriter, *, stream: bool
) -> SendResponse:
    """Check a conversation, render and tokenize it; what sends the answer, which begins when it is called.

    name: id of the response. Raises ApiError or InvalidRequestError.
    """
    params, tools = checked(service, conversation)
    prompt = await encode(service, conversation, tools)
    output = planned_output(service, conversation, tools, prompt.text)
    if output.grammar is not None:
        params = parameters.evolve(params, grammar=output.grammar)
    names, default = conversation.names, service.default_params.max_tokens
    params = parameters.with_max_tokens(
        conversation.max_tokens, names.max_tokens, default, params, len(prompt.tokens), service.max_len
    )
    requests = service.requests(
        name,
        [prompt.tokens],
        [params],
        n=conversation.n,
        priority=conversation.priority,
        salt=conversation.salt or "",
    )
    return Job(
        service,
        name,
        requests,
        writer,
        stream=stream,
        choices_per_prompt=conversation.n,
        output_format=output.format,
        grammar_parameter=output.grammar_parameter,
    ).response()


def checked(service: Service, conversation: Conversation) -> tuple[SamplingParams, list[dict[str, Any]]]:
    """All sampling parameters but max_tokens and grammar, and the tools as templates expect them. Raises ApiError."""
    names, limits = conversation.names, service.limits
    parameters.check_num_choices(conversation.n, limits)
    parameters.check_salt(conversation.salt, limits)
    params = parameters.checked_params(conversation.sampling, service.default_params, limits, service.vocab_size)
    if conversation.logprobs is not None:
        parameters.check_logprobs(conversation.logprobs, limits, names.logprobs)
        params = attrs.evolve(params, logprobs=conversation.logprobs)
    parser = service.parser
    tools = offered_tools(
        conversation.tools,
        conversation.tool_choice,
        readable=parser is not None and parser.reads_calls,
        parameter=names.tool_choice,
    )
    return params, tools


async def encode(
    service: Service, conversation: Conversation, tools: Sequence[Mapping[str, Any]] | None = None
) -> ChatPrompt:
    """Render and tokenize a conversation up to the answer, as when token counts are asked for.

    tools: as `checked` returns them; None: check them. Raises ApiError or InvalidRequestError.
    """
    if tools is None:
        _, tools = checked(service, conversation)
    variables = template_variables(service, conversation)
    return await service.encode_conversation(conversation.messages, variables, tools, conversation.names.messages)


def template_variables(service: Service, conversation: Conversation) -> Mapping[str, Any]:
    """The additional variables of the chat template. Raises ApiError for an effort that it cannot express."""
    variables, names, effort = dict(conversation.variables), conversation.names, conversation.effort
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise invalid(f"{names.variables} must not contain {name}", names.variables)
    if effort is None:
        return variables
    template = service.parser.templates.chat if service.parser is not None else ""
    found: dict[str, Any] = {}
    if EFFORT in template:
        found = {EFFORT: effort}
    elif effort == "none" and ENABLE_THINKING in template:
        found = {ENABLE_THINKING: False}
    if both := found.keys() & variables.keys():
        raise invalid(f"{names.variables} has {min(both)}; give either that or {names.effort}", names.effort)
    if found:
        return variables | found
    raise invalid(
        f"this model's chat template has no place for {names.effort} {excerpt(effort)!r}; leave it out"
        + (f", or set {ENABLE_THINKING} in {names.variables}" if ENABLE_THINKING in template else ""),
        names.effort,
    )
