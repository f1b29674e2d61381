"""Conformance suite for parsers that describe their format: what the grammar lets pass, the parser reads."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import define, evolve

from engine.core.grammars import (
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarMatcher,
    GrammarVocabulary,
    compile_with_tools,
)
from engine.core.parsers import Content, OutputRules, Parser, Templates, ToolChoice
from engine.core.plugin_host import load_plugins
from engine.testing.parsers import Answer

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
"""A schema that grammar backends refuse."""
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "odd", "parameters": ODD}},
]
OK = {"ok": {"type": "boolean"}}
ANSWER = {"type": "object", "properties": OK, "required": ["ok"], "additionalProperties": False}
STRICT = frozenset({"city"})
RULES: dict[str, OutputRules] = {
    "required": OutputRules(prompt="", tools=TOOLS, choice=ToolChoice("required")),
    "required, one call": OutputRules(prompt="", tools=TOOLS, choice=ToolChoice("required"), parallel_calls=False),
    "named": OutputRules(prompt="", tools=TOOLS, choice=ToolChoice("required", "city")),
    "strict": OutputRules(prompt="", tools=TOOLS, strict=STRICT),
    "strict, one call": OutputRules(prompt="", tools=TOOLS, strict=STRICT, parallel_calls=False),
    "allowed": OutputRules(prompt="", tools=TOOLS, choice=ToolChoice(allowed=frozenset({"now", "odd"}))),
    "allowed, required": OutputRules(
        prompt="", tools=TOOLS, choice=ToolChoice("required", allowed=frozenset({"now", "city"}))
    ),
    "content": OutputRules(prompt="", content=Grammar.json_schema(ANSWER)),
    "content or calls": OutputRules(prompt="", tools=TOOLS, content=Grammar.json_schema(ANSWER)),
    "choice or calls": OutputRules(prompt="", tools=TOOLS, strict=STRICT, content=Grammar.choice(["yes", "no"])),
    "content, no call": OutputRules(
        prompt="", tools=TOOLS, choice=ToolChoice("none"), content=Grammar.choice(["yes", "no"])
    ),
}
"""Rules by name; the suite fills in their prompts."""
LONG = 60
"""Tokens after which an output heads for its end."""
MAX_TOKENS = 600
CLOSERS = ("}", "]", '"', '"', ":", "0")
"""Texts that lead out of JSON."""
PIECES = ('", "', '": ', "{}", "weather", "Rome", "\n", "true", "city")


@define
class MarkedVocabulary:
    """Tokens for bytes, a few texts, the marks of a format and the end."""

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    eos: int

    @classmethod
    def of(cls, marks: Sequence[str], *, special: bool) -> MarkedVocabulary:
        """marks: texts with a token each; special: whether these are special tokens, next to others that spell them."""
        texts = (*PIECES, *marks, *marks) if special else (*PIECES, *marks)
        tokens = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in texts), b"<|eos|>")
        eos = len(tokens) - 1
        return cls(tokens, frozenset(range(eos - len(marks), eos) if special else ()) | {eos}, eos)

    def of_grammars(self) -> GrammarVocabulary:
        """The vocabulary as grammar backends take it."""
        return GrammarVocabulary(
            tokens=self.tokens,
            special_tokens=self.special,
            eos_tokens=frozenset({self.eos}),
            encode=lambda text: list(text.encode()),
        )


class ParserGrammarConformance:
    """Derive a class named Test... from this class and set `parser`, `templates` and, if there are any, `prompts`."""

    parser: ClassVar[type[Parser[Any]]]
    options: ClassVar[Any] = None
    """Options passed to the parser; None: the defaults of its options_class."""
    templates: ClassVar[Templates] = Templates()
    """The templates of a model that writes this format."""
    marks: ClassVar[tuple[str, ...] | None] = None
    """Texts of the format for which a vocabulary has tokens; None: the parser's special tokens."""
    prompts: ClassVar[tuple[str, ...]] = ("",)
    """Ends of prompts, such as those with and without the beginning of reasoning."""
    backends: ClassVar[tuple[str, ...]] = ()
    """Names of grammar backends to test with. Only the first is tested with all prompts, and with marks that are plain
    text. Empty: the one that `auto` takes."""
    marks_are_special: ClassVar[bool] = False
    """Whether marks amid the arguments of a call break the format; special tokens cannot stand there."""
    max_calls: ClassVar[int | None] = None
    """Maximum calls of an output in this format; None: any number."""

    def make(self) -> Parser[Any]:
        """A fresh parser."""
        options = self.options
        if options is None and self.parser.options_class is not None:
            options = self.parser.options_class()
        return self.parser(options, self.templates)

    def test_it_describes_its_format(self) -> None:
        """describes_format is set, and without rules there is no grammar."""
        assert self.parser.describes_format
        for prompt in self.prompts:
            assert self.make().grammar(OutputRules(prompt=prompt)) is None
            assert self.make().grammar(OutputRules(prompt=prompt, tools=TOOLS)) is None

    @pytest.mark.parametrize("name", RULES)
    @pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
    def test_what_the_grammar_lets_pass_is_read(self, name: str, special: bool) -> None:
        """Random outputs that match the grammar of some rules say what the rules allow, however they are cut."""
        parser, rules = self.make(), RULES[name]
        if not parser.reads_calls and rules.tools:
            pytest.skip("the parser reads no calls")
        if self.marks_are_special and not special:
            pytest.skip("the marks are special tokens")
        marks = self.marks if self.marks is not None else (self.parser.special_tokens or ())
        backends = self.backends or (usual_backend(),)
        for backend in backends if special else backends[:1]:
            vocabulary, compiler = _prepared(backend, tuple(marks), special)
            for prompt in self.prompts if backend == backends[0] else self.prompts[:1]:
                grammar = parser.grammar(evolve(rules, prompt=prompt))
                assert grammar is not None
                self.check(evolve(rules, prompt=prompt), compile_with_tools(grammar, compiler.compile), vocabulary)

    def check(self, rules: OutputRules, compiled: CompiledGrammar, vocabulary: MarkedVocabulary) -> None:
        """Random outputs of a grammar."""
        pick = random.Random(str(rules.choice))
        for _ in range(2):
            text = walk(compiled.matcher(), vocabulary, pick)
            cuts = sorted(pick.choices(range(len(text) + 1), k=pick.randint(0, 5)))
            answer = self.read(rules, text, cuts)
            where = f"{text!r} after {rules.prompt!r}"
            assert answer == self.read(rules, text, range(len(text))), f"cuts make a difference: {where}"
            self.check_answer(rules, answer, where)

    def read(self, rules: OutputRules, text: str, cuts: Sequence[int]) -> Answer:
        """What an output says, fed to the parser in pieces."""
        tools = rules.tools if rules.choice.mode != "none" else ()
        parsing = self.make().begin(rules.prompt, tools)
        if parsing is None:
            return Answer.of([Content(text)])
        events = [
            event
            for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True)
            for event in parsing.feed(text[begin:end])
        ]
        return Answer.of([*events, *parsing.end()])

    def check_answer(self, rules: OutputRules, answer: Answer, where: str) -> None:
        """Whether an answer follows the rules."""
        assert not answer.malformed, f"{answer.malformed}: {where}"
        names = [call.name for call in answer.calls]
        assert all(map(rules.choice.allows, names)), f"a call of another tool: {where}"
        assert all(call.complete for call in answer.calls), f"a call is not complete: {where}"
        limit = self.max_calls if rules.several_calls else 1
        assert limit is None or len(names) <= limit, f"{len(names)} calls, not at most {limit}: {where}"
        if rules.choice.forced:
            assert names, f"no call: {where}"
            assert not answer.content, f"content next to a forced call: {where}"
        for call in answer.calls:
            arguments = json.loads(call.arguments)
            assert isinstance(arguments, dict), f"arguments are not an object: {where}"
            if call.name == "city" and (rules.choice.forced or "city" in rules.strict):
                assert set(arguments) == {"city", "n"}, f"arguments break the schema: {where}"
                assert arguments["city"] in ("Rome", "Bern"), f"arguments break the schema: {where}"
                assert type(arguments["n"]) is int, f"arguments break the schema: {where}"
                assert 0 <= arguments["n"] <= 99, f"arguments break the schema: {where}"
            if call.name == "now" and rules.choice.forced:
                assert arguments == {}, f"arguments of a tool that takes none: {where}"
        if rules.content is not None and not names:
            said = json.loads(answer.content) if rules.content.kind == "json_schema" else answer.content
            assert said in ("yes", "no") if isinstance(said, str) else type(said["ok"]) is bool, (
                f"content breaks its grammar: {where}"
            )
        if rules.content is not None and names:
            assert not answer.content, f"content next to calls: {where}"


