"""Text out of tokens as they are generated, one at a time, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from engine.core.text.token_stream import TokenStream
from engine.core.text.tokenizer import Tokenizer
from engine.core.types import FINISH_STOP, Output, SamplingParams, TokenLogprobs


@frozen(kw_only=True)
class TextDelta:
    """What is new in a request's text."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """Tokens that count as output: none after the one that completed a stop string. Their text may come later."""
    offsets: tuple[int, ...] = ()
    """For each token, where in the whole output text its own begins, in characters, a stop string and held text
    counted in; the same for tokens that share a character."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token, when asked for."""
    finish_reason: str | None = None
    """None while running, else stop, length, abort or error."""
    stop_string: str | None = None
    """The stop string that ended the text, if one did."""


class Detokenizer:
    """Turns one request's outputs into text, and ends it at a stop string.

    Text that may be the beginning of a stop string is held back until it is known. Of several stop strings the one
    completed first counts, of those the one that begins first; so the result does not depend on how the text is cut
    into tokens. A stop string completed by one of the first min_tokens tokens does not count.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._stream = TokenStream(tokenizer, params.skip_special_tokens, prompt)
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._told = 0
        self._held = ""
        self._finished = False
        self.num_tokens = 0
        """Tokens so far that count as output."""
        self.stop_string: str | None = None
        """The stop string that has ended the text, if one has."""

    def push(self, tokens: Sequence[int]) -> str:
        """As the text of `feed` for an output that has these tokens and nothing else, at a fraction of the cost.

        Where `stop_string` is set afterwards, the text has ended.
        """
        if self._finished:
            return ""
        if not self._stops:
            self.num_tokens += len(tokens)
            text = self._stream.extend(tokens)
            self._told += len(text)
            return text
        texts: list[str] = []
        for token in tokens:
            texts.append(self._next(token))
            if self._finished:
                break
        return "".join(texts)

    def feed(self, output: Output) -> TextDelta:
        """The text after one more output. A TextDelta with a stop string ends the request, which the caller then
        aborts; outputs that come after the end give an empty TextDelta.
        """
        if self._finished:
            return TextDelta()
        texts: list[str] = []
        offsets: list[int] = []
        spoken = output.tokens if output.stop_token is None else output.tokens[:-1]
        for token in spoken:
            offsets.append(self._told + len(self._held))
            texts.append(self._next(token))
            if self._finished:
                break
        if not self._finished and output.finish_reason is not None:
            texts += [self._pass(self._stream.flush()), self._held]
            self._told += len(self._held)
        if self.stop_string is None and output.stop_token is not None:
            offsets.append(self._told)
            self.num_tokens += 1
        self._finished = self._finished or output.finish_reason is not None
        return TextDelta(
            text="".join(texts),
            tokens=output.tokens[: len(offsets)],
            offsets=tuple(offsets),
            logprobs=output.logprobs[: len(offsets)],
            finish_reason=output.finish_reason if self.stop_string is None else FINISH_STOP,
            stop_string=self.stop_string,
        )

    def _next(self, token: int) -> str:
        """What can be put out after one more token."""
        self.num_tokens += 1
        return self._pass(self._stream.push(token))

    def _pass(self, new: str) -> str:
        """What of the held text and the new can be put out; the text is finished when a stop string is in it."""
        held, old = self._held + new, len(self._held)
        stop = _first_stop(held, old, self._stops) if self.num_tokens > self._min_tokens else None
        if stop is None:
            end = _open_end(held, self._stops)
            self._held = held[end:]
        else:
            end, self.stop_string = stop
            self._held = ""
            self._finished = True
        self._told += end
        return held[:end]


def _first_stop(text: str, old: int, stops: Iterable[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is completed first in the text after its first `old` characters, and which."""
    starts = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in stops)
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _open_end(text: str, stops: Iterable[str]) -> int:
    """Where the longest end of the text begins that is the beginning of a stop string, but not the whole of it."""
    least = len(text)
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1), least)
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1, least)
        least = least if start < 0 else start
    return least
