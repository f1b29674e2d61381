from __future__ import annotations

import pytest

from engine.server.front_end.request_trace import Tracer
from engine.server.front_end.trace_context import TraceContext, context_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def context(parent: str, *states: str) -> TraceContext | None:
    headers = [(b"traceparent", parent.encode()), *((b"tracestate", state.encode()) for state in states)]
    return context_of([(b"host", b"here"), *headers])


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_the_context_of_a_client_is_read(flags: str, sampled: bool) -> None:
    found = context(f"00-{TRACE}-{SPAN}-{flags}", "a=1,b=2", "c=3")
    assert found == TraceContext(TRACE, SPAN, sampled, "a=1,b=2,c=3")
    assert found.header.decode() == f"00-{TRACE}-{SPAN}-{'01' if sampled else '00'}"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-0g",
    ],
)
def test_a_context_that_is_not_valid_is_none(parent: str) -> None:
    assert context(parent, "a=1") is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert context(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)


def test_two_parents_are_none_and_a_state_that_is_not_usable_is_left_out() -> None:
    parent = f"00-{TRACE}-{SPAN}-01".encode()
    assert context_of([(b"traceparent", parent), (b"traceparent", parent)]) is None
    assert context_of([]) is None
    for state in ("x" * 513, "é"):
        assert context_of([(b"traceparent", parent), (b"tracestate", state.encode())]) == TraceContext(
            TRACE, SPAN, True
        )


def test_a_span_continues_the_clients_trace_and_follows_its_flag() -> None:
    for sampled, share in ((True, 0.0), (False, 1.0)):
        begun = Tracer(share, lambda trace: None).begin(TraceContext(TRACE, SPAN, sampled, "a=1"))
        assert (begun.trace_id, begun.sampled, begun.state) == (TRACE, sampled, "a=1")
        assert begun.span_id != SPAN
        assert len(begun.span_id) == 16


def test_the_share_of_requests_without_a_context_is_sampled() -> None:
    def sampled(share: float) -> int:
        tracer = Tracer(share, lambda trace: None)
        found = [tracer.begin(None) for _ in range(2000)]
        assert len({one.trace_id for one in found} | {one.span_id for one in found}) == 4000
        return sum(one.sampled for one in found)

    assert sampled(0.0) == 0
    assert sampled(1.0) == 2000
    assert 300 < sampled(0.25) < 700
