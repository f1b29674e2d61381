"""What a request asks for besides its messages, as far as the model's chat template has a place for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar
from engine.core.parsers import EFFORT, reasoning_switch, template_variables
from engine.core.protocols import (
    Conversation,
    FunctionTool,
    ParameterNames,
    ToolChoice as SharedChoice,
    convert,
    excerpt,
    invalid,
)
from engine.plugins.protocols.anthropic.bodies import ClientTool, CountTokensBody, MessagesBody, Thinking, ToolChoice

MIN_BUDGET = 1024
"""Minimum of thinking.budget_tokens, as at Anthropic."""
MODES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
"""`tool_choice.type` -> the mode of all protocols."""
OLD_FORMAT = "output_format"
NAMES = ParameterNames(grammar="output_config.format", effort="output_config.effort", variables="thinking")


@frozen
class Reasoning:
    """How the chat template is asked to make the model reason."""

    variables: dict[str, Any] = attrs.field(factory=dict)
    effort: str | None = None
    without_effect: list[str] = attrs.field(factory=list)
    """Parameters for which this model's chat template has no place."""


def conversation_of(
    body: CountTokensBody,
    messages: Sequence[Mapping[str, Any]],
    template: str,
    references: Collection[str] = (),
) -> tuple[Conversation, list[str]]:
    """A request as a Conversation, and the parameters without effect on this model. Raises ApiError.

    messages: as chat templates expect them. template: source of the model's chat template. references: names of tools
    that the search for tools has found.
    """
    reasoning = requested_reasoning(body, template)
    choice = body.tool_choice or ToolChoice("auto")
    conversation = Conversation(
        messages=messages,
        tools=client_tools(body.tools or (), references),
        tool_choice=_shared_choice(choice),
        parallel_calls=not choice.disable_parallel_tool_use,
        variables=reasoning.variables,
        effort=reasoning.effort,
        grammar=_grammar(body),
        names=_names(body),
    )
    if isinstance(body, MessagesBody):
        conversation = attrs.evolve(
            conversation,
            sampling={
                "temperature": body.temperature,
                "top_p": body.top_p,
                "top_k": body.top_k,
                "stop": body.stop_sequences,
            },
            max_tokens=body.max_tokens,
            may_exceed_context=True,
            priority=body.priority or 0,
            salt=body.cache_salt,
        )
    return conversation, reasoning.without_effect


def requested_reasoning(body: CountTokensBody, template: str) -> Reasoning:
    """What `thinking` and `output_config.effort` ask of a chat template. Raises ApiError.

    template: its source.
    """
    found = Reasoning()
    effort = body.output_config.effort if body.output_config is not None else None
    thinking, takes_effort, switch = body.thinking, EFFORT in template_variables(template), reasoning_switch(template)
    if thinking is not None:
        _check_budget(thinking, body)
        if thinking.budget_tokens is not None:
            found.without_effect.append("thinking.budget_tokens")
        if switch is not None:
            found.variables[switch] = thinking.type != "disabled"
        elif thinking.type == "disabled" and takes_effort:
            return attrs.evolve(found, effort="none")
        elif thinking.type != "adaptive" and not takes_effort:
            found.without_effect.append("thinking")
    if effort is not None and not takes_effort:
        found.without_effect.append("output_config.effort")
        effort = None
    return attrs.evolve(found, effort=effort)


def _check_budget(thinking: Thinking, body: CountTokensBody) -> None:
    name, budget = "thinking.budget_tokens", thinking.budget_tokens
    if (budget is None) == (thinking.type == "enabled"):
        raise invalid(f'{name} is needed with type "enabled", and allowed with no other', name)
    if thinking.type == "disabled" and thinking.display is not None:
        raise invalid('thinking.display is not allowed with type "disabled"', "thinking.display")
    if budget is None:
        return
    if budget < MIN_BUDGET or (isinstance(body, MessagesBody) and budget >= body.max_tokens):
        raise invalid(f"{name} must be at least {MIN_BUDGET} and less than max_tokens, not {budget}", name)


def client_tools(tools: Sequence[dict[str, Any]], references: Collection[str] = ()) -> list[FunctionTool]:
    """The functions that the model may call. Raises ApiError for tools that the API's own servers run.

    references: names of tools that the search for tools has found.
    """
    found = []
    for index, given in enumerate(tools):
        where = f"tools[{index}]"
        kind = given.get("type")
        if kind not in (None, "custom"):
            raise invalid(
                f"{where} is of type {excerpt(str(kind))!r}, which this server does not have: it knows only tools that "
                "the client runs, with an input_schema; leave this one out",
                f"{where}.type",
            )
        tool = convert(given, ClientTool, where)
        if tool.defer_loading and tool.name not in references:
            continue
        found.append(
            FunctionTool(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=bool(tool.strict),
                where=where,
            )
        )
    return found


def _shared_choice(choice: ToolChoice) -> SharedChoice:
    if (choice.name is not None) != (choice.type == "tool"):
        raise invalid('tool_choice.name is needed with type "tool", and allowed with no other', "tool_choice.name")
    return SharedChoice(MODES[choice.type], choice.name)  # type: ignore[arg-type]


def _grammar(body: CountTokensBody) -> Grammar | None:
    wanted = body.output_config.format if body.output_config is not None else None
    if body.output_format is not None:
        if wanted is not None:
            raise invalid("output_format is an older name of output_config.format; give one of them", OLD_FORMAT)
        wanted = body.output_format
    if wanted is None:
        return None
    try:
        return Grammar.json_schema(wanted.schema)
    except InvalidRequestError as error:
        raise invalid(str(error), f"{_names(body).grammar}.schema") from None


def _names(body: CountTokensBody) -> ParameterNames:
    return NAMES if body.output_format is None else attrs.evolve(NAMES, grammar=OLD_FORMAT)