@cache
def usual_backend() -> str:
    """The name of the grammar backend that `auto` takes."""
    for one in load_plugins().grammars.candidates():
        if one.load().refuses() is None:
            return one.name
    pytest.skip("no grammar backend is installed")


@cache
def _prepared(name: str, marks: tuple[str, ...], special: bool) -> tuple[MarkedVocabulary, GrammarBackend[Any]]:
    """A vocabulary with these marks, and a grammar backend for it."""
    vocabulary = MarkedVocabulary.of(marks, special=special)
    backend = load_plugins().grammars.get(name).load()
    options = None if backend.options_class is None else backend.options_class()
    return vocabulary, backend(vocabulary.of_grammars(), options)


def walk(matcher: GrammarMatcher, vocabulary: MarkedVocabulary, pick: random.Random) -> str:
    """A random output that has ended. It heads for its end after LONG tokens."""
    tokens, data = vocabulary.tokens, b""
    mask = np.empty(-(-len(tokens) // 32), np.int32)
    closers = [tokens.index(text.encode()) for text in CLOSERS]
    for count in range(MAX_TOKENS):
        matcher.fill_mask(mask)
        may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert may, f"nothing may follow {data!r}"
        longer = [token for token in may if 256 <= token < vocabulary.eos]
        if vocabulary.eos in may and (count > LONG or pick.random() < 0.3):
            token = vocabulary.eos
        elif count > LONG and (ending := [token for token in (*closers, *longer) if token in may]):
            token = pick.choice(ending)
        else:
            token = pick.choice(longer if longer and pick.random() < 0.4 else may)
        assert matcher.accept(token), f"{tokens[token]!r} is in the mask, but not accepted"
        if token == vocabulary.eos:
            return data.decode("utf-8", "replace")
        data += tokens[token]
    raise AssertionError(f"an output does not end: {data!r}")
