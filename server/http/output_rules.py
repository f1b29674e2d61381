"""What the output of a conversation may be: the grammar that its tools and its format ask for, and how it is parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attrs import frozen

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar, check_length
from engine.core.parsers import OutputRules
from engine.core.plugin_host import owner_of
from engine.core.protocols import Conversation, FunctionTool
from engine.server.http.errors import invalid
from engine.server.http.parsed_output import OutputFormat
from engine.server.http.parser_faults import parser_faults
from engine.server.http.service import Service


@frozen(kw_only=True)
class Output:
    """How an output is made and read."""

    grammar: Grammar | None
    """What the whole output matches, reasoning and marks of calls included; None: anything."""
    grammar_parameter: str
    """The parameter that asks for the grammar, for refusals."""
    format: OutputFormat | None
    """How it is parsed; None: all of it is content."""


def planned_output(
    service: Service, conversation: Conversation, tools: Sequence[Mapping[str, Any]], prompt: str
) -> Output:
    """The output of a conversation. tools: those that are offered. prompt: the rendered conversation.

    Takes long with large tools: call it in a thread. Raises ApiError for rules that the model's parser cannot enforce,
    and for a grammar that the engine would refuse for its length.
    """
    output = _planned(service, conversation, tools, prompt)
    if output.grammar is not None:
        try:
            check_length(output.grammar, service.max_grammar_chars)
        except InvalidRequestError as error:
            raise invalid(str(error), output.grammar_parameter) from None
    return output


def _planned(service: Service, conversation: Conversation, tools: Sequence[Mapping[str, Any]], prompt: str) -> Output:
    names, parser = conversation.names, service.parser
    content = conversation.grammar
    if parser is None:
        return Output(grammar=content, grammar_parameter=names.grammar, format=None)
    rules = OutputRules(
        prompt=prompt,
        tools=[_callable(tool) for tool in conversation.tools] if tools else (),
        strict=frozenset(tool.name for tool in conversation.tools if tool.strict),
        choice=conversation.tool_choice,
        parallel_calls=conversation.parallel_calls,
        content=content,
    )
    parsed = OutputFormat(
        begin=partial(parser.begin, prompt, tools),
        keep=service.parser_tokens,
        one_call=not conversation.parallel_calls,
        owner=owner_of(type(parser)),
    )
    chosen = rules.choice.forced or rules.choice.allowed is not None
    param = names.tool_choice if chosen else names.tools if content is None else names.grammar
    if not parser.describes_format:
        what = names.tool_choice if chosen else "strict tools"
        who = f"the parser {type(parser).__name__} does not say how this model writes calls"
        if rules.restricts_calls:
            raise invalid(f"{what} cannot be enforced: {who}; leave it out, or use another --parser", param)
        if tools and content is not None:
            raise invalid(f"{names.grammar} cannot be combined with tools: {who}, so no grammar can allow them", param)
        return Output(grammar=content, grammar_parameter=param, format=parsed if content is None else None)
    try:
        with parser_faults(parsed.owner, "grammar"):
            grammar = parser.grammar(rules)
    except InvalidRequestError as error:
        found = {"tools": names.tools, "tool_choice": param}.get(error.parameter or "", param)
        raise invalid(str(error), found) from None
    return Output(grammar=grammar, grammar_parameter=param, format=parsed)


def _callable(tool: FunctionTool) -> dict[str, Any]:
    """A tool as grammars see it: without what describes it, and with no schema if it takes no arguments."""
    parameters = {} if tool.parameters is None else {"parameters": tool.parameters}
    return {"type": "function", "function": {"name": tool.name, **parameters}}
