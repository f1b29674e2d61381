"""The form of structural tags, and the trees that they become for a vocabulary."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import FormatResolver, Grammar, GrammarVocabulary, format_of
from engine.core.grammars.formats import Dispatch, Either, FreeText, Sequence, Text, Token
from engine.core.grammars.limits import check_limits
from engine.testing.grammar_cases import SPECIAL, TOKENS, vocabulary
from engine.testing.structural_tag_cases import AUTO, FREE, JSON, call, sequence, tag, tags


def resolve(made: dict[str, Any]) -> Any:
    return FormatResolver(vocabulary()).resolve(Grammar.structural_tag(made).source)


def test_the_forms_of_one_tag_are_the_same_grammar() -> None:
    grammar = Grammar.structural_tag(AUTO)
    assert grammar.kind == "structural_tag"
    whole = {"type": "structural_tag", "format": AUTO}
    assert Grammar.structural_tag(whole) == Grammar.structural_tag(json.dumps(whole)) == grammar
    structures = [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}]
    older = {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}
    content = {"type": "json_schema", "json_schema": {"const": 1}}
    assert Grammar.structural_tag(older) == Grammar.structural_tag(
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", content, "</f>")]}
    )


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("{", "is not JSON"),
        ([], "must be an object"),
        ({"type": "any_tokens"}, "have no format 'any_tokens' here; they have any_text"),
        ({"type": "structural_tag"}, "must have either the field format"),
        ({"type": "structural_tag", "format": FREE, "more": 1}, "must have either the field format"),
        ({"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": []}, "begin, schema and end"),
        ({"type": "const_string"}, "the format const_string of a structural tag needs value"),
        ({"type": "const_string", "value": 1}, "value of the format const_string must not be 1"),
        ({**JSON, "style": "qwen_xml"}, "style of the format json_schema is not supported"),
        ({"type": "any_text", "max_tokens": 1}, "max_tokens of the format any_text is not supported"),
        ({"type": "any_text", "excludes": [""]}, "none of them empty"),
        ({"type": "or", "elements": []}, "elements of the format or must not be empty"),
        ({"type": "or", "elements": ["a"]}, "must be an object, not 'a'"),
        ({"type": "repeat", "min": 2, "max": 1, "content": FREE}, "in order"),
        ({"type": "repeat", "min": 0, "max": 10_001, "content": FREE}, "from 0 to 10000"),
        ({"type": "repeat", "min": 0, "max": True, "content": FREE}, "max of the format repeat"),
        (tag("a", FREE, "b") | {"end": {"type": "token"}}, "end of the format tag must be a text or"),
        (tags("triggered_tags", [FREE], triggers=["a"]), "must be formats of the type tag"),
        (tags("triggered_tags", [], triggers=["a"]), "tags of the format triggered_tags must not be empty"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_structural_tag_is_refused(made: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        Grammar.structural_tag(made)
    assert caught.value.parameter == "grammar"


def test_fields_of_xgrammar_that_ask_for_nothing_pass() -> None:
    Grammar.structural_tag({**JSON, "style": "json", "any_order": False})
    Grammar.structural_tag({"type": "any_text", "max_tokens": None})


def test_names_of_special_tokens_stand_for_the_tokens() -> None:
    made = sequence("a<|special|>b", {"type": "token", "token": "<|special|>"}, {"type": "token", "token": SPECIAL})
    token = Token(SPECIAL)
    assert resolve(made) == Sequence((Sequence((Text("a"), token, Text("b"))), token, token))
    assert resolve({"type": "token", "token": "</think>"}) == Text("</think>")


def test_free_text_excludes_what_ends_it() -> None:
    assert resolve(tag("", FREE, ["a", "b"])).elements[1] == FreeText(("a", "b"))
    optional = {"type": "optional", "content": tag("b", JSON, "")}
    assert resolve(sequence(FREE, optional, "c")).elements[0] == FreeText(("b", "c"))
    assert resolve(tag("", AUTO, "</x>")).elements[1].excludes == ("</x>",)


def test_tags_are_grouped_by_their_triggers() -> None:
    made = resolve({**AUTO, "triggers": ['<tool_call>\n{"name": "f"', '<tool_call>\n{"name": "g"']})
    assert isinstance(made, Dispatch)
    assert made.loop
    assert [start.value for start, _ in made.rules if isinstance(start, Text)] == [
        '<tool_call>\n{"name": "f"',
        '<tool_call>\n{"name": "g"',
    ]
    token = tags("triggered_tags", [tag("<|special|>f", JSON, "!")], triggers=["<|special|>f"], stop_after_first=True)
    made = resolve(token)
    ((start, rest),) = made.rules
    assert start == Token(SPECIAL)
    assert not made.loop
    assert isinstance(rest, Either)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({**AUTO, "triggers": ["<tool", "<tool_call"]}, "begins with several"),
        ({**AUTO, "triggers": ["<tool_call>", "<x>"]}, "no tag begins with the trigger '<x>'"),
        (tags("triggered_tags", [tag("ab", JSON, "."), tag("b", JSON, ".")], triggers=["ab", "b"]), "could never come"),
        (tags("triggered_tags", [tag("ab", JSON, ".")], triggers=["ab"], excludes=["b"]), "contains an excluded text"),
        (tags("triggered_tags", [tag("a<|special|>", JSON, ".")], triggers=["a<|special|>"]), "begin with a special"),
        (tags("triggered_tags", [tag("<|stop|>", JSON, ".")], triggers=["<|stop|>"]), "ends an output"),
        ({"type": "star", "content": tag("a", JSON, "<|end|>")}, "nothing may follow"),
        (tags("triggered_tags", [tag("a", FREE, "")], triggers=["a"]), "must be the last"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_enforced_is_refused(made: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        resolve(made)


def of_token(token: int) -> dict[str, Any]:
    return tags("token_triggered_tags", [tag({"type": "token", "token": token}, JSON, ".")], trigger_tokens=[token])


def with_special(*names: bytes) -> GrammarVocabulary:
    """A vocabulary whose last tokens are special, with these texts."""
    usual = vocabulary()
    begin = len(usual.tokens)
    more = frozenset(range(begin, begin + len(names)))
    return attrs.evolve(usual, tokens=(*usual.tokens, *names), special_tokens=usual.special_tokens | more)


def test_a_trigger_may_be_a_token_whose_text_another_shares() -> None:
    shared = with_special(b"<|same|>", b"<|same|>")
    for token in range(len(TOKENS), len(TOKENS) + 2):
        made = FormatResolver(shared).resolve(Grammar.structural_tag(of_token(token)).source)
        ((start, _),) = made.rules
        assert start == Token(token)
        assert made.excludes == ("<|same|>",)


def test_a_trigger_without_text_is_refused() -> None:
    nameless = with_special(b"")
    with pytest.raises(InvalidRequestError, match=f"the special token {len(TOKENS)} has no text"):
        FormatResolver(nameless).resolve(Grammar.structural_tag(of_token(len(TOKENS))).source)


def test_an_end_without_text_that_something_follows_is_refused() -> None:
    last = len(TOKENS)
    ends = attrs.evolve(with_special(b""), eos_tokens=frozenset({last}))
    made = sequence({"type": "token", "token": last}, "a")
    with pytest.raises(InvalidRequestError, match=f"the token {last} ends an output of this model"):
        FormatResolver(ends).resolve(Grammar.structural_tag(made).source)


def test_limits_hold_for_each_part() -> None:
    nested = {"type": "regex", "pattern": "((((a))))"}
    check_limits(Grammar.structural_tag(nested), max_chars=100, max_depth=4)
    with pytest.raises(InvalidRequestError, match="nested more than 3 deep"):
        check_limits(Grammar.structural_tag(nested), max_chars=100, max_depth=3)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"const": 1}),
        Grammar.json_object(),
        Grammar.regex("a"),
        Grammar.choice(["a", "b"]),
        Grammar.lark('start: "a"'),
        Grammar.structural_tag(call("f")),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_every_kind_of_grammar_can_be_a_part(grammar: Grammar) -> None:
    assert resolve(sequence("x", format_of(grammar)))
    with pytest.raises(InvalidRequestError, match="'gbnf' cannot be a part"):
        format_of(Grammar("gbnf"))
