"""The traces of a real server's requests, as a collector receives them."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from attrs import frozen
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.server import run
from tests.server.otlp_receiver import Receiver, attributes, receiver

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0.5, "seed": 3}
CALL = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": f"say {CALL}"}], "max_tokens": 100}
TOOLS = {"tools": [{"type": "function", "function": {"name": "find"}}]}
SPAN = "b7ad6b7169203331"
TRACES = {
    name: f"{number:032x}"
    for number, name in enumerate(
        (
            "completion",
            "unsampled",
            "chat",
            "several",
            "many",
            "messages",
            "responses",
            "refused",
            "failed",
            "missing",
            "stopped",
            "left",
            "left_stream",
            "probe",
        ),
        1,
    )
}


BEGUN = "engine_time_to_first_token_seconds_count"
"""The metric that counts choices that have begun."""


@frozen
class Traced:
    collector: Receiver
    headers: dict[str, httpx.Headers]
    """Of the responses, by name of the trace."""
    began: float
    ended: float

    def spans(self, name: str) -> dict[str, list[Span]]:
        return self.collector.of_trace(TRACES[name])

    def request(self, name: str) -> tuple[Span, dict[str, Any]]:
        (found,) = (span for spans in self.spans(name).values() for span in spans if span.kind == Span.SPAN_KIND_SERVER)
        return found, attributes(found)


def parent(name: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACES[name]}-{SPAN}-{flags}", "tracestate": "vendor=1"}


@pytest.fixture(scope="module")
def traced(serve_fake: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """All requests of these tests, sent to one server, and what its collector has got when the server has stopped."""
    gate = tmp_path_factory.mktemp("gate") / "gate"
    gate.touch()
    options: dict[str, Any] = {
        "otlp_headers": ("x-collector-key=hush",),
        "otlp_resource": ("service.name=mine", "deployment.environment.name=test"),
        "trace_sample": 0.0,
        "options": {"delay": 0.002},
    }
    began = time.time()
    with receiver() as collector:
        with serve_fake(otlp_endpoint=collector.url, parser="hermes", **options) as server, server.client() as http:
            headers: dict[str, httpx.Headers] = {}

            def post(name: str, path: str, body: Any, flags: str = "01") -> None:
                headers[name] = http.post(path, json=body, headers=parent(name, flags)).headers

            post("completion", "/v1/completions", COMPLETION | {"stream": True})
            post("unsampled", "/v1/completions", COMPLETION, flags="00")
            post("chat", "/v1/chat/completions", CHAT | TOOLS)
            post("several", "/v1/completions", COMPLETION | {"prompt": ["one", "three"], "n": 2})
            post("many", "/v1/completions", COMPLETION | {"n": 30})
            post("messages", "/v1/messages", CHAT)
            post("responses", "/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 3})
            post("refused", "/v1/completions", COMPLETION | {"temperature": -1})
            post("failed", "/v1/completions", COMPLETION | {"prompt": "fail me"})
            post("stopped", "/v1/completions", COMPLETION | {"stop": "e", "max_tokens": 20, "seed": 0})
            headers["missing"] = http.get("/no/secret", headers=parent("missing")).headers
            headers["probe"] = http.get("/health", headers=parent("probe")).headers
            headers["new"] = http.post("/v1/completions", json=COMPLETION).headers
            headers["scraped"] = http.get("/metrics").headers
            held = COMPLETION | {"prompt": f"hold {gate}"}
            begun = server.metrics()[BEGUN]
            with server.asked(held, headers=parent("left")):
                server.until(lambda: server.metrics()[BEGUN] > begun)
            long = held | {"stream": True, "max_tokens": 200}
            with server.asked(long, headers=parent("left_stream"), until=b"data: "):
                pass
            server.until(lambda: server.metrics()['engine_requests_finished_total{finish_reason="abort"}'] >= 2)
            assert server.stop() == 0
            assert server.errors == ""
        yield Traced(collector, headers, began, time.time())


def test_the_span_of_a_request_continues_the_clients_trace(traced: Traced) -> None:
    span, found = traced.request("completion")
    assert (span.name, span.parent_span_id.hex(), span.trace_state) == ("POST /v1/completions", SPAN, "vendor=1")
    assert span.flags & 0x301 == 0x301
    assert traced.began < span.start_time_unix_nano / 1e9 < span.end_time_unix_nano / 1e9 < traced.ended
    assert traced.headers["completion"]["traceparent"] == f"00-{TRACES['completion']}-{span.span_id.hex()}-01"
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert found.pop("gen_ai.response.id").startswith("cmpl-")
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "client.address": "127.0.0.1",
        "engine.request_id": traced.headers["completion"]["x-request-id"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "engine",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["length"],
        "engine.preemptions": 1,
    }


def test_the_parts_of_a_request_follow_each_other(traced: Traced) -> None:
    spans, (request, _) = traced.spans("completion"), traced.request("completion")
    parts = [spans[name] for name in ("tokenize", "queue", "prefill", "decode")]
    ordered = [span for (span,) in parts]
    assert {span.parent_span_id for span in ordered} == {request.span_id}
    assert len({span.span_id for span in ordered} | {request.span_id}) == 5
    times = [time for span in ordered for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert request.start_time_unix_nano <= times[0]
    assert times[-1] <= request.end_time_unix_nano
    for before, after in ((1, 2), (2, 3)):
        assert ordered[before].end_time_unix_nano == ordered[after].start_time_unix_nano
    assert attributes(ordered[2]) == {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.cache_read.input_tokens": 2}
    assert attributes(ordered[3]) == {
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "engine.preemptions": 1,
    }


def test_a_request_whose_client_does_not_record_is_not_sent_but_named(traced: Traced) -> None:
    assert traced.spans("unsampled") == {}
    assert re.fullmatch(f"00-{TRACES['unsampled']}-[0-9a-f]{{16}}-00", traced.headers["unsampled"]["traceparent"])
    assert traced.headers["new"]["traceparent"].endswith("-00")  # trace_sample is 0
    assert "traceparent" not in traced.headers["scraped"]
    assert len({span.trace_id for span in traced.collector.spans}) == len(TRACES) - 1


@pytest.mark.parametrize(
    ("name", "path"), [("chat", "/v1/chat/completions"), ("messages", "/v1/messages"), ("responses", "/v1/responses")]
)
def test_each_protocol_of_conversations_is_a_chat(traced: Traced, name: str, path: str) -> None:
    span, found = traced.request(name)
    assert span.name == f"POST {path}"
    assert (found["gen_ai.operation.name"], found["http.route"]) == ("chat", path)
    assert found["gen_ai.usage.output_tokens"] > 0
    assert found["gen_ai.response.finish_reasons"] == ["length" if name == "responses" else "stop"]
    assert set(traced.spans(name)) == {f"POST {path}", "tokenize", "queue", "prefill", "decode"}


def test_each_choice_has_spans_up_to_a_limit(traced: Traced) -> None:
    spans, (_, found) = traced.spans("several"), traced.request("several")
    assert found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.usage.input_tokens"] == 8
    assert found["gen_ai.usage.output_tokens"] == 16
    assert found["gen_ai.usage.cache_read.input_tokens"] == 4
    assert len(spans["tokenize"]) == 1
    assert [attributes(span)["engine.choice"] for span in spans["decode"]] == [0, 1, 2, 3]
    assert [attributes(span)["gen_ai.usage.input_tokens"] for span in spans["prefill"]] == [3, 3, 5, 5]
    assert found["engine.preemptions"] == 2
    assert [attributes(span)["engine.preemptions"] for span in spans["decode"]] == [0, 0, 1, 1]
    assert len(traced.spans("many")["decode"]) == 16
    assert traced.request("many")[1]["gen_ai.usage.output_tokens"] == 120


def test_a_choice_that_a_stop_string_ends_has_all_its_parts(traced: Traced) -> None:
    (decode,) = traced.spans("stopped")["decode"]
    assert attributes(decode)["gen_ai.response.finish_reasons"] == ["stop"]
    assert "engine.preemptions" not in attributes(decode) | traced.request("stopped")[1], "the engine has not said"
    assert decode.end_time_unix_nano > decode.start_time_unix_nano
    assert traced.spans("stopped")["queue"]


def test_errors_have_a_type_and_failures_of_the_server_a_status(traced: Traced) -> None:
    span, found = traced.request("refused")
    assert (span.status.code, found["error.type"]) == (Status.STATUS_CODE_UNSET, "400")
    assert list(traced.spans("refused")) == [span.name]
    span, found = traced.request("failed")
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "this request failed in the engine")
    assert (found["error.type"], found["http.response.status_code"]) == ("500", 500)
    span, found = traced.request("missing")
    assert (span.name, found["http.response.status_code"]) == ("GET", 404)
    assert "http.route" not in found
    assert traced.request("probe")[0].name == "GET /health"


@pytest.mark.parametrize("name", ["left", "left_stream"])
def test_a_client_that_leaves_ends_the_spans_with_an_error(traced: Traced, name: str) -> None:
    span, found = traced.request(name)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.status.message == "the client disconnected before the end of the response"
    assert found["error.type"] == "client_disconnected"
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    (decode,) = traced.spans(name)["decode"]
    assert (decode.status.code, decode.status.message) == (Status.STATUS_CODE_ERROR, "ended by abort")
    assert 1 <= attributes(decode)["gen_ai.usage.output_tokens"] < 200


def test_the_collector_gets_keys_and_the_service_but_no_content(traced: Traced) -> None:
    headers = traced.collector.headers[0]
    assert headers["x-collector-key"] == "hush"
    assert headers["content-type"] == "application/x-protobuf"
    assert set(traced.collector.paths) == {"/v1/traces"}
    (resource,) = traced.collector.messages[0].resource_spans
    found = attributes(resource.resource)
    assert (found["service.name"], found["deployment.environment.name"]) == ("mine", "test")
    everything = b"".join(message.SerializeToString() for message in traced.collector.messages)
    assert b"hello" not in everything
    assert b"tool_call" not in everything
    assert b"find" not in everything


def test_a_collector_that_is_down_affects_neither_answers_nor_the_end(serve_fake: Serve) -> None:
    with socket.socket() as silent, contextlib.ExitStack() as stack:
        silent.bind(("127.0.0.1", 0))  # no one else can take its port, and no one listens there
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/there"
        server = stack.enter_context(serve_fake(otlp_endpoint=url))
        http = stack.enter_context(server.client())
        answered = http.post("/v1/completions", json=COMPLETION)
        assert answered.status_code == 200
        assert answered.headers["traceparent"].endswith("-01")
        server.until(lambda: f"traces of requests cannot be sent to {url}: " in server.errors)
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        assert server.stop() == 0
        assert "lost traces of requests: " in server.errors


def test_requests_are_not_traced_unless_it_is_asked_for(http: httpx.Client) -> None:
    headers = {"traceparent": f"00-{TRACES['completion']}-{SPAN}-01"}
    assert "traceparent" not in http.post("/v1/completions", json=COMPLETION, headers=headers).headers


def test_tracing_without_its_package_is_refused_at_the_start(
    fake_config: Callable[..., EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.find_spec", lambda name: None if "opentelemetry" in name else object())
    with pytest.raises(ConfigError, match=r"needs opentelemetry-proto; install it with `pip install 'opentelemetry-pr"):
        run(fake_config(otlp_endpoint="http://localhost:4318"))
