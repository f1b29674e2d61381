"""Structural tags, texts that match them and texts that do not, for the conformance suite of grammar backends.

In the texts, `<|special|>` and `<|stop|>` are the special tokens of these names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.grammars import Grammar
from engine.testing.grammar_cases import EOS, NAMES, OTHER_EOS, SPECIAL, Case

FREE: dict[str, Any] = {"type": "any_text"}
JSON: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
A = '{"a":1}'
A_PATTERN = r'\{\s*"a"\s*:\s*-?(?:0|[1-9][0-9]*)\s*\}'
_NAMES = {NAMES[0].decode(): EOS, NAMES[1].decode(): OTHER_EOS, NAMES[2].decode(): SPECIAL}
_SPLIT = re.compile(f"({'|'.join(map(re.escape, _NAMES))})")


def split_special(text: str) -> list[str | int]:
    """A text, split at the special tokens."""
    return [_NAMES.get(one, one) for one in _SPLIT.split(text) if one]


def sequence(*elements: Any) -> dict[str, Any]:
    """Formats one after the other; a string stands for itself."""
    return {"type": "sequence", "elements": [_format(one) for one in elements]}


def tag(begin: str, content: Any, end: str | list[str]) -> dict[str, Any]:
    """A format between two texts."""
    return {"type": "tag", "begin": begin, "content": _format(content), "end": end}


def tags(kind: str, found: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A format of several tags."""
    return {"type": kind, "tags": found, **more}


def _format(one: Any) -> dict[str, Any]:
    return {"type": "const_string", "value": one} if isinstance(one, str) else one


def call(name: str) -> dict[str, Any]:
    """A tool call as Hermes writes it."""
    return tag(f'<tool_call>\n{{"name": "{name}", "arguments": ', JSON, "}\n</tool_call>")


CALL = f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>'
G_CALL = CALL.replace('"f"', '"g"')
CALL_PATTERN = rf'<tool_call>\n\{{"name": "[fg]", "arguments": {A_PATTERN}\s*\}}\n</tool_call>'
FREE_PATTERN = r"(?:(?!<tool_call>|<\|special\|>|<\|stop\|>).)*"
ELEMENT = tag('{"name": "f", "arguments": ', JSON, "}")
ELEMENT_PATTERN = rf'\{{"name": "f", "arguments": {A_PATTERN}\s*\}}'
CALLS = [call("f"), call("g")]
AUTO = tags("triggered_tags", CALLS, triggers=["<tool_call>"])
THINK = tag("", FREE, "</think>")
THINK_PATTERN = r"(?:(?!</think>|<\|special\|>).)*</think>"


