"""The results of a conversation, and the contract of their writer: an API's JSON, whole or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from attrs import define, field

from engine.core.parsers import Content, Event
from engine.core.protocols.errors import ApiError
from engine.core.types import TokenLogprobs

DONE = b"data: [DONE]\n\n"
"""The end of a stream in OpenAI's older APIs."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment between server-sent events, which clients ignore."""


@define
class Delta:
    """New text of one choice."""

    choice: int
    text: str = ""
    offsets: list[int] = field(factory=list)
    """Character position in the choice's text at which each new token begins."""
    logprobs: list[TokenLogprobs] = field(factory=list)
    """For each new token, if requested."""
    prompt_logprobs: Sequence[bytes] = ()
    """Slices of the prompt's encoded log probabilities; of completions only, with the first text, if requested."""
    finish_reason: str | None = None
    """With the last text: stop or length (engine.core.types)."""
    stop_string: str | None = None
    """The stop string that ended the text, if one did."""
    events: list[Event] | None = None
    """What the text says, if it is parsed; see `said`."""

    spans: list[tuple[int, list[TokenLogprobs]]] = field(factory=list)
    """If the text is parsed, for each output of the engine: the number of `events` before it, and its log
    probabilities. Text that a parser holds back comes with a later output."""

    @property
    def said(self) -> Sequence[Event]:
        """What the text says; if it is not parsed, all of it is content."""
        if self.events is not None:
            return self.events
        return (Content(self.text),) if self.text else ()


@define
class Usage:
    """Token counts of one HTTP request. Each prompt counts once, whatever its number of choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompts whose keys and values were in the prefix cache."""
    reasoning_tokens: int | None = None
    """None: the output is not parsed."""
    prediction_tokens: tuple[int, int] | None = None
    """How many tokens of a predicted output were verified and are in the output, and how many were verified and are
    not. None: none was predicted."""

    def body(self) -> dict[str, object]:
        """The JSON object `usage` of completions and chat completions."""
        details: dict[str, int] = {}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if self.prediction_tokens is not None:
            details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = self.prediction_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        } | ({"completion_tokens_details": details} if details else {})


@define
class Template:
    """The bytes of an event before and after its text. Most events of a stream differ in their text only."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, event: Callable[[str], bytes]) -> Template:
        """Make a template. event: builds the event of a given text, which must be the last free text in its JSON."""
        mark = "<text>"  # the last occurrence: the model's name, which may hold any string, comes before
        before, _, after = event(mark).rpartition(msgspec.json.encode(mark))
        return cls(before, after)


class AnswerWriter(ABC):
    """Writes the answer to one HTTP request in the form of its API.

    Of a whole answer, `add` collects each delta, and `body` is called at the end. Of a stream, `events` is called with
    each delta and `end` after the last one. A writer is used for one request. Its methods run in the event loop: those
    that return iterators yield after each few milliseconds of work at most, so that other streams get their turns.
    """

    stream_end: bytes = DONE
    """Bytes after the last event of a stream that did not fail."""
    keep_alive: bytes = KEEP_ALIVE
    """Bytes that are sent after each server.stream_keep_alive seconds without an event, also before the first one."""

    @abstractmethod
    def add(self, delta: Delta) -> Iterator[None]:
        """Collect a delta for `body`."""

    @abstractmethod
    def body(self, usage: Usage) -> Iterator[bytes]:
        """The JSON of the whole answer, in pieces, from all collected deltas."""

    @abstractmethod
    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        """The events of a delta; none when the delta holds nothing to send. usage: returns the counts so far."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """The events after all choices have finished; may be empty."""

    def templates(self) -> Mapping[int, Template] | None:
        """The event of each choice for further content and nothing else; None: `events` builds these too."""
        return None

    def reasoning_templates(self) -> Mapping[int, Template] | None:
        """As `templates`, for further reasoning and nothing else."""
        return None

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that failed after it began, perhaps before its first event; nothing follows."""
        return error_event(error)


def error_event(error: ApiError) -> bytes:
    """The event that reports `error` in OpenAI's shape."""
    return sse_event(error.body())


def sse_event(body: object, name: str = "") -> bytes:
    """Encode one server-sent event with a JSON body; name: its type, for the line `event:`."""
    line = b"event: " + name.encode() + b"\n" if name else b""
    return line + b"data: " + msgspec.json.encode(body) + b"\n\n"
