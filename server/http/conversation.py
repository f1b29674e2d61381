"""The layer that all conversation protocols share: from a conversation to the engine's requests and the answer.

engine.core.protocols says how a protocol is built on it. /v1/chat/completions, which is part of the server, calls
`respond` directly; protocols of plugins call it by Routes (plugin_routes.py). Limits of keys, timeouts, the request
log, turns between streams and the end of a request whose client has left apply to every protocol, because they belong
to the application, the generation and the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from engine.core.parsers import EFFORT, reasoning_switch, template_variables as variables_of
from engine.core.protocols import AnswerWriter, Conversation
from engine.core.speculators import check_prediction
from engine.core.tokens import Tokens
from engine.core.types import SamplingParams
from engine.server.front_end.errors import excerpt
from engine.server.http import params as parameters
from engine.server.http.errors import invalid
from engine.server.http.job import Job
from engine.server.http.output_rules import planned_output
from engine.server.http.responses import SendResponse
from engine.server.http.service import TEMPLATE_ARGUMENTS, ChatPrompt, Service
from engine.server.http.tools import offered_tools


async def respond(
    service: Service,
    name: str,
    conversation: Conversation,
    writer: AnswerWriter,
    *,
    stream: bool,
    headers: Mapping[str, str] | None = None,
) -> SendResponse:
    """Check, render and tokenize a conversation; return the function that generates and sends the answer.

    name: id of the response. headers: further headers of the response. Raises ApiError or InvalidRequestError.
    """
    params, tools = checked(service, conversation)
    prompt = await encode(service, conversation, tools)
    planned = partial(planned_output, service, conversation, tools, prompt.text)
    schemas = [tool.parameters for tool in conversation.tools]
    output = await service.work(planned, 0, schemas, conversation.grammar.source if conversation.grammar else "")
    if output.grammar is not None:
        params = parameters.evolve(params, grammar=output.grammar)
    names, default = conversation.names, service.default_params.max_tokens
    max_tokens = conversation.max_tokens
    if conversation.may_exceed_context and max_tokens is not None:
        parameters.check_room(len(prompt.tokens), service.max_len)
        max_tokens = min(max_tokens, service.max_len - len(prompt.tokens))
    params = parameters.with_max_tokens(
        max_tokens, names.max_tokens, default, params, len(prompt.tokens), service.max_len
    )
    prediction = Tokens()
    if conversation.prediction is not None:
        check_prediction(speculates=service.speculates)
        prediction = await service.encode_prediction(conversation.prediction, names.prediction)
    requests = service.requests(
        name,
        [prompt.tokens],
        [params],
        n=conversation.n,
        priority=conversation.priority,
        salt=conversation.salt or "",
        cache_key=conversation.cache_key or "",
        prediction=prediction,
    )
    return Job(
        service,
        name,
        requests,
        writer,
        stream=stream,
        headers=headers,
        choices_per_prompt=conversation.n,
        output_format=output.format,
        grammar_parameter=output.grammar_parameter,
    ).response()


def checked(service: Service, conversation: Conversation) -> tuple[SamplingParams, list[dict[str, Any]]]:
    """All sampling parameters but the grammar, and the tools as templates expect them. Raises ApiError.

    max_tokens is set only if it is given: otherwise it depends on the prompt's length.
    """
    names, limits = conversation.names, service.limits
    parameters.check_num_choices(conversation.n, limits)
    parameters.check_length(conversation.salt, limits, "cache_salt")
    parameters.check_length(conversation.cache_key, limits, "prompt_cache_key")
    params = parameters.checked_params(
        conversation.sampling,
        service.default_params,
        limits,
        service.vocab_size,
        conversation.max_tokens,
        names.max_tokens,
    )
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
    return await service.encode_conversation(
        conversation.messages, variables, tools, conversation.names.messages, salt=conversation.salt or ""
    )


def template_variables(service: Service, conversation: Conversation) -> Mapping[str, Any]:
    """The additional variables of the chat template. Raises ApiError for an effort that it cannot express."""
    variables, names, effort = dict(conversation.variables), conversation.names, conversation.effort
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise invalid(f"{names.variables} must not contain {name}", names.variables)
    if effort is None:
        return variables
    template = service.chat_template
    switch = reasoning_switch(template)
    found: dict[str, Any] = {}
    if EFFORT in variables_of(template):
        found = {EFFORT: effort}
    elif effort == "none" and switch is not None:
        found = {switch: False}
    if both := found.keys() & variables.keys():
        raise invalid(f"{names.variables} has {min(both)}; give either that or {names.effort}", names.effort)
    if found:
        return variables | found
    raise invalid(
        f"this model's chat template has no place for {names.effort} {excerpt(effort)!r}; leave it out"
        + (f", or set {switch} in {names.variables}" if switch is not None else ""),
        names.effort,
    )
