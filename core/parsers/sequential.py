"""Parsers written as generators that read an output front to back and wait where more text is needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from engine.core.parsers.base import Event, Parsing
from engine.core.text.partial_match import partial_match

T = TypeVar("T")

Steps = Generator[Event | None, None, T]
"""A part of a parser: yields events, and None where it needs more text; returns T."""


class Source:
    """The text of an output that has come and that the parser has not taken yet.

    Positions count from the first character not taken, so they stay valid while the parser waits for more text.
    """

    def __init__(self) -> None:
        self.unread = ""
        self.ended = False
        """Whether no more text will come."""
        self.ended_by_model = False
        """Whether the model itself has ended the output."""

    def append(self, text: str) -> None:
        """Add text that has come."""
        self.unread += text

    def take(self, count: int) -> str:
        """Remove that many characters from the beginning; returns them."""
        taken, self.unread = self.unread[:count], self.unread[count:]
        return taken

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end of the output."""
        size = len(self.unread)
        while len(self.unread) == size and not self.ended:
            yield None
        return len(self.unread) > size

    def character(self, at: int = 0) -> Steps[str]:
        """The character at a position; empty at the end of the output."""
        while at >= len(self.unread):
            if not (yield from self.more()):
                return ""
        return self.unread[at]

    def starts_with(self, mark: str, at: int = 0) -> Steps[bool]:
        """Whether the text goes on with `mark`; waits for more text only while that is undecided."""
        while True:
            here = self.unread[at : at + len(mark)]
            if here == mark or not mark.startswith(here):
                return here == mark
            if not (yield from self.more()):
                return False

    def starts_with_one(self, marks: Sequence[str], at: int = 0) -> Steps[str | None]:
        """The first of `marks` that the text continues with, or None."""
        for mark in marks:
            if (yield from self.starts_with(mark, at)):
                return mark
        return None

    def skip_space(self, at: int = 0) -> Steps[int]:
        """The position of the next character that is not white space."""
        while (yield from self.character(at)).isspace():
            at += 1
        return at

    def find(self, marks: Sequence[str], limit: int) -> Steps[tuple[int, str] | None]:
        """The position of the first of `marks` and that mark; None if none begins in the next `limit` characters.

        No mark may contain another.
        """
        while (found := _first(self.unread, marks)) is None:
            if len(self.unread) > limit + max(map(len, marks)) or not (yield from self.more()):
                return None
        return found if found[0] <= limit else None

    def text_until(self, marks: Sequence[str], emit: Callable[[str], Sequence[Event]]) -> Steps[str | None]:
        """Read up to the first of `marks` and past it; returns the mark, or None at the end of the output.

        emit: makes events of text that is no part of a mark. No mark may contain another.
        """
        while True:
            found = _first(self.unread, marks)
            if found is not None:
                yield from emit(self.take(found[0]))
                return self.take(len(found[1]))
            yield from emit(self.take(partial_match(self.unread, marks)))
            if not (yield from self.more()):
                yield from emit(self.take(len(self.unread)))
                return None


class SequentialParsing(Parsing):
    """A parsing whose subclass reads `self.source` in the generator `read`.

    The generator sees no cuts: it asks for what it needs and waits. So it gives the same events however the text comes,
    as long as it asks for nothing but the source's methods.
    """

    def __init__(self) -> None:
        self.source = Source()
        self._steps: Steps[None] | None = None

    @abstractmethod
    def read(self) -> Steps[None]:
        """Read the whole output."""

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        self.source.append(text)
        return self._run()

    def end(self) -> list[Event]:
        self.source.ended = True
        return self._run()

    def end_by_model(self) -> list[Event]:
        self.source.ended_by_model = True
        return self.end()

    def _run(self) -> list[Event]:
        """Continue until more text is needed."""
        if self._steps is None:
            self._steps = self.read()
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            events.append(event)
        return events


def _first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The first of `marks` in a text, and its position."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found) if found else None
