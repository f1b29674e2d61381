"""Bugs of other servers where reasoning, tool calls and grammars meet, by the numbers of vLLM's (V) and SGLang's (S) issues."""

# ruff: noqa: E501  (an output is one line)

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import CompiledGrammar, Grammar, GrammarVocabulary, compile_with_tools
from engine.core.parsers import Content, OutputRules, Parser, ToolChoice
from engine.plugins.grammars.llguidance import LLGuidance
from engine.plugins.grammars.xgrammar import XGrammar
from engine.plugins.parsers.deepseek import DeepSeek
from engine.plugins.parsers.gpt_oss import GptOss
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.mistral import Mistral
from engine.plugins.parsers.tagged import ReasoningOptions, ReasoningTags, TaggedParsing
from engine.testing.parser_grammars import TOOLS, MarkedVocabulary
from engine.testing.parsers import Answer
from tests.plugins.parsers import examples

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCABULARY = MarkedVocabulary.of(MARKS, special=False)
THINKING, NOT_THINKING = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "city", "arguments": {"city": "Rome", "n": 1}}\n</tool_call>'
REQUIRED = ToolChoice("required")
STRICT = frozenset({"city"})


@pytest.fixture(scope="module")
def backend() -> LLGuidance:
    return LLGuidance(VOCABULARY.of_grammars(), LLGuidance.options_class(max_whitespace=1))


def hermes() -> Hermes:
    return Hermes(ReasoningOptions(), examples.HERMES)


def compiled(backend: LLGuidance, prompt: str = "", **rules: Any) -> CompiledGrammar:
    grammar = hermes().grammar(OutputRules(prompt=prompt, **({"tools": TOOLS} | rules)))
    assert grammar is not None
    return compile_with_tools(grammar, backend.compile)


def matches(grammar: CompiledGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, text.encode())) and matcher.accept(VOCABULARY.eos)


def said(text: str, prompt: str = "", *, whole: bool = False) -> Answer:
    parsing = hermes().begin(prompt, TOOLS)
    assert parsing is not None
    events = [event for piece in ([text] if whole else text) for event in parsing.feed(piece)]
    return Answer.of([*events, *parsing.end()])


def calls(answer: Answer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.calls]


def test_v28806_the_braces_of_a_tool_without_parameters_are_streamed(backend: LLGuidance) -> None:
    assert calls(said(NOW)) == [("now", "{}")]
    forced = compiled(backend, NOT_THINKING, choice=ToolChoice("required", "now"))
    assert matches(forced, NOW)
    assert not matches(forced, NOW.replace("{}", '{"a":1}'))


def test_v53638_a_stray_mark_adds_nothing_to_the_arguments() -> None:
    answer = said(NOW.replace("</tool_call>", "<tool_call>") + "\n" + NOW.partition("\n")[2])
    assert calls(answer) == [("now", "{}"), ("now", "{}")]


def test_v35687_a_call_within_reasoning_is_not_lost() -> None:
    answer = said(f"hmm {NOW} so", THINKING)
    assert (calls(answer), answer.reasoning) == ([("now", "{}")], "hmm so")


def test_v46149_a_forced_call_may_come_after_reasoning(backend: LLGuidance) -> None:
    forced = compiled(backend, THINKING, choice=REQUIRED)
    assert matches(forced, f"hmm\n</think>\n\n{NOW}\n{ROME}")
    assert matches(compiled(backend, "assistant\n", choice=REQUIRED), f"<think>\nhmm\n</think>\n\n{NOW}")
    assert not matches(forced, "hmm\n</think>\n\nsunny")
    assert not matches(forced, "hmm")


