from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.core.protocols import ApiError, Conversation, ToolChoice
from engine.plugins.protocols.anthropic.bodies import CountTokensBody, MessagesBody
from engine.plugins.protocols.anthropic.options import conversation_of

GRANITE = "{% if thinking %}{% endif %}"
QWEN, GPT_OSS, LLAMA = "{% if enable_thinking %}{% endif %}", "{{ reasoning_effort }}", "{{ messages }}"
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
BUDGET = {"type": "enabled", "budget_tokens": 1024}


def asked(template: str = LLAMA, **given: Any) -> tuple[Conversation, list[str]]:
    body = {"model": "m", "max_tokens": 2000, "messages": []} | given
    return conversation_of(msgspec.convert(body, MessagesBody), [], template)


@pytest.mark.parametrize(
    ("template", "thinking", "variables", "effort", "without_effect"),
    [
        (QWEN, None, {}, None, []),
        (QWEN, {"type": "adaptive"}, {"enable_thinking": True}, None, []),
        (QWEN, {"type": "disabled"}, {"enable_thinking": False}, None, []),
        (GRANITE, {"type": "adaptive"}, {"thinking": True}, None, []),
        (QWEN, BUDGET, {"enable_thinking": True}, None, ["thinking.budget_tokens"]),
        (GPT_OSS, {"type": "adaptive", "display": "omitted"}, {}, None, []),
        (GPT_OSS, {"type": "disabled"}, {}, "none", []),
        (GPT_OSS, BUDGET, {}, None, ["thinking.budget_tokens"]),
        (LLAMA, {"type": "adaptive"}, {}, None, []),
        (LLAMA, {"type": "disabled"}, {}, None, ["thinking"]),
        (LLAMA, BUDGET, {}, None, ["thinking.budget_tokens", "thinking"]),
    ],
)
def test_thinking_is_what_the_chat_template_has_a_place_for(
    template: str, thinking: Any, variables: Any, effort: str | None, without_effect: list[str]
) -> None:
    conversation, missing = asked(template, thinking=thinking)
    assert (conversation.variables, conversation.effort, missing) == (variables, effort, without_effect)


def test_the_effort_reaches_a_chat_template_that_has_a_place_for_it() -> None:
    config = {"effort": "high"}
    assert asked(GPT_OSS, output_config=config, thinking={"type": "adaptive"})[0].effort == "high"
    assert asked(GPT_OSS, output_config=config, thinking={"type": "disabled"})[0].effort == "none"
    conversation, missing = asked(QWEN, output_config=config)
    assert (conversation.effort, missing) == (None, ["output_config.effort"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"type": "enabled"}, 'budget_tokens is needed with type "enabled"'),
        ({"type": "adaptive", "budget_tokens": 2000}, "allowed with no other"),
        ({"type": "enabled", "budget_tokens": 1000}, "at least 1024 and less than max_tokens, not 1000"),
        ({"type": "enabled", "budget_tokens": 2000}, "at least 1024 and less than max_tokens, not 2000"),
        ({"type": "disabled", "display": "omitted"}, "thinking.display is not allowed"),
    ],
)
def test_a_budget_out_of_range_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        asked(thinking=given)


def test_a_count_of_tokens_has_no_limit_of_a_budget() -> None:
    body = CountTokensBody(model="m", messages=[])
    body = msgspec.convert(msgspec.to_builtins(body) | {"thinking": BUDGET | {"budget_tokens": 9999}}, CountTokensBody)
    assert conversation_of(body, [], QWEN)[0].variables == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, ToolChoice("required", "f"), False),
    ],
)
def test_the_choice_of_a_tool_is_that_of_all_protocols(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    conversation, _ = asked(tool_choice=choice)
    assert (conversation.tool_choice, conversation.parallel_calls) == (expected, parallel)


def test_a_tool_is_a_function() -> None:
    given = TOOL | {
        "type": "custom",
        "description": "says",
        "strict": True,
        "cache_control": {"type": "ephemeral"},
        "eager_input_streaming": True,
        "defer_loading": False,
        "allowed_callers": ["direct"],
        "input_examples": [],
    }
    [tool] = asked(tools=[given])[0].tools
    assert (tool.name, tool.description, tool.parameters) == ("weather", "says", {"type": "object"})
    assert (tool.strict, tool.where) == (True, "tools[0]")
    [tool] = asked(tools=[TOOL])[0].tools
    assert not tool.strict


def test_a_deferred_tool_is_offered_once_it_has_been_found() -> None:
    tools = [TOOL, TOOL | {"name": "time", "defer_loading": True}]
    body = msgspec.convert({"model": "m", "messages": [], "tools": tools}, CountTokensBody)
    found: list[tuple[set[str], list[str]]] = [(set(), ["weather"]), ({"time"}, ["weather", "time"])]
    for references, names in found:
        conversation, _ = conversation_of(body, [], LLAMA, references)
        assert [tool.name for tool in conversation.tools] == names


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]},
            "'web_search_20250305', which",
        ),
        ({"tools": [TOOL | {"input_examples": [{}]}]}, r"tools\[0\]\.input_examples"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\]\.input_schema is missing"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, r"output_config\.format; give one"),
        ({"tool_choice": {"type": "tool"}}, r"tool_choice\.name is needed"),
        ({"tool_choice": {"type": "any", "name": "f"}}, r"tool_choice\.name .* allowed with no other"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        asked(**given)


def test_sampling_parameters_have_the_engines_names() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["x"], "priority": 1, "cache_salt": "s"}
    conversation, _ = asked(**given, output_config={"format": FORMAT})
    assert conversation.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop": ["x"]}
    assert (conversation.max_tokens, conversation.may_exceed_context) == (2000, True)
    assert (conversation.priority, conversation.salt) == (1, "s")
    assert conversation.grammar is not None
    assert conversation.names.grammar == "output_config.format"


def test_the_output_format_has_an_older_name() -> None:
    old, new = asked(output_format=FORMAT)[0], asked(output_config={"format": FORMAT})[0]
    assert old.grammar == new.grammar is not None
    assert old.names.grammar == "output_format"
