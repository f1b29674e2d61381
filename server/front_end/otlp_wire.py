"""Encodes spans in the wire format of OTLP's messages, without building the messages.

Building a message of protobuf takes a call and an object per attribute, of which a request has 35. Most of them are the
same in all requests of a server, so that their bytes are kept.

https://protobuf.dev/programming-guides/encoding/ and opentelemetry/proto/trace/v1/trace.proto
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct

MAX_KEPT = 2048
"""Attributes whose bytes are kept; beyond that the least recently used is forgotten."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types."""


def varint(number: int) -> bytes:
    """An integer; negative ones as of 64 bits."""
    if 0 <= number < 0x80:
        return number.to_bytes()
    number &= 2**64 - 1
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def tag(field: int, wire_type: int) -> bytes:
    """What stands before a field's value."""
    return varint(field << 3 | wire_type)


def sized(field_tag: bytes, data: bytes) -> bytes:
    """A field of a string, bytes or a message."""
    return field_tag + varint(len(data)) + data


_KEY, _VALUE, _ELEMENT = tag(1, LENGTH), tag(2, LENGTH), tag(1, LENGTH)
_STRING, _BOOL, _INT, _DOUBLE, _ARRAY = tag(1, LENGTH), tag(2, VARINT), tag(3, VARINT), tag(4, FIXED64), tag(5, LENGTH)
_SPAN_STATE, _SPAN_PARENT, _SPAN_NAME = tag(3, LENGTH), tag(4, LENGTH), tag(5, LENGTH)
_SPAN_ATTRIBUTE, _SPAN_STATUS = tag(9, LENGTH), tag(15, LENGTH)
_STATUS_MESSAGE, _STATUS_CODE = tag(2, LENGTH), tag(3, VARINT)
_IDS = Struct("<2s16s2s8s")
_ID_TAGS = sized(tag(1, LENGTH), bytes(16))[:2], sized(tag(2, LENGTH), bytes(8))[:2]
_TIMES = Struct("<sBsQsQ2sI")
_TIME_TAGS = tag(6, VARINT), tag(7, FIXED64), tag(8, FIXED64), tag(16, FIXED32)
_FLOAT = Struct("<d")


def span(
    *,
    trace_id: bytes,
    span_id: bytes,
    parent: bytes,
    state: str,
    flags: int,
    name: str,
    kind: int,
    start: int,
    end: int,
    attributes: Mapping[str, object],
    error: tuple[int, str] | None,
) -> bytes:
    """A message Span. parent: id of a span, or empty. start, end: Unix times, nanoseconds. error: status code and text.

    Raises UnicodeEncodeError for what is no text.
    """
    kind_tag, start_tag, end_tag, flags_tag = _TIME_TAGS
    parts = [
        _IDS.pack(_ID_TAGS[0], trace_id, _ID_TAGS[1], span_id),
        _TIMES.pack(kind_tag, kind, start_tag, start, end_tag, end, flags_tag, flags),
        sized(_SPAN_NAME, name.encode()),
    ]
    if parent:
        parts.append(sized(_SPAN_PARENT, parent))
    if state:
        parts.append(sized(_SPAN_STATE, state.encode()))
    parts += [_attribute(key, value) for key, value in attributes.items()]
    if error is not None:
        code, text = error
        message = sized(_STATUS_MESSAGE, text.encode()) if text else b""
        parts.append(sized(_SPAN_STATUS, message + _STATUS_CODE + varint(code)))
    return b"".join(parts)


def messages(field: int, encoded: Iterable[bytes]) -> bytes:
    """A repeated field of messages."""
    field_tag = tag(field, LENGTH)
    return b"".join([sized(field_tag, one) for one in encoded])


@lru_cache(MAX_KEPT, typed=True)
def _attribute(key: str, value: object) -> bytes:
    """A field `attributes` of a span."""
    return sized(_SPAN_ATTRIBUTE, sized(_KEY, key.encode()) + sized(_VALUE, _any(value)))


def _any(value: object) -> bytes:
    """A message AnyValue."""
    match value:
        case bool():
            return _BOOL + varint(value)
        case int():
            return _INT + varint(value)
        case float():
            return _DOUBLE + _FLOAT.pack(value)
        case str():
            return sized(_STRING, value.encode())
        case tuple():
            return sized(_ARRAY, b"".join([sized(_ELEMENT, _any(item)) for item in value]))
    raise TypeError(f"a span has no attributes of type {type(value).__name__}")
