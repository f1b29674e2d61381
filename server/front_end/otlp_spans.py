"""Makes the spans of requests that have ended, as the message of OTLP, OpenTelemetry's protocol.

A request has a SERVER span and, below it, a span for each part: tokenize, then queue, prefill and decode of each
choice. Names of attributes are OpenTelemetry's, for HTTP and for generative AI; our own begin with `engine.`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags, Status

from engine.core.types import FINISH_ABORT, FINISH_ERROR
from engine.server.front_end.request_trace import Attributes, ChoiceTrace, GenerationTrace, RequestTrace

CLIENT_LEFT = "client_disconnected"
"""error.type of a request whose client left before the end of the response."""
MAX_KEPT = 2048
"""Attributes that are kept as messages; beyond that the least recently used is forgotten."""


class SpanEncoder:
    """Encodes batches of traces."""

    def __init__(self, resource: Mapping[str, str], version: str) -> None:
        """resource: attributes of the service. version: the engine's."""
        self._resource = Resource(attributes=_pairs(dict(resource)))
        self._scope = InstrumentationScope(name="engine", version=version)
        self._random = random.Random()

    def encode(self, traces: Iterable[RequestTrace], clock_offset: float) -> tuple[bytes, int]:
        """The message with all spans of some traces, and the number of spans.

        clock_offset: time.time() less time.monotonic(), seconds.
        """
        spans = [span for trace in traces for span in self._spans(trace, clock_offset)]
        scope_spans = ScopeSpans(scope=self._scope, spans=spans)
        message = ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[scope_spans])]
        )
        return message.SerializeToString(), len(spans)

    def _spans(self, trace: RequestTrace, offset: float) -> Iterator[Span]:
        """The spans of a request, its own first."""
        context, generation = trace.context, trace.generation
        flags = int(SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK) | 1
        trace_id, span_id = bytes.fromhex(context.trace_id), bytes.fromhex(context.span_id)
        failed = trace.status >= 500 or not trace.complete or (bool(trace.error_type) and trace.status < 400)
        remote = int(SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK) if trace.parent is not None else 0
        yield Span(
            trace_id=trace_id,
            span_id=span_id,
            parent_span_id=b"" if trace.parent is None else bytes.fromhex(trace.parent.span_id),
            trace_state=context.state,
            flags=flags | remote,
            name=f"{trace.method} {trace.route}".rstrip(),
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=_nanoseconds(trace.began + offset),
            end_time_unix_nano=_nanoseconds(trace.ended + offset),
            attributes=_pairs(_request_attributes(trace)),
            status=Status(code=Status.STATUS_CODE_ERROR, message=_failure(trace)) if failed else None,
        )
        for name, start, end, attributes, error in _parts(trace, generation):
            yield Span(
                trace_id=trace_id,
                span_id=(self._random.getrandbits(64) or 1).to_bytes(8, "big"),
                parent_span_id=span_id,
                trace_state=context.state,
                flags=flags,
                name=name,
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=_nanoseconds(start + offset),
                end_time_unix_nano=_nanoseconds(max(start, end) + offset),
                attributes=_pairs(attributes),
                status=Status(code=Status.STATUS_CODE_ERROR, message=error) if error else None,
            )


_Part = tuple[str, float, float, Attributes, str]
"""(name, start, end, attributes, error) of a span below that of the request; times are time.monotonic()."""


def _parts(trace: RequestTrace, generation: GenerationTrace | None) -> Iterator[_Part]:
    if generation is None:
        return
    if trace.preparing is not None:
        yield "tokenize", trace.preparing, generation.arrival, {}, ""
    for number, choice in enumerate(generation.choices):
        attributes: Attributes = {"engine.choice": number} if len(generation.choices) > 1 else {}
        yield from _choice_parts(choice, generation.arrival, trace.ended, attributes)


def _choice_parts(choice: ChoiceTrace, arrival: float, latest: float, common: Attributes) -> Iterator[_Part]:
    """The parts of a choice, up to the one in which it ended. latest: the end of the request."""
    ended = latest if choice.ended is None else choice.ended
    error = f"ended by {choice.finish_reason}" if choice.finish_reason in (FINISH_ABORT, FINISH_ERROR) else ""
    if choice.scheduled is None and choice.first_token is None:
        yield "queue", arrival, ended, common, error
        return
    scheduled = arrival if choice.scheduled is None else choice.scheduled
    first_token = ended if choice.first_token is None else choice.first_token
    yield "queue", arrival, scheduled, common, ""
    prompt: Attributes = {
        "gen_ai.usage.input_tokens": choice.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": choice.cached_tokens,
    }
    yield "prefill", scheduled, first_token, common | prompt, ""
    output: Attributes = {
        "gen_ai.usage.output_tokens": choice.output_tokens,
        "gen_ai.response.finish_reasons": (choice.finish_reason,),
    }
    if choice.preemptions is not None:
        output["engine.preemptions"] = choice.preemptions
    yield "decode", first_token, ended, common | output, error


def _request_attributes(trace: RequestTrace) -> Attributes:
    found: Attributes = {
        "http.request.method": trace.method,
        "url.path": trace.path,
        "url.scheme": trace.scheme,
        "network.protocol.version": trace.http_version,
    }
    if trace.route:
        found["http.route"] = trace.route
    if trace.status:
        found["http.response.status_code"] = trace.status
    if trace.client:
        found["client.address"] = trace.client
    if trace.request_id:
        found["engine.request_id"] = trace.request_id
    if trace.error_type:
        found["error.type"] = trace.error_type
    elif not trace.complete:
        found["error.type"] = CLIENT_LEFT
    elif trace.status >= 500:
        found["error.type"] = str(trace.status)
    if (generation := trace.generation) is not None:
        found |= generation.attributes
        found["gen_ai.usage.output_tokens"] = generation.output_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = generation.cached_tokens
        found["gen_ai.response.finish_reasons"] = tuple(choice.finish_reason for choice in generation.choices)
        preemptions = [choice.preemptions for choice in generation.choices if choice.preemptions is not None]
        if len(preemptions) == len(generation.choices):
            found["engine.preemptions"] = sum(preemptions)
    return found


def _failure(trace: RequestTrace) -> str:
    if trace.error_message:
        return trace.error_message
    if not trace.complete:
        return "the client disconnected before the end of the response"
    return ""


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _pairs(attributes: Mapping[str, object]) -> list[KeyValue]:
    return [_pair(key, value) for key, value in attributes.items()]


@lru_cache(MAX_KEPT, typed=True)
def _pair(key: str, value: object) -> KeyValue:
    """An attribute, which is copied into each span: most are the same in all requests of a server."""
    return KeyValue(key=key, value=_value(value))


def _value(value: object) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case tuple():
            return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=item) for item in value]))
    raise TypeError(f"a span has no attributes of type {type(value).__name__}")
