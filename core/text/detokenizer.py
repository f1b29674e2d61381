"""Turns a request's tokens into text as they are generated, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from engine.core.text.partial_match import partial_match
from engine.core.text.token_stream import TokenStream
from engine.core.text.tokenizer import Tokenizer
from engine.core.types import FINISH_STOP, FinishReason, Output, SamplingParams, TokenLogprobs


@frozen(kw_only=True)
class TextDelta:
    """New text of a request, and the tokens it came with."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """New output tokens, up to the one that completed a stop string. Their text may come in a later TextDelta."""
    offsets: tuple[int, ...] = ()
    """For each token, the position in the whole output text where its text begins, in characters. Held text and a stop
    string count; tokens that share a character have the same offset."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Once, with the first token, if requested: one entry for each prompt token but the first."""
    finish_reason: FinishReason | None = None
    """None until the text has ended."""
    stop_string: str | None = None
    """The stop string that ended the text, if one did."""


class Detokenizer:
    """Turns one request's outputs into text that ends before the first stop string.

    Text that may be the beginning of a stop string is held until it is known whether it is one. Of several stop strings
    the one completed first ends the text; if one character completes several, the one that begins first. So the
    result does not depend on how the text is split into tokens. A stop string completed by one of the first min_tokens
    tokens is ordinary text. The cost per token does not depend on the length of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """keep: special tokens that stay in the text, whatever `params` say."""
        self._stream = TokenStream(tokenizer, params.skip_special_tokens, prompt, keep)
        self._stops = params.stop
        self._first_characters = frozenset(stop[0] for stop in params.stop)
        self._min_tokens = params.min_tokens
        self._emitted = 0  # characters returned so far
        self._held = ""  # text that may be the beginning of a stop string
        self._finished = False
        self.num_tokens = 0
        """Output tokens so far, as TextDelta.tokens counts them."""
        self.stop_string: str | None = None
        """The stop string that ended the text, if one has."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `feed` returns for an output with these tokens and nothing else, at a fraction of the cost.

        The text has ended if `stop_string` is set afterwards.
        """
        if self._finished:
            return ""
        if not self._stops:
            self.num_tokens += len(tokens)
            text = self._stream.extend(tokens)
            self._emitted += len(text)
            return text
        texts: list[str] = []
        for token in tokens:
            texts.append(self._next(token))
            if self._finished:
                break
        return "".join(texts)

    def feed(self, output: Output) -> TextDelta:
        """The new text after one more output.

        After a TextDelta with a stop string the caller is to abort the request. Outputs after the end of the text give
        an empty TextDelta.
        """
        if self._finished:
            return TextDelta()
        texts: list[str] = []
        offsets: list[int] = []
        with_text = output.tokens if output.stop_token is None else output.tokens[:-1]
        for token in with_text:
            offsets.append(self._emitted + len(self._held))
            texts.append(self._next(token))
            if self._finished:
                break
        if self.num_tokens and not self._finished and output.finish_reason is not None:
            texts += [self._emit(self._stream.flush()), self._held]
            self._emitted += len(self._held)
        if self.stop_string is None and output.stop_token is not None:
            offsets.append(self._emitted)
            self.num_tokens += 1
        self._finished = self._finished or output.finish_reason is not None
        return TextDelta(
            text="".join(texts),
            tokens=output.tokens[: len(offsets)],
            offsets=tuple(offsets),
            logprobs=output.logprobs[: len(offsets)],
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=output.finish_reason if self.stop_string is None else FINISH_STOP,
            stop_string=self.stop_string,
        )

    def _next(self, token: int) -> str:
        """Decode one more token; returns the text that can be emitted."""
        self.num_tokens += 1
        return self._emit(self._stream.push(token))

    def _emit(self, new: str) -> str:
        """Append to the held text; returns what of it can be emitted, and finishes the text at a stop string."""
        if not self._held and self._first_characters.isdisjoint(new):  # no stop string can begin here
            self._emitted += len(new)
            return new
        held, old = self._held + new, len(self._held)
        stop = _first_stop(held, old, self._stops) if self.num_tokens > self._min_tokens else None
        if stop is None:
            end = partial_match(held, self._stops)
            self._held = held[end:]
        else:
            end, self.stop_string = stop
            self._held = ""
            self._finished = True
        self._emitted += end
        return held[:end]


def _first_stop(text: str, old: int, stops: Iterable[str]) -> tuple[int, str] | None:
    """(start, stop string) of the first stop string to end after the first `old` characters; None if none does."""
    starts = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in stops)
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop
