"""Decodes tokens one at a time into text that never changes afterwards."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What a decoder writes in place of bytes that are not valid UTF-8."""
_CONTEXT = 8
"""Tokens before the next one that are decoded with it. One would do for spaces; a character of 4 bytes wants 4."""


class TokenStream:
    """Decodes tokens one by one into text that never changes afterwards, at a constant cost each.

    Tokens that stand for bytes go through an incremental UTF-8 decoder. What another adds shows when it is decoded
    behind a few tokens before it: alone, it would lack its space, or have one too many.

    The `tokenizers` library has a DecodeStream, which is not used: it keeps bytes that are no character back for as
    long as more of them come, and for good when the text ends, and it is slower than a table of bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        """context: tokens before the first; a character that they leave incomplete is put out when it is whole."""
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_tokens if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = False
        """Whether the decoder holds the beginning of a character; unused without the table."""
        self._table = tokenizer.byte_table(skip_special_tokens)
        self._window: list[int] = []
        """The last tokens that have text; unused where a table has the bytes of all."""
        with_text = (token for token in reversed(context) if not self._is_silent(token))
        for token in reversed(list(itertools.islice(with_text, _CONTEXT))):
            self.push(token)

    def push(self, token: int) -> str:
        """The text that is certain after one more token, beyond that put out already."""
        if self._table is not None:
            return self._whole(self._table[token])
        if self._is_silent(token):
            return ""
        own = self._tokenizer.own_bytes(token)
        if own == b" " and not self._window:
            new = self._decode([token])  # which drops a space at the very beginning, if this decoder does
        elif own is not None:
            new = self._utf8.decode(own)
        else:
            told = self._certain(self._decode(self._window))
            text = self._decode([*self._window, token])
            new = self._utf8.decode(b"", final=True) + text[told : self._certain(text)]
        self._window = [*self._window[1 - _CONTEXT :], token]
        return new

    def extend(self, tokens: Sequence[int]) -> str:
        """As `push` of each in turn."""
        if self._table is None:
            return "".join(map(self.push, tokens))
        if len(tokens) == 1:
            return self._whole(self._table[tokens[0]])
        return self._whole(b"".join([self._table[token] for token in tokens]))

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for an incomplete character."""
        text = self._decode(self._window)
        return self._utf8.decode(b"", final=True) + text[self._certain(text) :]

    def _whole(self, new: bytes) -> str:
        """The characters that more bytes complete."""
        if not self._incomplete:
            try:
                return new.decode()
            except UnicodeDecodeError:
                pass  # they end within a character, or are none
        text = self._utf8.decode(new)
        self._incomplete = bool(self._utf8.getstate()[0])
        return text

    def _is_silent(self, token: int) -> bool:
        return token in self._skipped or self._tokenizer.own_bytes(token) == b""

    def _decode(self, ids: list[int]) -> str:
        # Nothing in the window is to be skipped.
        return self._tokenizer.decode_plainly(ids, False)

    def _certain(self, text: str) -> int:
        """How many characters no further token can change."""
        return len(text) - (self._tokenizer.splits_characters and text.endswith(REPLACEMENT))
