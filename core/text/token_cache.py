"""Keeps the tokens of parts of chats, since clients send each chat again with every turn.

A text is cut before its *separators*: added tokens, such as <|im_end|>, that the tokenizer finds before all else and
whatever is around them. So the tokens of the parts are exactly those of the whole, and parts that were in an earlier
text need not be tokenized again.
"""

from __future__ import annotations

import re
import string
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from threading import Lock
from typing import TYPE_CHECKING

from attrs import frozen

from engine.core.tokens import TOKEN_BYTES, Tokens

if TYPE_CHECKING:
    from engine.core.text.tokenizer import Tokenizer

MIN_TEXT = 4096
"""Shorter texts, in characters, are tokenized faster than they are looked up and kept."""
MIN_PART = 512
"""Minimum characters of a part, unless it is the last one: an entry takes ENTRY_BYTES besides its text and tokens."""
ENTRY_BYTES = 512
"""Bytes that a part takes besides its text and tokens."""

_EDGES = frozenset(string.punctuation) - {"_"}
"""Characters that are neither blanks nor parts of words."""


@frozen
class AddedText:
    """The text of a token that a tokenizer finds in texts before anything else is done to them."""

    text: str
    alone: bool
    """Whether it is found whatever the characters around it are, and takes none of them."""


class Separators:
    """Where a text can be cut so that the tokens of the parts are those of the whole."""

    def __init__(self, added: Iterable[AddedText]) -> None:
        """added: all texts that are found before anything else, of several at one place the longest.

        A token that is not found `alone` looks at its neighbours, or takes blanks from them. So what begins or ends
        with a blank or a letter is no separator.
        """
        texts = {each.text: each.alone and {each.text[0], each.text[-1]} <= _EDGES for each in added if each.text}
        self._pattern = re.compile(_longest_of(sorted(texts)))
        self._separators = frozenset(text for text, is_separator in texts.items() if is_separator)

    def __bool__(self) -> bool:
        return bool(self._separators)

    def split(self, text: str, min_part: int = MIN_PART) -> Iterator[str]:
        """The parts of a text, each but the first beginning with a separator, and each but the last of at least
        `min_part` characters. Where a text is cut depends only on what comes before, so that a longer text has the same
        parts."""
        begin = 0
        for match in self._pattern.finditer(text) if self else ():
            if match.start() - begin >= min_part and match[0] in self._separators:
                yield text[begin : match.start()]
                begin = match.start()
        yield text[begin:]


def _longest_of(texts: list[str]) -> str:
    """A regular expression that matches the longest of these texts, which are sorted.

    Texts of equal beginning share a branch: some vocabularies have thousands of added tokens, runs of newlines among
    them, which one after another would be compared at each newline.
    """
    if len(texts) < 2:
        return re.escape("".join(texts))
    optional = "" if texts[0] else "?"
    branches = []
    for _, group in groupby((text for text in texts if text), key=itemgetter(0)):
        same = list(group)
        pairs = enumerate(zip(same[0], same[-1], strict=False))  # what these two share, all do
        shared = next((at for at, (one, other) in pairs if one != other), len(same[0]))
        branches.append(re.escape(same[0][:shared]) + _longest_of([text[shared:] for text in same]))
    return f"(?:{'|'.join(branches)}){optional}" if optional or len(branches) > 1 else "".join(branches)


class TokenCache:
    """Tokenizes texts, and keeps the tokens of their parts. Safe to use from several threads.

    Parts are found by their text and a salt, which keeps clients from learning, by the time that an answer takes, what
    clients with other salts have sent.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_bytes: int, *, min_text: int = MIN_TEXT, min_part: int = MIN_PART
    ) -> None:
        """max_bytes: of texts and tokens kept; beyond that the least recently used parts are forgotten. 0: none are."""
        self._min_text = min_text
        self._min_part = min_part
        self._tokenizer = tokenizer
        self._separators = tokenizer.separators if max_bytes else None
        self._max_bytes = max_bytes
        self._parts: OrderedDict[tuple[str, str], Tokens] = OrderedDict()  # least recently used first
        self._lock = Lock()
        self.bytes = 0
        """Bytes of the parts kept."""

    def encode(self, text: str, salt: str = "") -> Tokens:
        """The tokens of a text in which special tokens are spelled out, as of a chat; none are added.

        Raises InvalidRequestError for text that is not Unicode.
        """
        if len(text) < self._min_text or not self._separators:
            return self._encode(text)
        parts = [(salt, part) for part in self._separators.split(text, self._min_part)]
        with self._lock:
            found = [self._get(part) for part in parts]
        for index, part in enumerate(parts):
            if found[index] is None:
                tokens = found[index] = self._encode(part[1])
                with self._lock:
                    self._put(part, tokens)
        return Tokens.join(tokens for tokens in found if tokens is not None)

    def _encode(self, text: str) -> Tokens:
        return Tokens(self._tokenizer.encode(text, add_special_tokens=False))

    def _get(self, part: tuple[str, str]) -> Tokens | None:
        tokens = self._parts.get(part)
        if tokens is not None:
            self._parts.move_to_end(part)
        return tokens

    def _put(self, part: tuple[str, str], tokens: Tokens) -> None:
        size = _size(part, tokens)
        if size > self._max_bytes or part in self._parts:
            return
        self._parts[part] = tokens
        self.bytes += size
        while self.bytes > self._max_bytes:
            self.bytes -= _size(*self._parts.popitem(last=False))


def _size(part: tuple[str, str], tokens: Tokens) -> int:
    """Bytes that a part takes; its salt is counted, although parts may share it."""
    return ENTRY_BYTES + sum(map(sys.getsizeof, part)) + len(tokens) * TOKEN_BYTES
