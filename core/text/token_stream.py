"""Decodes tokens one by one into text that later tokens do not change."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""Written in place of bytes that are not valid UTF-8."""
_CONTEXT = 8
"""Previous tokens that the next one is decoded with. For spaces one suffices; a character of 4 bytes needs 4."""
_MAX_CONTEXT_READ = 64
"""Previous tokens that are looked at to find those, since special tokens may come between."""


class TokenStream:
    """Decodes tokens one by one into text that later tokens do not change. The cost per token is constant.

    Tokens that stand for bytes go through an incremental UTF-8 decoder. Other tokens are decoded together with a few
    previous ones, since the text depends on the neighbours: alone, a token would lose its space or gain one.

    DecodeStream of the `tokenizers` library is not used: it holds invalid bytes back as long as more of them follow,
    loses them when the text ends, and is slower than a table of bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        context: Sequence[int] = (),
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """context: tokens before the first; a character that begins in them is emitted when it is complete.

        keep: special tokens that are not skipped.
        """
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens - keep if keep else tokenizer.special_tokens
        self._skipped: frozenset[int] = special if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = False
        """Whether the UTF-8 decoder holds the beginning of a character; unused without a byte table."""
        self._table = tokenizer.byte_table(skip_special_tokens, keep)
        if self._table is not None and tokenizer.drops_space:
            self._table = _TextStart(self, self._table)
        self._window: list[int] = []
        """The last tokens that have text; unused with a byte table."""
        last = itertools.islice(reversed(context), _MAX_CONTEXT_READ)
        with_text = (token for token in last if not self._is_silent(token))
        for token in reversed(list(itertools.islice(with_text, _CONTEXT))):
            self.push(token)

    def first_bytes(self, token: int, table: Mapping[int, bytes]) -> bytes:
        """The bytes of a token before which there is no text; once there is, those in `table` count."""
        if token in self._skipped:
            return b""
        data, begun = self._tokenizer.first_bytes(token)
        if begun:
            self._table = table
        return data

    def push(self, token: int) -> str:
        """Decode one more token; returns the new text that no later token can change."""
        if self._table is not None:
            return self._decode_bytes(self._table[token])
        if self._is_silent(token):
            return ""
        own = self._tokenizer.own_bytes(token)
        if own == b" " and not self._window:
            new = self._decode([token])  # which drops a space at the very beginning, if this decoder does
        elif own is not None:
            new = self._utf8.decode(own)
        else:
            emitted = self._certain(self._decode(self._window))
            text = self._decode([*self._window, token])
            new = self._utf8.decode(b"", final=True) + text[emitted : self._certain(text)]
        self._window = [*self._window[1 - _CONTEXT :], token]
        return new

    def extend(self, tokens: Sequence[int]) -> str:
        """Push several tokens; returns their joined text."""
        if self._table is None:
            return "".join(map(self.push, tokens))
        if len(tokens) == 1:
            return self._decode_bytes(self._table[tokens[0]])
        return self._decode_bytes(b"".join([self._table[token] for token in tokens]))

    def flush(self) -> str:
        """The rest of the text, at its end: U+FFFD for an incomplete character."""
        text = self._decode(self._window)
        return self._utf8.decode(b"", final=True) + text[self._certain(text) :]

    def _decode_bytes(self, new: bytes) -> str:
        """The characters completed by these further bytes."""
        if not self._incomplete:
            try:
                return new.decode()
            except UnicodeDecodeError:
                pass  # the bytes end within a character, or are invalid
        text = self._utf8.decode(new)
        self._incomplete = bool(self._utf8.getstate()[0])
        return text

    def _is_silent(self, token: int) -> bool:
        return token in self._skipped or self._tokenizer.own_bytes(token) == b""

    def _decode(self, ids: list[int]) -> str:
        # The window holds no tokens to skip.
        return self._tokenizer.decode_plainly(ids, False)

    def _certain(self, text: str) -> int:
        """Number of leading characters of `text` that no further token can change."""
        return len(text) - (self._tokenizer.splits_characters and text.endswith(REPLACEMENT))


class _TextStart(dict[int, bytes]):
    """The byte table of a stream until its text has begun, for tokenizers that drop a space there."""

    def __init__(self, stream: TokenStream, table: Mapping[int, bytes]) -> None:
        super().__init__()
        self._stream = stream
        self._later = table

    def __missing__(self, token: int) -> bytes:
        return self._stream.first_bytes(token, self._later)
