"""The tokens of a tokenizer, as a library converts them: the contract, and its form for the `tokenizers` library."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.core.errors import InvalidRequestError
from engine.core.text.token_cache import AddedText, Separators

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How byte-fallback vocabularies spell the token of a byte."""
NO_ID = "a token id is negative or above 2**32 - 1"
SPACE = "\u2581"
"""Stands for a space in a piece of sentencepiece."""
_BYTE_FALLBACK = [
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
"""The decoders of byte-fallback vocabularies, as of Gemma."""
_DROP_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
"""The decoder that follows these in Llama 2 and Mistral: drops a space at the beginning of the text."""
_MANY = 1024
"""Tokens from which on decoding them takes long enough to let other threads run."""


class Vocabulary(ABC):
    """Converts text to tokens, and tokens to text. Safe to use from several threads."""

    special_tokens: frozenset[int]
    """Tokens left out of the text if `skip_special_tokens`."""
    has_bytes: bool
    """Whether every token has bytes of its own, whatever its neighbours are."""
    has_byte_tokens: bool
    """Whether some tokens stand for single bytes, possibly part of a character; all others hold whole characters."""
    drops_space: bool = False
    """Whether a token at the beginning of a text has other bytes (`first_bytes`) than elsewhere."""
    separators: Separators | None = None
    """Where a text can be cut so that the tokens of the parts are those of the whole; None: nowhere."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of tokens, added tokens included."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokens of a text. Raises InvalidRequestError for text that is not Unicode."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of tokens. May replace more than the invalid bytes if `has_byte_tokens`."""

    @abstractmethod
    def own_bytes(self, token: int) -> bytes | None:
        """The bytes of a token; None if they depend on its neighbours, empty for an id outside the vocabulary."""

    def first_bytes(self, token: int) -> tuple[bytes, bool]:
        """The bytes of a token before which there is no text, and whether there is text after it."""
        raise NotImplementedError  # only called if `drops_space`


class LibraryVocabulary(Vocabulary):
    """The tokens of a tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # transformers sets both per call, which is not thread-safe; this class never truncates or pads.
        backend.no_truncation()
        backend.no_padding()
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        parts = decoder.get("decoders", [decoder])
        self._is_byte_level = [part.get("type") for part in parts] == ["ByteLevel"]
        # Decoded one by one, a token is its piece with spaces for SPACE, or its byte; then one space may be dropped.
        self._is_byte_fallback = parts in (_BYTE_FALLBACK, [*_BYTE_FALLBACK, _DROP_SPACE])
        self.has_bytes = self._is_byte_level or self._is_byte_fallback
        self.has_byte_tokens = any(part.get("type") == "ByteFallback" for part in parts)
        self.drops_space = self._is_byte_fallback and parts[-1] == _DROP_SPACE
        added = backend.get_added_tokens_decoder()
        self.special_tokens = frozenset(token for token, about in added.items() if about.special)
        if not (backend.encode_special_tokens or getattr(backend.model, "dropout", None)):
            # The library looks for `normalized` added tokens later, in the text between these.
            self.separators = Separators(
                AddedText(about.content, alone=not (about.lstrip or about.rstrip or about.single_word))
                for about in added.values()
                if not about.normalized
            )

    @property
    def size(self) -> int:
        size: int = self.backend.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # A batch of one, since the library releases the GIL only for batches, and a long text takes seconds.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # raised for a lone surrogate, which JSON can contain
            raise not_unicode() from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            if len(ids) < _MANY:
                text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            else:  # a batch of one, since the library releases the GIL only for batches
                [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise InvalidRequestError(NO_ID) from None
        return text

    def own_bytes(self, token: int) -> bytes | None:
        try:
            content: str | None = self.backend.id_to_token(token)
        except OverflowError:
            raise InvalidRequestError(NO_ID) from None
        if content is None:
            return b""
        if self._is_byte_level:
            if all(character in _BYTE_OF for character in content):
                return bytes(_BYTE_OF[character] for character in content)
            return content.encode()
        if self.has_byte_tokens and (match := BYTE_TOKEN.fullmatch(content)):
            return bytes([int(match[1], 16)])
        return content.replace(SPACE, " ").encode() if self._is_byte_fallback else None

    def first_bytes(self, token: int) -> tuple[bytes, bool]:
        data = self.own_bytes(token) or b""
        return data.removeprefix(b" "), bool(data)


def not_unicode() -> InvalidRequestError:
    """The error for text with half of a surrogate pair."""
    return InvalidRequestError("the text has half of a surrogate pair, so it is not Unicode")


def _byte_alphabet() -> dict[str, int]:
    """The byte by character of a byte-level vocabulary, in the format of GPT-2.

    Printable Latin-1 characters stand for their own bytes; characters from U+0100 on for the other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