def _full(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text: compiled.fullmatch(text) is not None


def _case(made: dict[str, Any], good: Sequence[str], bad: Sequence[str], pattern: str) -> Case:
    return Case(Grammar.structural_tag(made), good, bad, _full(pattern))


TEXT_CASES = (
    _case(
        sequence(THINK, {"type": "regex", "pattern": "\n{0,2}"}, JSON),
        [f"a<</think>\n{A}", f"</think>{A}"],
        [A, f"a</think>b{A}", f"</think>a</think>{A}", "</think>"],
        rf"{THINK_PATTERN}\n{{0,2}}{A_PATTERN}",
    ),
    _case(
        AUTO,
        [f"a<{CALL}b{G_CALL}c", "", "true", "<tool_cal", CALL],
        ["<tool_call>", f"{CALL}<tool_call>", CALL.replace("1", "é"), CALL.replace('"f"', '"h"')],
        f"({FREE_PATTERN}{CALL_PATTERN})*{FREE_PATTERN}",
    ),
    _case(
        {**AUTO, "at_least_one": True},
        [CALL, f"{CALL}\n{G_CALL}true"],
        ["", "a", f"a{CALL}", f"{CALL}<tool_call>"],
        f"{CALL_PATTERN}({FREE_PATTERN}{CALL_PATTERN})*{FREE_PATTERN}",
    ),
    _case(
        {**AUTO, "at_least_one": True, "stop_after_first": True},
        [CALL, G_CALL],
        ["", f"{CALL}\n", CALL * 2],
        CALL_PATTERN,
    ),
    _case(
        {**AUTO, "stop_after_first": True},
        [f"a{CALL}", "ab", ""],
        [f"{CALL}a", CALL * 2],
        f"{FREE_PATTERN}({CALL_PATTERN})?",
    ),
    _case(
        tags("tags_with_separator", [tag('{"name":"f","parameters":', JSON, "}")], separator=";", at_least_one=True),
        [f'{{"name":"f","parameters":{A}}};{{"name":"f","parameters":{A}}}'],
        ["", f'{{"name":"f","parameters":{A}}};'],
        rf'(?:;?(?:(?<=;)|^)\{{"name":"f","parameters":{A_PATTERN}\s*\}})+',
    ),
    _case(
        sequence({"type": "optional", "content": tag("<think>", FREE, "</think>")}, JSON),
        [f"<think>ab</think>{A}", A],
        [f"<think>{A}", f"ab</think>{A}"],
        rf"(?:<think>{THINK_PATTERN})?{A_PATTERN}",
    ),
    _case({"type": "any_text", "excludes": ["ab", "é"]}, ["true a", ""], ["xab", "éa"], "(?:(?!ab|é).)*"),
    _case(sequence({"type": "regex", "pattern": "[a-c/]+"}, "b/b"), ["ab/b", "b/b/b/b"], ["b/b", "ab/"], "[abc/]+b/b"),
)
"""Without special tokens."""
SPECIAL_CASES = (
    _case(
        sequence(tag("", FREE, "<|special|>"), JSON),
        [f"ab<|special|>{A}", f"<|special|>{A}"],
        [A, "ab<|special|>b", f"<|special|><|special|>{A}"],
        rf"(?:(?!<\|special\|>).)*<\|special\|>{A_PATTERN}",
    ),
    _case(
        sequence(
            {"type": "star", "content": tag("<|special|>a<|special|>", FREE, "<|special|>")},
            {
                "type": "or",
                "elements": [sequence("b<|special|>", FREE), tag("c<|special|>", JSON, "<|stop|>")],
            },
        ),
        [f"<|special|>a<|special|>true<|special|>c<|special|>{A}", "b<|special|>ab", f"c<|special|>{A}<|stop|>"],
        ["", "<|special|>a<|special|>b<|special|>", f"c<|special|>{A}a", "b<|special|>a<|special|>"],
        rf"(?:<\|special\|>a<\|special\|>(?:(?!<\|).)*<\|special\|>)*"
        rf"(?:b<\|special\|>(?:(?!<\|).)*|c<\|special\|>{A_PATTERN}(?:<\|stop\|>)?)",
    ),
    _case(
        tags("token_triggered_tags", [tag("<|special|>f", JSON, "!")], trigger_tokens=["<|special|>"]),
        ["", f"ab<|special|>f{A}!b", f"<|special|>f{A}!<|special|>f{A}!"],
        ["<|special|>", "a<|special|>g", f"<|special|>f{A}"],
        rf"(?:(?!<\|special\|>).|<\|special\|>f{A_PATTERN}!)*",
    ),
    _case(
        tag("<|special|>[", tags("tags_with_separator", [ELEMENT], separator=", ", at_least_one=True), "]"),
        [f'<|special|>[{{"name": "f", "arguments": {A}}}, {{"name": "f", "arguments": {A}}}]'],
        ["[]", "<|special|>[]", f'<|special|>[{{"name": "f", "arguments": {A}}}, ]'],
        rf"<\|special\|>\[{ELEMENT_PATTERN}(?:, {ELEMENT_PATTERN})*\]",
    ),
)
"""With special tokens between the texts."""
REFUSED = (
    (sequence(FREE, JSON), "followed by a text or a special token"),
    ({"type": "star", "content": FREE}, "a tag with an end"),
    (sequence("<|stop|>", "a"), "nothing may follow"),
    ({"type": "token", "token": 97}, "not a special token"),
    (tags("triggered_tags", CALLS, triggers=["<a"]), "begin with one trigger"),
    ({"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
)
"""(format, what the error says)."""
