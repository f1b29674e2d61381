"""Counts the values of JSON text without decoding it, which takes long for many small values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

NUMBERS_PER_VALUE = 8
"""A number is decoded in this fraction of the time of a list."""
_WINDOW = 2**16
"""Bytes that are counted at a time."""


def surely_fits(data: bytes, max_values: int) -> bool:
    """Whether JSON has so few quotes, brackets and commas that it holds few values, whatever they are for."""
    strings = data.count(b'"') // 2 + len(data) // _WINDOW + 1  # value_counts counts strings cut by windows twice
    values = strings + data.count(b"[") + data.count(b"{")
    return values <= max_values and data.count(b",") <= max_values * NUMBERS_PER_VALUE


def value_counts(data: bytes) -> Iterator[tuple[int, int]]:
    """Count the values of JSON; after each window the strings, lists and objects so far, and the commas so far."""
    values = commas = position = 0
    in_string = 0
    while position < len(data):
        window = data[position : position + _WINDOW]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:  # the window ends between a backslash and what it escapes
            window = data[position : position + _WINDOW + 1]
        position += len(window)
        pieces = window.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(pieces[in_string::2])
        in_string = (in_string + len(pieces) - 1) % 2
        values += len(pieces) // 2 + outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        yield values, commas


def have_more_values(texts: Sequence[str], max_values: int) -> bool:
    """Whether some JSON texts together hold more than `max_values` strings, lists and objects, or NUMBERS_PER_VALUE
    times as many numbers."""
    encoded = [text.encode(errors="surrogatepass") for text in texts]
    if surely_fits(b"".join(encoded), max_values):
        return False
    values = commas = 0
    for data in encoded:
        more = (0, 0)
        for more in value_counts(data):
            if values + more[0] > max_values or commas + more[1] > max_values * NUMBERS_PER_VALUE:
                return True
        values, commas = values + more[0], commas + more[1]
    return False


def json_size(value: object, limit: int) -> int:
    """About the number of characters of a value as JSON; counts no further than `limit`, so the time is bounded."""
    size = 0
    stack = [value]
    while stack and size < limit:
        one = stack.pop()
        if isinstance(one, str):
            size += len(one) + 2
        elif isinstance(one, Mapping):
            size += 2 + 3 * len(one)
            if size < limit:
                stack += one.values()
                size += sum(len(key) for key in one if isinstance(key, str))
        elif isinstance(one, (list, tuple)):
            size += 2 + len(one)
            if size < limit:
                stack += one
        else:
            size += 4
    return size
