"""Halves of surrogate pairs: a Python str and escapes of JSON may have them, Unicode text has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")

_LONE_SURROGATE = re.compile(
    rb"""
    \\u[dD] (?: [89abAB] [0-9a-fA-F]{2} (?! \\u[dD] [c-fC-F] [0-9a-fA-F]{2} )  # the first half of a pair
    | (?<! \\u[dD] [89abAB] [0-9a-fA-F]{2} \\u[dD] ) [c-fC-F] [0-9a-fA-F]{2} )  # the second half
    """,
    re.VERBOSE,
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded, so that other processes and libraries can have it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_json(data: bytes, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of JSON, in which halves of surrogate pairs are read as U+FFFD.

    They are looked for only where `decode` finds no JSON. Raises what it raises.
    """
    try:
        return decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = without_lone_surrogates(data)
        if mended == data:
            raise
    return decode(mended)


def without_lone_surrogates(data: bytes) -> bytes:
    """JSON with U+FFFD in place of each escape that is half of a surrogate pair.

    JavaScript writes text that was cut within a character so, and a client sends it again with every turn of a chat.
    """
    if b"\0" in data:  # no JSON
        return data
    escapes = data.replace(rb"\\", b"\0")  # so that each backslash begins another escape
    return _LONE_SURROGATE.sub(_REPLACEMENT, escapes).replace(b"\0", rb"\\")
