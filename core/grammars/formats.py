"""Formats of outputs as trees: texts, special tokens, free text, and parts with grammars of their own."""

from __future__ import annotations

from typing import Any, Final

from attrs import evolve, frozen

from engine.core.grammars.grammar import Grammar, refusal


@frozen
class Text:
    """A text, without special tokens. Not empty."""

    value: str


@frozen
class Token:
    """A special token."""

    token: int


@frozen
class Part:
    """A text that matches a grammar of the kind json_schema, regex or lark."""

    grammar: Grammar


@frozen
class FreeText:
    """Any text that contains no special tokens and none of `excludes`. It ends where what follows begins."""

    excludes: tuple[str, ...] = ()


@frozen
class Sequence:
    """Formats one after the other; of none, the empty text."""

    elements: tuple[Format, ...] = ()


@frozen
class Either:
    """One of several formats."""

    elements: tuple[Format, ...]


@frozen
class Repeat:
    """A format, repeated."""

    content: Format
    low: int
    high: int | None


@frozen
class Dispatch:
    """Free text up to a trigger, then what the rule of that trigger says; all of it again and again if `loop`.

    The free text contains no trigger otherwise, and may end without one.
    """

    rules: tuple[tuple[Text | Token, Format], ...]
    """Trigger, what follows it."""
    loop: bool
    excludes: tuple[str, ...] = ()

    def expanded(self) -> Format:
        """The same in terms of other formats."""
        triggers = tuple(start.value for start, _ in self.rules if isinstance(start, Text))
        free = FreeText((*self.excludes, *triggers))
        tagged = Either(tuple(Sequence((free, start, rest)) for start, rest in self.rules))
        return Sequence((Repeat(tagged, 0, None), free)) if self.loop else Either((tagged, free))


Format = Text | Token | Part | FreeText | Sequence | Either | Repeat | Dispatch
_ANY: Final = object()
"""An unknown beginning."""
_Starts = frozenset[Any]
"""What a format may begin with: Text, Token and _ANY; empty: nothing follows."""


def starts(made: Format) -> tuple[_Starts, bool]:
    """What a format may begin with, and whether it may be empty."""
    if isinstance(made, (Text, Token)):
        return frozenset({made}), False
    if isinstance(made, (Part, FreeText, Dispatch)):
        return frozenset({_ANY}), not isinstance(made, Part)
    if isinstance(made, Repeat):
        found, empty = starts(made.content)
        return found if made.high != 0 else frozenset(), empty or made.low == 0
    if isinstance(made, Either):
        each = [starts(one) for one in made.elements]
        return frozenset().union(*(found for found, _ in each)), any(empty for _, empty in each)
    total: _Starts = frozenset()
    for one in made.elements:
        found, empty = starts(one)
        total |= found
        if not empty:
            return total, False
    return total, True


def is_open(made: Format) -> bool:
    """Whether a format may end with free text, so that what follows must say where the text ends."""
    if isinstance(made, (FreeText, Dispatch)):
        return True
    if isinstance(made, Repeat):
        return made.high != 0 and is_open(made.content)
    if isinstance(made, Either):
        return any(map(is_open, made.elements))
    if isinstance(made, Sequence):
        for one in reversed(made.elements):
            if is_open(one):
                return True
            if not starts(one)[1]:
                return False
    return False


def with_ends(made: Format, follow: _Starts) -> Format:
    """The format with all free text ended by the texts that may follow it. follow: what may follow the format."""
    if isinstance(made, (FreeText, Dispatch)):
        if _ANY in follow:
            raise refusal(
                "free text (any_text, triggered_tags) in a structural tag must be the last, or be followed by a text "
                "or a special token that ends it, such as the end of its tag"
            )
        excludes = tuple(dict.fromkeys((*made.excludes, *sorted(one.value for one in follow if isinstance(one, Text)))))
        made = evolve(made, excludes=excludes)
        if isinstance(made, Dispatch):
            for start, _ in made.rules:
                if isinstance(start, Text) and any(one in start.value for one in excludes):
                    raise refusal(f"the trigger {start.value[:100]!r} of a structural tag contains an excluded text")
            after = frozenset({_ANY}) if made.loop else follow
            return evolve(made, rules=tuple((start, with_ends(rest, after)) for start, rest in made.rules))
        return made
    if isinstance(made, Either):
        return Either(tuple(with_ends(one, follow) for one in made.elements))
    if isinstance(made, Repeat):
        if made.high not in (0, 1) and is_open(made.content):
            raise refusal("free text may not end what a structural tag repeats; put the text into a tag with an end")
        again = starts(made.content)[0] if made.high != 1 else frozenset()
        return evolve(made, content=with_ends(made.content, follow | again))
    if isinstance(made, Sequence):
        elements: list[Format] = []
        for one in reversed(made.elements):
            elements.append(with_ends(one, follow))
            found, empty = starts(one)
            follow = found | follow if empty else found
        return Sequence(tuple(reversed(elements)))
    return made