def test_v36138_the_masks_of_a_draft_begin_to_restrict_within_it(backend: LLGuidance) -> None:
    matcher = compiled(backend, THINKING, choice=REQUIRED).matcher()
    end = VOCABULARY.tokens.index(b"</think>")
    masks = np.empty((3, -(-len(VOCABULARY.tokens) // 32)), np.int32)
    assert matcher.fill_masks(masks, [ord("h"), end]) == 3
    assert matcher.fill_masks(masks, [end, ord("h")]) == 2
    bits = np.unpackbits(masks[1].view(np.uint8), bitorder="little")
    assert not bits[ord("h")]
    assert bits[VOCABULARY.tokens.index(b"<tool_call>")]


def test_v39138_without_reasoning_the_grammar_begins_immediately(backend: LLGuidance) -> None:
    content = Grammar.choice(["yes", "no"])
    for rules in ({"choice": REQUIRED}, {"content": content, "tools": []}, {"content": content}):
        off = compiled(backend, NOT_THINKING, **rules)
        assert not matches(off, f"<think>a</think>{NOW}")
        assert not matches(off, "<think>a</think>yes")
        assert matches(off, NOW if "choice" in rules else "yes")


def test_v34937_v45763_reasoning_that_the_prompt_begins_is_reasoning() -> None:
    answer = said("hmm</think>sunny", f"<tool_call>{{}}</tool_call><|im_end|>{THINKING}")
    assert (answer.reasoning, answer.content) == ("hmm", "sunny")


def test_v53745_strict_is_applied_next_to_reasoning_and_auto(backend: LLGuidance) -> None:
    auto = compiled(backend, THINKING, strict=STRICT)
    for before in ("hmm</think>", "hmm</think>\n\nLet me see. "):
        assert matches(auto, before + ROME)
        assert not matches(auto, before + ROME.replace("1", '"1"'))
        assert not matches(auto, before + ROME.replace('"city", ', '"town", '))
        assert matches(auto, f"{before}sunny")


def test_v57726_the_content_is_restricted_next_to_tools(backend: LLGuidance) -> None:
    both = compiled(backend, NOT_THINKING, content=Grammar.choice(["yes", "no"]))
    assert matches(both, "yes")
    assert matches(both, NOW)
    assert not matches(both, "Yes, sir.")
    assert not matches(both, f"yes{NOW}")


def test_reasoning_without_calls_comes_before_the_content(backend: LLGuidance) -> None:
    parser = ReasoningTags(ReasoningOptions(), examples.THINK)
    grammar = parser.grammar(OutputRules(prompt=THINKING, content=Grammar.choice(["yes", "no"])))
    assert grammar is not None
    assert matches(backend.compile(grammar), "hmm</think>\n\nyes")
    assert not matches(backend.compile(grammar), "yes")


def test_s37634_two_calls_in_one_piece_have_their_arguments() -> None:
    text = f"{NOW}\n{ROME}"
    assert calls(said(text, whole=True)) == calls(said(text)) == [("now", "{}"), ("city", '{"city": "Rome", "n": 1}')]


def test_s12203_a_required_call_is_one_that_is_parsed(backend: LLGuidance) -> None:
    assert not matches(compiled(backend, NOT_THINKING, choice=REQUIRED), '[{"name": "now", "parameters": {}}]')


def test_an_output_may_end_right_after_its_calls(backend: LLGuidance) -> None:
    for rules in ({"choice": REQUIRED}, {"strict": STRICT}, {"choice": ToolChoice("required", "now")}):
        matcher = compiled(backend, NOT_THINKING, **rules).matcher()
        assert all(map(matcher.accept, NOW.encode()))
        assert matcher.accept(VOCABULARY.eos)
    one = compiled(backend, NOT_THINKING, choice=REQUIRED, parallel_calls=False)
    assert matches(one, NOW)
    assert not matches(one, f"{NOW}\n{NOW}")


def test_the_mark_that_ends_a_call_of_gpt_oss_ends_the_output() -> None:
    marks = GptOss.special_tokens
    tokens = (*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in marks))
    ids = {mark: 256 + at for at, mark in enumerate(marks)}
    ends = frozenset({ids["<|call|>"], ids["<|return|>"]})
    vocabulary = GrammarVocabulary(
        tokens=tokens, special_tokens=frozenset(ids.values()), eos_tokens=ends, encode=lambda text: list(text.encode())
    )
    grammar = GptOss(None, examples.GPT_OSS).grammar(OutputRules(prompt="", tools=TOOLS, choice=REQUIRED))
    assert grammar is not None
    for backend in (LLGuidance, XGrammar):
        made = backend(vocabulary, backend.options_class())
        matcher = compile_with_tools(grammar, made.compile).matcher()
        call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
        for part in re.split(r"(<\|\w+\|>)", call):
            for token in [ids[part]] if part in ids else part.encode():
                assert not matcher.accept(ids["<|call|>"])
                assert matcher.accept(token), (part, token)
        assert matcher.accept(ids["<|call|>"])
        assert matcher.is_terminated


def test_a_refusal_is_that_of_the_schema_alone_when_there_is_reasoning(backend: LLGuidance) -> None:
    for content, kind in ((Grammar.json_schema({"uniqueItems": True}), "JSON schema"), (Grammar.regex("("), "regular")):
        with pytest.raises(InvalidRequestError, match=f"^llguidance refuses the {kind}") as caught:
            compiled(backend, THINKING, content=content)
        assert "think" not in str(caught.value)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (GptOss(None, examples.GPT_OSS), "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"),
        (Mistral(ReasoningOptions(), examples.MISTRAL), "[TOOL_CALLS]now[ARGS] "),
        (
            DeepSeek(ReasoningOptions(), examples.DEEPSEEK),
            examples.deepseek("<|tool calls begin|><|tool call begin|>now<|tool sep|>"),
        ),
    ],
    ids=["gpt_oss", "mistral", "deepseek"],
)
def test_a_call_without_arguments_is_complete_only_if_the_model_ended_the_output(
    parser: Parser[Any], text: str
) -> None:
    for by_model, wanted in ((True, [("now", "{}")]), (False, [])):
        for pieces in ([text], list(text)):
            parsing = parser.begin("", TOOLS)
            assert parsing is not None
            events = [event for piece in pieces for event in parsing.feed(piece)]
            answer = Answer.of([*events, *(parsing.end_by_model() if by_model else parsing.end())])
            assert calls(answer) == wanted
            assert bool(answer.content) is not by_model


def test_white_space_that_may_end_a_text_is_held_in_pieces() -> None:
    """Joined with each token, it took 60 us per token after 400,000 spaces."""
    parsing = hermes().begin("", TOOLS)
    assert isinstance(parsing, TaggedParsing)
    assert [parsing.feed(piece) for piece in ("a", *["  "] * 3)] == [[Content("a")], [], [], []]
    assert parsing._held == ["  "] * 3
    assert parsing.feed(" b ") == [Content(" " * 7 + "b")]
    assert parsing.end() == [Content(" ")]
