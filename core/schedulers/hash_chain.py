"""Digests of the blocks of token sequences, by which the prefix cache identifies a block's content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from struct import Struct

from engine.core.schedulers.growing_tokens import GrowingTokens
from engine.core.tokens import TOKEN_BYTES, TOKEN_TYPE, Tokens, packed

DIGEST_BYTES = 16
RUN = 64
"""Blocks per run: their digests are kept together."""

_PACKED = (GrowingTokens, Tokens)


class DigestCache:
    """Digests of runs of blocks: a prompt that comes again, with more behind it, is not hashed again.

    A run is found by its tokens and the digest before it, both compared in full.
    """

    def __init__(self, max_blocks: int) -> None:
        """max_blocks: blocks whose digests are kept; beyond that the least recently used run is forgotten."""
        self._max_runs = max_blocks // RUN
        self._runs: OrderedDict[tuple[bytes, bytes], list[bytes]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Number of runs."""
        return len(self._runs)

    def digests(self, before: bytes, tokens: bytes) -> list[bytes]:
        """Digests of the blocks of a run. before: the digest of the block before it. tokens: of the run, packed."""
        key = before, tokens
        found = self._runs.get(key)
        if found is not None:
            self._runs.move_to_end(key)
            return found
        found = _digests(before, tokens, len(tokens) // RUN)
        if self._max_runs:
            if len(self._runs) >= self._max_runs:
                self._runs.popitem(last=False)
            self._runs[key] = found
        return found


class HashChain:
    """Digests of the full blocks of one growing token sequence; each is computed once, on first use.

    A block's digest covers the salt and all tokens from the start of the sequence to the end of the block: it is a
    hash of the block's tokens and the digest before it.
    """

    __slots__ = ("_block_size", "_cache", "_digests", "_last", "_pack", "salt")

    def __init__(self, block_size: int, salt: str = "", cache: DigestCache | None = None) -> None:
        """cache: digests that other sequences have computed; of the same block size."""
        self.salt = salt
        self._block_size = block_size
        self._pack = _packer(block_size).pack
        self._cache = cache
        # Of a fixed length, so that no salt equals another plus some tokens.
        self._last = blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        """Number of digests computed so far."""
        return len(self._digests)

    def digest(self, tokens: Sequence[int], block: int) -> bytes:
        """Digest of the full block at index `block` of `tokens`."""
        digests = self._digests
        if len(digests) <= block:
            start = block * self._block_size
            if len(digests) == block and isinstance(tokens, GrowingTokens) and start >= tokens.head_len:
                # A block of output, once in `block_size` tokens: short cuts from the list to the digest.
                start -= tokens.head_len
                data = self._pack(self._last, *tokens.tail[start : start + self._block_size])
                self._last = blake2b(data, digest_size=DIGEST_BYTES).digest()
                digests.append(self._last)
            else:
                self._extend(tokens, block + 1)
        return digests[block]

    def first(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Digests of the first `count` blocks of `tokens`, all of them full."""
        if len(self._digests) < count:
            self._extend(tokens, count)
        return self._digests[:count]

    def between(self, tokens: Sequence[int], first: int, end: int) -> list[bytes]:
        """Digests of the full blocks of `tokens` from index `first` to `end`."""
        if len(self._digests) < end:
            self._extend(tokens, end)
        return self._digests[first:end]

    def _extend(self, tokens: Sequence[int], count: int) -> None:
        """Compute the digests of the first `count` blocks."""
        digests, size = self._digests, self._block_size
        pack = tokens.packed if isinstance(tokens, _PACKED) else partial(_packed, tokens)
        begin = len(digests)
        while begin < count:
            end = min(count, (begin // RUN + 1) * RUN)
            data = pack(begin * size, end * size)
            if self._cache is not None and end - begin == RUN:
                digests += self._cache.digests(self._last, data)
            else:
                digests += _digests(self._last, data, size * TOKEN_BYTES)
            self._last = digests[-1]
            begin = end


@lru_cache
def _packer(block_size: int) -> Struct:
    """Packs a digest and the tokens of the block behind it."""
    return Struct(f"{DIGEST_BYTES}s{block_size}{TOKEN_TYPE}")


def _digests(before: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
    """Digests of the blocks in `tokens`, packed. before: the digest of the block before them."""
    found = []
    for at in range(0, len(tokens), block_bytes):
        before = blake2b(before + tokens[at : at + block_bytes], digest_size=DIGEST_BYTES).digest()
        found.append(before)
    return found


def _packed(tokens: Sequence[int], start: int, stop: int) -> bytes:
    return packed(tokens[start:stop])
