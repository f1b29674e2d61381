"""Structural tags in llguidance's variant of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).

The library's lexer takes the longest match, so a free text that a text ends is a lazy lexeme together with that text,
and neighbours that make up a regular language are one lexeme.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from engine.core.grammars import (
    Dispatch,
    Either,
    Format,
    FreeText,
    Grammar,
    Part,
    Repeat,
    Sequence,
    Text,
    Token,
    is_open,
)

_IN_PATTERN = re.compile(r"\\(?s:.)|[/\n]")
"""An escape, and what ends a pattern in Lark."""

_NO_FORCING = '%llguidance {"no_forcing": true}'
"""Allows every tokenization of a text that must come, as elsewhere; else masks allow the tokenizer's own alone."""


def escaped(text: str) -> str:
    """A regular expression that matches a text alone."""
    return "".join(one if one.isascii() and one.isalnum() else rf"\x{{{ord(one):x}}}" for one in text)


class LarkWriter:
    """Writes one format as a grammar."""

    def __init__(self, lark_of_part: Callable[[Grammar], str]) -> None:
        """lark_of_part: a JSON schema as the value of %json; another grammar as Lark."""
        self._lark_of_part = lark_of_part
        self._rules: list[str] = []
        self._names: dict[object, str] = {}
        self._grammars: list[dict[str, str]] = []

    def write(self, made: Format) -> str:
        """The grammar in the library's own form."""
        self._rules.append(f"start: {self._sequence((made,))}")
        main = {"lark_grammar": "\n".join([_NO_FORCING, *self._rules])}
        return json.dumps({"grammars": [main, *self._grammars]})

    def _sequence(self, elements: tuple[Format, ...]) -> str:
        """Formats one after the other, as the body of a rule."""
        if not elements:
            return '""'
        regular, count = self._regular_run(elements)
        if count:
            return f"{self._named('T', '', regular)} {self._sequence(elements[count:])}"
        first, rest = elements[0], elements[1:]
        if isinstance(first, Sequence):
            return self._sequence((*first.elements, *rest))
        if isinstance(first, Dispatch):
            return self._sequence((first.expanded(), *rest))
        if isinstance(first, FreeText):
            return self._free(first, rest)
        if isinstance(first, Either):
            if rest and is_open(first):
                return self._either([(one, *rest) for one in first.elements])
            made = self._either([(one,) for one in first.elements])
        elif isinstance(first, Repeat):
            if rest and is_open(first):  # at most once, or core refuses it
                return self._either([(first.content, *rest), *([rest] if first.low == 0 else [])])
            low, high = first.low, "" if first.high is None else first.high
            made = f"({self._sequence((first.content,))}){{{low},{high}}}"
        elif isinstance(first, Part):
            made = self._part(first.grammar)
        else:
            assert isinstance(first, Token)
            made = f"<[{first.token}]>"
        return f"{made} {self._sequence(rest)}"

    def _either(self, ways: list[tuple[Format, ...]]) -> str:
        return f"({' | '.join(map(self._rule, ways))})"

    def _rule(self, elements: tuple[Format, ...]) -> str:
        """The name of a rule for formats one after the other; the same for the same formats."""
        if elements not in self._names:
            self._names[elements] = name = f"r{len(self._names)}"
            self._rules.append(f"{name}: {self._sequence(elements)}")
        return self._names[elements]

    def _free(self, free: FreeText, rest: tuple[Format, ...]) -> str:
        """Free text, and what ends it."""
        text = self._free_text(free.excludes)
        if not rest:
            return text
        first, after = rest[0], rest[1:]
        if isinstance(first, Text):
            return f"{self._named('l', '[lazy]', f'{text} /{escaped(first.value)}/')} {self._sequence(after)}"
        if isinstance(first, Sequence):
            return self._free(free, (*first.elements, *after))
        if isinstance(first, Either):
            return self._either([(free, one, *after) for one in first.elements])
        if isinstance(first, Repeat):
            again = Repeat(first.content, max(first.low - 1, 0), None if first.high is None else max(first.high - 1, 0))
            once = [] if first.high == 0 else [(free, first.content, *(() if again.high == 0 else (again,)), *after)]
            return self._either([*once, *([(free, *after)] if first.low == 0 else [])])
        assert isinstance(first, Token)
        return f"{text} {self._sequence(rest)}"

    def _free_text(self, excludes: tuple[str, ...]) -> str:
        without = f" & ~/(?s:.*)({'|'.join(map(escaped, excludes))})(?s:.*)/" if excludes else ""
        return self._named("T", "", f"/(?s:.*)/{without}")

    def _part(self, grammar: Grammar) -> str:
        made = self._lark_of_part(grammar)
        if grammar.kind == "json_schema":
            return self._named("j", "", f"%json {made}")
        if grammar not in self._names:
            self._names[grammar] = name = f"g{len(self._names)}"
            self._grammars.append({"name": name, "lark_grammar": made})
        return f"@{self._names[grammar]}"

    def _named(self, prefix: str, options: str, body: str) -> str:
        """The name of a rule, or by an upper-case prefix a terminal; the same for the same body."""
        key = prefix, body
        if key not in self._names:
            self._names[key] = name = f"{prefix}{len(self._names)}"
            self._rules.append(f"{name}{options}: {body}")
        return self._names[key]

    def _regular_run(self, elements: tuple[Format, ...]) -> tuple[str, int]:
        """The longest beginning that is a regular expression, and of how many formats it is."""
        found: list[str] = []
        for one in elements:
            made = self._regular(one)
            if made is None:
                break
            found.append(made)
        return " ".join(one for one in found if one) or '""', len(found)

    def _regular(self, made: Format) -> str | None:
        """A format as the body of a terminal; None if it is no regular expression."""
        if isinstance(made, Text):
            return f"/{escaped(made.value)}/"
        if isinstance(made, Part) and made.grammar.kind == "regex":
            return f"/{_IN_PATTERN.sub(_shielded, made.grammar.source)}/"
        if isinstance(made, (Sequence, Either)):
            inside = [self._regular(one) for one in made.elements]
            if any(one is None for one in inside):
                return None
            joint = " " if isinstance(made, Sequence) else " | "
            return f"({joint.join(one or '' for one in inside)})" if inside else '""'
        if isinstance(made, Repeat):
            content = self._regular(made.content)
            return content and f"({content}){{{made.low},{'' if made.high is None else made.high}}}"
        return None


def _shielded(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])
