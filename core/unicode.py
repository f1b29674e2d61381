"""Which texts are Unicode: a Python str may also hold halves of surrogate pairs, which no encoding has."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded, so that other processes and libraries can have it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
