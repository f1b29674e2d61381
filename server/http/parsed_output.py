"""The outputs of a chat as its parser reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from engine.core.parsers import CallEnd, Event, Parsing


@frozen(kw_only=True)
class OutputFormat:
    """How the outputs of a request are parsed."""

    begin: Callable[[], Parsing | None]
    """Starts to parse the output of a choice; None: all of its text is content."""
    keep: frozenset[int] = frozenset()
    """Special tokens that stay in the text, for the parser."""
    one_call: bool = False
    """Whether the output ends with its first tool call."""


class ParsedOutput:
    """The output of one choice."""

    def __init__(self, parsing: Parsing, *, one_call: bool) -> None:
        self._parsing = parsing
        self._one_call = one_call
        self.reasoning_tokens = 0
        """Tokens so far after which the text was within reasoning."""
        self.ended = False
        """Whether there are no more events: after the end, or after the only call that is wanted."""

    def feed(self, text: str, tokens: int) -> list[Event]:
        """The events of the text of that many further tokens."""
        if self.ended:
            return []
        events = self._up_to_call(self._parsing.feed(text) if text else ())
        if self._parsing.reasoning:
            self.reasoning_tokens += tokens
        return events

    def end(self, *, by_model: bool = False) -> list[Event]:
        """The remaining events. by_model: whether the model itself has ended the output."""
        if self.ended:
            return []
        events = self._up_to_call(self._parsing.end_by_model() if by_model else self._parsing.end())
        self.ended = True
        return events

    def _up_to_call(self, events: Sequence[Event]) -> list[Event]:
        """The events up to the end of the first call, if no other is wanted."""
        if self._one_call:
            for index, event in enumerate(events):
                if isinstance(event, CallEnd):
                    self.ended = True
                    return list(events[: index + 1])
        return list(events)
