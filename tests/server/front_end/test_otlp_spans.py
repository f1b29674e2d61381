"""Spans have the attributes they are given, although encoded attributes are kept."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from engine.server.front_end.otlp_spans import _pairs
from tests.server.otlp_receiver import attributes


@pytest.mark.parametrize(
    "value",
    [
        *(True, False, 0, 1, 127, 128, 16_383, 16_384, 2**31, 2**63 - 1, -1, -(2**63), 0.0, 1.0, -0.5, 1e300),
        *("", "a", "é漢\N{GRINNING FACE}", "x" * 127, "x" * 128, "x" * 70_000, (), ("length",), ("stop", "", "é")),
    ],
)
def test_attribute_keeps_its_type_and_value(value: Any) -> None:
    # equal values of another type come before, so that a kept attribute would show
    for earlier in (bool(value), 1, 1.0):
        _pairs({"value": earlier})
    given = {"bool": bool(value), "int": 1, "float": 1.0, "value": value}
    found = attributes(Span.FromString(Span(attributes=_pairs(given)).SerializeToString()))
    assert list(found) == list(given)
    assert found["value"] == (list(value) if isinstance(value, tuple) else value)
    assert type(found["value"]) is (list if isinstance(value, tuple) else type(value))
    assert (found["int"], type(found["int"]), type(found["float"])) == (1, int, float)


def test_attribute_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="no attributes of type NoneType"):
        _pairs({"keys": None})
