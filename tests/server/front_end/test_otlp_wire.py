"""Spans encoded by hand are the messages that protobuf reads and would write."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine.server.front_end.otlp_wire import messages, span, varint
from tests.server.otlp_receiver import attributes

FIELDS: dict[str, Any] = {
    "trace_id": bytes(range(16)),
    "span_id": bytes(range(8)),
    "parent": b"",
    "state": "",
    "flags": 0x101,
    "name": "decode",
    "kind": Span.SPAN_KIND_INTERNAL,
    "start": 2**62 + 1,
    "end": 2**62 + 5,
    "attributes": {},
    "error": None,
}


def read(**changes: Any) -> Span:
    """What protobuf reads; also checks that nothing is unknown to it."""
    data = span(**FIELDS | changes)
    found = Span.FromString(data)
    assert found.ByteSize() == len(data)
    assert Span.FromString(found.SerializeToString(deterministic=True)) == found
    return found


def test_span_has_its_ids_name_and_times() -> None:
    assert read() == Span(
        trace_id=bytes(range(16)),
        span_id=bytes(range(8)),
        flags=0x101,
        name="decode",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=2**62 + 1,
        end_time_unix_nano=2**62 + 5,
    )


def test_span_has_its_parent_state_and_error() -> None:
    found = read(parent=bytes(range(8, 16)), state="vendor=1", error=(2, "é" * 100), kind=Span.SPAN_KIND_SERVER)
    assert (found.parent_span_id, found.trace_state, found.kind) == (bytes(range(8, 16)), "vendor=1", 2)
    assert found.status == Status(code=Status.STATUS_CODE_ERROR, message="é" * 100)
    assert read(error=(2, "")).status == Status(code=Status.STATUS_CODE_ERROR)


@pytest.mark.parametrize(
    "value",
    [
        *(True, False, 0, 1, 127, 128, 16_383, 16_384, 2**31, 2**63 - 1, -1, -(2**63), 0.0, 1.0, -0.5, 1e300),
        *("", "a", "é漢\N{GRINNING FACE}", "x" * 127, "x" * 128, "x" * 70_000, (), ("length",), ("stop", "", "é")),
    ],
)
def test_attribute_keeps_its_type_and_value(value: Any) -> None:
    # equal values of another type come before, so that a kept encoding would show
    given = {"bool": bool(value), "int": 1, "float": 1.0, "value": value}
    found = attributes(read(attributes=given))
    assert list(found) == list(given)
    assert found["value"] == (list(value) if isinstance(value, tuple) else value)
    assert type(found["value"]) is (list if isinstance(value, tuple) else type(value))
    assert (found["int"], type(found["int"]), type(found["float"])) == (1, int, float)


def test_attribute_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="no attributes of type NoneType"):
        span(**FIELDS | {"attributes": {"keys": None}})


def test_messages_are_a_repeated_field() -> None:
    values = [AnyValue(int_value=number) for number in (1, -1, 300)]
    data = messages(5, [messages(1, [value.SerializeToString() for value in values])])
    assert list(AnyValue.FromString(data).array_value.values) == values


@pytest.mark.parametrize("number", [0, 127, 128, 2**14, 2**35, 2**64 - 1])
def test_varint_is_that_of_protobuf(number: int) -> None:
    signed = number - 2**64 if number >= 2**63 else number
    assert AnyValue(int_value=signed).SerializeToString()[1:] == varint(number) == varint(signed)
