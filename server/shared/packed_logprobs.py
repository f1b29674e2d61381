"""The log probabilities of a prompt, encoded in slices, so that no one decodes those of a long prompt in one go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from engine.core.executors import MessageDecoder, encode
from engine.core.types import TokenLogprobs

SLICE = 128
"""Entries per slice; they become JSON in a few milliseconds."""

_decoder: MessageDecoder[tuple[TokenLogprobs, ...]] = MessageDecoder(tuple[TokenLogprobs, ...])


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of a request's prompt. They are sent before the output with the first token."""

    number: int
    """The request."""
    slices: tuple[bytes, ...]


def pack(entries: Sequence[TokenLogprobs]) -> Iterator[bytes]:
    """Encode the entries, a slice at a time."""
    return (encode(entries[start : start + SLICE]) for start in range(0, len(entries), SLICE))


def unpack(slices: Iterable[bytes]) -> Iterator[TokenLogprobs]:
    """Yield the entries; each slice is decoded when its first entry is due."""
    for data in slices:
        yield from _decoder.decode(data)
