"""What a chat template writes for an assistant's message, the parser reads back as that message."""

# ruff: noqa: E501  (templates)

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.parsers import Parser, Templates
from engine.core.text import Tokenizer
from engine.plugins.parsers.deepseek import DeepSeek
from engine.plugins.parsers.gpt_oss import GptOss
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.llama3 import Llama3
from engine.plugins.parsers.mistral import Mistral
from engine.testing.parsers import Answer
from tests.core.text.tokenizers_under_test import byte_level, wrap
from tests.plugins.parsers.examples import deepseek

HEAD = (
    "{% for message in messages %}{% if message.role == 'user' %}[user]{{ message.content }}[end]{% else %}[assistant]"
)
TAIL = "{% endif %}{% endfor %}"
CALLS = "{% for call in message.tool_calls %}"
END = "{% endfor %}"
HERMES = (
    "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' + message.content }}"
    + CALLS
    + """{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}"""
    + "{{ '}\\n</tool_call>' }}"
    + END
)
LLAMA3 = (
    CALLS
    + """{{ '{"name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}{{ '}' }}"""
    + "{% if not loop.last %}; {% endif %}"
    + END
)
MISTRAL = (
    "[THINK]{{ message.reasoning_content }}[/THINK]{{ message.content }}"
    + CALLS
    + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    + END
)
MISTRAL_7 = (
    "{{ message.content }}[TOOL_CALLS] ["
    + CALLS
    + "{{ call.function | tojson }}{% if not loop.last %}, {% endif %}"
    + END
    + "]"
)
DEEPSEEK_R1 = deepseek(
    "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' + message.content }}<|tool calls begin|>"
    + CALLS
    + "{{ '<|tool call begin|>function<|tool sep|>' + call.function.name + '\\n```json\\n' + call.function.arguments }}"
    + "{{ '\\n```<|tool call end|>\\n' }}"
    + END
    + "<|tool calls end|>"
)
DEEPSEEK_31 = deepseek(
    "<think>{{ message.reasoning_content }}</think>{{ message.content }}<|tool calls begin|>"
    + CALLS
    + "{{ '<|tool call begin|>' + call.function.name + '<|tool sep|>' + call.function.arguments + '<|tool call end|>' }}"
    + END
    + "<|tool calls end|>"
)
GPT_OSS = (
    "<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
    + CALLS
    + "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>"
    + "{{ call.function.arguments | tojson }}<|call|>"
    + END
)
WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text and not any(mark in text for mark in "<[{")
)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.none() | st.integers() | st.text(max_size=8), st.lists, max_leaves=4),
    max_size=3,
)


@pytest.mark.parametrize(
    ("parser", "template", "parts"),
    [
        (Hermes, HERMES, {"reasoning_content", "content"}),
        (Llama3, LLAMA3, set()),
        (Mistral, MISTRAL, {"reasoning_content", "content"}),
        (Mistral, MISTRAL_7, {"content"}),
        (DeepSeek, DEEPSEEK_R1, {"reasoning_content", "content"}),
        (DeepSeek, DEEPSEEK_31, {"reasoning_content", "content"}),
        (GptOss, GPT_OSS, {"reasoning_content"}),
    ],
    ids=["hermes", "llama3", "mistral", "mistral-7", "deepseek-r1", "deepseek-3.1", "gpt-oss"],
)
@given(content=WORDS, reasoning=WORDS, arguments=st.lists(ARGUMENTS, min_size=1, max_size=3))
@settings(deadline=None, max_examples=25)
def test_a_message_comes_back(
    parser: type[Parser[Any]], template: str, parts: set[str], content: str, reasoning: str, arguments: list[Any]
) -> None:
    tokenizer = Tokenizer(wrap(byte_level()), HEAD + template + TAIL)
    options = None if parser.options_class is None else parser.options_class()
    made = parser(options, Templates(chat=template))
    tools = [{"type": "function", "function": {"name": name}} for name in ("f0", "f1", "f2")]
    message = {
        "role": "assistant",
        "content": content if "content" in parts else "",
        "reasoning_content": reasoning if "reasoning_content" in parts else "",
        "tool_calls": [
            {"id": f"c{index}", "type": "function", "function": {"name": f"f{index}", "arguments": one}}
            for index, one in enumerate(arguments)
        ],
    }
    question = {"role": "user", "content": "?"}
    text = tokenizer.render_chat([question, made.template_message(message)], add_generation_prompt=False)
    parsing = made.begin("[assistant]", tools)
    assert parsing is not None
    answer = Answer.of([*parsing.feed(text.partition("[assistant]")[2]), *parsing.end()])
    assert (answer.content, answer.reasoning) == (message["content"], message["reasoning_content"])
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        (f"f{index}", one) for index, one in enumerate(arguments)
    ]
    assert all(call.complete for call in answer.calls)
    assert not answer.malformed


def test_gpt_oss_joins_what_its_template_takes_only_one_of() -> None:
    past = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": []}
    found = GptOss(None, Templates()).template_message(past)
    assert found == {"role": "assistant", "content": "", "thinking": "hm\n\nI look.", "tool_calls": []}
    assert GptOss(None, Templates()).template_message(
        {"role": "assistant", "content": "a", "reasoning_content": "b"}
    ) == {
        "role": "assistant",
        "content": "a",
        "thinking": "b",
    }


def test_ids_of_mistral_are_nine_letters_and_digits() -> None:
    made = Mistral(Mistral.options_class(), Templates())
    assert all(len(made.new_call_id()) == 9 and made.new_call_id().isalnum() for _ in range(20))
