"""Reads structural tags for one vocabulary: names become special tokens, and free text gets its ends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence as ListLike
from reprlib import repr as shortened
from typing import Any

from attrs import evolve

from engine.core.grammars.base import GrammarVocabulary
from engine.core.grammars.formats import (
    Dispatch,
    Either,
    Format,
    FreeText,
    Part,
    Repeat,
    Sequence,
    Text,
    Token,
    with_ends,
)
from engine.core.grammars.grammar import refusal
from engine.core.grammars.structural_tag_forms import PARTS


class FormatResolver:
    """Makes trees of formats for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._eos_tokens = vocabulary.eos_tokens
        self._name_of = {
            token: vocabulary.tokens[token].decode("utf-8", "replace")
            for token in sorted(vocabulary.special_tokens, reverse=True)
            if vocabulary.tokens[token]
        }
        self._special = {name: token for token, name in self._name_of.items()}
        """Name -> token: of several with one name, the first."""
        self._ids = vocabulary.special_tokens
        names = sorted(self._special, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "((?!))")

    def resolve(self, source: str) -> Format:
        """The tree of a structural tag. Raises InvalidRequestError for what cannot be enforced."""
        made = self._made(json.loads(source)["format"])
        return with_ends(self._without_last_eos(made, last=True), frozenset())

    def _made(self, given: Mapping[str, Any]) -> Format:
        kind = given["type"]
        if kind in PARTS:
            return Part(PARTS[kind](given))
        if kind == "const_string":
            return self._text(given["value"])
        if kind == "token":
            return self._token(given["token"])
        if kind == "any_text":
            return FreeText(self._excluded(given.get("excludes", ())))
        if kind in ("sequence", "or"):
            elements = tuple(map(self._made, given["elements"]))
            return Sequence(elements) if kind == "sequence" else Either(elements)
        if kind == "tag":
            return self._tag(given)
        if kind in ("triggered_tags", "token_triggered_tags"):
            return self._triggered(given)
        if kind == "tags_with_separator":
            return self._separated(given)
        low, high = {"optional": (0, 1), "star": (0, None), "plus": (1, None)}.get(kind) or (
            given["min"],
            None if given["max"] == -1 else given["max"],
        )
        return Repeat(self._made(given["content"]), low, high)

    def _text(self, value: str) -> Format:
        """A text in which the names of special tokens stand for the tokens."""
        made = tuple(
            Token(self._special[one]) if one in self._special else Text(one) for one in self._names.split(value) if one
        )
        return made[0] if len(made) == 1 else Sequence(made)

    def _token(self, token: str | int) -> Format:
        if isinstance(token, str):
            return self._text(token)
        if token not in self._ids:
            raise refusal(f"the token {token} in the structural tag is not a special token")
        return Token(token)

    def _mark(self, mark: Any) -> Format:
        """The begin or end of a tag."""
        if isinstance(mark, list):
            return Either(tuple(map(self._mark, mark)))
        return self._text(mark) if isinstance(mark, str) else self._token(mark["token"])

    def _excluded(self, strings: ListLike[Any]) -> tuple[str, ...]:
        """Strings that free text may not contain. It contains no special tokens, but may spell their names."""
        return tuple(self._name(one) if isinstance(one, int) else one for one in strings)

    def _name(self, token: int) -> str:
        """The name of a special token. Raises InvalidRequestError for another token, and for one without a name."""
        self._token(token)
        if token not in self._name_of:
            raise refusal(f"the special token {token} has no text, so it can be neither a trigger nor excluded")
        return self._name_of[token]

    def _tag(self, given: Mapping[str, Any]) -> Sequence:
        return Sequence((self._mark(given["begin"]), self._made(given["content"]), self._mark(given["end"])))

    def _triggered(self, given: Mapping[str, Any]) -> Format:
        by_token = given["type"] == "token_triggered_tags"
        tags = tuple(map(self._tag, given["tags"]))
        first, once = given.get("at_least_one", False), given.get("stop_after_first", False)
        if first and once:
            return Either(tags)
        rules: dict[Text | Token, list[Format]] = {}
        triggers = [_flat(self._token(one)) for one in given["trigger_tokens" if by_token else "triggers"]]
        for trigger in triggers:
            if not trigger or (isinstance(trigger[0], Text) and len(trigger) > 1):
                raise refusal("a trigger must be a text that is not empty, or begin with a special token")
            rules.setdefault(trigger[0], [])  # type: ignore[arg-type]
        for tag in tags:
            begin = _flat(tag.elements[0])
            fitting = [trigger for trigger in triggers if _begins(begin, trigger)]
            if len(fitting) != 1:
                what = "with none" if not fitting else "with several"
                raise refusal(f"the begin of a tag must begin with one trigger; {_shown(begin)} begins {what}")
            start = fitting[0][0]
            assert isinstance(start, (Text, Token))
            rest = _after(begin, start)
            rules[start].append(Sequence((*rest, *tag.elements[1:])))
        if empty := [start for start, tagged in rules.items() if not tagged]:
            raise refusal(f"no tag begins with the trigger {_shown(empty[:1])}")
        starts = [start.value for start in rules if isinstance(start, Text)]
        for one in starts:
            if any(one in other for other in starts if other != one):
                raise refusal(f"the trigger {one!r} is a part of another trigger, which could never come")
        excludes = self._excluded(given.get("exclude_tokens" if by_token else "excludes", ()))
        spelled = (self._name(start.token) for start in rules if isinstance(start, Token))
        excludes = tuple(dict.fromkeys((*excludes, *spelled)))
        made = Dispatch(tuple((start, Either(tuple(rest))) for start, rest in rules.items()), not once, excludes)
        return Sequence((Either(tags), made)) if first else made

    def _separated(self, given: Mapping[str, Any]) -> Format:
        tag = Either(tuple(map(self._tag, given["tags"])))
        more = Repeat(Sequence((self._text(given["separator"]), tag)), 0, None)
        tags: Format = tag if given.get("stop_after_first") else Sequence((tag, more))
        return tags if given.get("at_least_one") else Repeat(tags, 0, 1)

    def _without_last_eos(self, made: Format, last: bool) -> Format:
        """The format without the end-of-sequence tokens at its ends, where any such token ends the output.

        Raises InvalidRequestError for one that something may follow.
        """
        if isinstance(made, Token) and made.token in self._eos_tokens:
            if not last:
                raise refusal(
                    f"the token {self._name_of.get(made.token, made.token)} ends an output of this model, so nothing"
                    " may follow it"
                )
            return Sequence()
        if isinstance(made, Sequence):
            elements: list[Format] = []
            for one in reversed(made.elements):
                elements.append(self._without_last_eos(one, last))
                last = last and one == Sequence()
            return Sequence(tuple(reversed(elements)))
        if isinstance(made, Either):
            return Either(tuple(self._without_last_eos(one, last) for one in made.elements))
        if isinstance(made, Repeat):
            return evolve(made, content=self._without_last_eos(made.content, last and made.high == 1))
        if isinstance(made, Dispatch):
            if any(isinstance(start, Token) and start.token in self._eos_tokens for start, _ in made.rules):
                raise refusal("a trigger is a token that ends an output of this model")
            return evolve(
                made,
                rules=tuple(
                    (start, self._without_last_eos(rest, last and not made.loop)) for start, rest in made.rules
                ),
            )
        return made


def _flat(made: Format) -> tuple[Format, ...]:
    return made.elements if isinstance(made, Sequence) else (made,)


def _begins(begin: tuple[Format, ...], trigger: tuple[Format, ...]) -> bool:
    """Whether the begin of a tag begins with a trigger."""
    *whole, last = trigger
    if list(begin[: len(whole)]) != whole or len(begin) < len(trigger):
        return False
    other = begin[len(whole)]
    return other == last or (isinstance(last, Text) and isinstance(other, Text) and other.value.startswith(last.value))


def _after(begin: tuple[Format, ...], start: Text | Token) -> tuple[Format, ...]:
    """What remains of a begin after its start."""
    first = begin[0]
    if isinstance(start, Text) and isinstance(first, Text) and first != start:
        return (Text(first.value[len(start.value) :]), *begin[1:])
    return begin[1:]


def _shown(made: ListLike[Format]) -> str:
    return shortened("".join(one.value if isinstance(one, Text) else f"{one}" for one in made))
