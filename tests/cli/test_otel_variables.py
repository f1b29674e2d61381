from __future__ import annotations

import pytest

from engine.cli.otel_variables import tracing_defaults
from engine.core.config import EngineConfig, load_config
from engine.core.errors import ConfigError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}


def test_the_variables_of_opentelemetry_give_the_settings_of_tracing() -> None:
    found = tracing_defaults(
        ENDPOINT
        | {
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.25",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, other=c",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=old,k8s.pod.name=pod",
            "OTEL_SERVICE_NAME": "new",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
    )
    resolved = load_config(None, {}, found)
    server = resolved.config.server
    assert server.otlp_endpoint == "http://collector:4318/v1/traces"
    assert resolved.origins["server.otlp_endpoint"] == "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert server.trace_sample == 0.25
    assert server.otlp_headers == ("api-key=a b", "other=c")
    assert server.otlp_certificate == "/ca.pem"
    assert server.otlp_resource == ("k8s.pod.name=pod", "service.name=new")


def test_the_variables_for_traces_go_before_those_for_all_signals() -> None:
    found = tracing_defaults(
        ENDPOINT
        | {
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:4318/in",
        }
    )
    assert found == {"server.otlp_endpoint": ("http://traces:4318/in", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")}


@pytest.mark.parametrize("more", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_requests_are_not_traced_where_the_variables_turn_traces_off(more: dict[str, str]) -> None:
    assert tracing_defaults({}) == {}
    assert tracing_defaults(ENDPOINT | more | {"OTEL_TRACES_SAMPLER": "always_on"}) == {}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, but .* port 4318"),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, "OTEL_TRACES_SAMPLER is always_on, but .* --trace-sample"),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "all"},
            "OTEL_TRACES_SAMPLER_ARG is 'all'; give a number",
        ),
    ],
)
def test_a_variable_that_cannot_be_followed_is_refused(more: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tracing_defaults(ENDPOINT | more)


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        (
            "otlp_endpoint",
            "collector:4318",
            "'collector:4318' is no address of a collector; write it as http://HOST:4318",
        ),
        ("otlp_endpoint", "http://me:secret@host", "is no address"),
        ("otlp_headers", ["hush"], "a header is not of the form NAME=VALUE"),
        ("otlp_resource", ["=x"], "an attribute is not of the form NAME=VALUE"),
        ("trace_sample", 1.5, "1.5 is out of range; give 0 to 1"),
    ],
)
def test_a_setting_of_tracing_that_cannot_be_is_refused(setting: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        load_config(None, {f"server.{setting}": value})
    assert "hush" not in str(refused.value)
    assert EngineConfig().server.otlp_endpoint == ""
