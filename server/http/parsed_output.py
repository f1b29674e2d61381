"""The outputs of a chat as its parser reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from attrs import evolve, frozen

from engine.core.parsers import CallEnd, Event, Malformed, Parsing
from engine.server.http.parser_faults import raise_parser_fault

EVENTS: tuple[type, ...] = get_args(Event)
"""The classes of events."""


@frozen(kw_only=True)
class OutputFormat:
    """How the outputs of a request are parsed."""

    begin: Callable[[], Parsing | None]
    """Starts to parse the output of a choice; None: all of its text is content."""
    keep: frozenset[int] = frozenset()
    """Special tokens that stay in the text, for the parser."""
    one_call: bool = False
    """Whether the output ends with its first tool call."""
    owner: str
    """How errors name the parser's plugin."""


class ParsedOutput:
    """The output of one choice."""

    def __init__(self, parsing: Parsing, *, one_call: bool, owner: str) -> None:
        """owner: how errors name the parser's plugin."""
        self._parsing = parsing
        self._owner = owner
        self._one_call = one_call
        self.reasoning_tokens = 0
        """Tokens so far after which the text was within reasoning."""
        self.ended = False
        """Whether there are no more events: after the end, or after the only call that is wanted."""

    def feed(self, text: str, tokens: int) -> list[Event]:
        """The events of the text of that many further tokens. Raises ApiError if the parser fails."""
        if self.ended:
            return []
        try:
            events = self._up_to_call(self._parsing.feed(text) if text else ())
            if self._parsing.reasoning:
                self.reasoning_tokens += tokens
        except BaseException as error:
            raise_parser_fault(self._owner, "feed", error)
        return events

    def end(self, *, by_model: bool = False) -> list[Event]:
        """The remaining events. by_model: whether the model itself has ended the output.

        Raises ApiError if the parser fails.
        """
        if self.ended:
            return []
        try:
            if by_model:
                events = self._up_to_call(self._parsing.end_by_model())
            else:  # the end is at fault where a call is not complete, whether or not the parser says so
                events = [
                    evolve(event, at_end=True) if isinstance(event, Malformed) else event
                    for event in self._up_to_call(self._parsing.end())
                ]
        except BaseException as error:
            raise_parser_fault(self._owner, "end", error)
        self.ended = True
        return events

    def _up_to_call(self, events: Sequence[Event]) -> list[Event]:
        """The events up to the end of the first call, if no other is wanted. Raises TypeError for what is no event."""
        found: list[Event] = []
        for event in events:
            if not isinstance(event, EVENTS):
                raise TypeError(f"it returned {event!r} among its events")
            found.append(event)
            if self._one_call and isinstance(event, CallEnd):
                self.ended = True
                break
        return found
