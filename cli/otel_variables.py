"""Settings from OpenTelemetry's environment variables, which operators set for all programs of a machine or cluster.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from engine.core.errors import ConfigError

EXPORTER = "OTEL_EXPORTER_OTLP_"
PROTOCOL = "http/protobuf"
"""The one form of OTLP that the server speaks."""
SAMPLERS = {"parentbased_always_on": 1.0, "parentbased_always_off": 0.0, "parentbased_traceidratio": None}
"""Values of OTEL_TRACES_SAMPLER -> share; None: OTEL_TRACES_SAMPLER_ARG says it. Others ignore the client's flag."""


def tracing_defaults(variables: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Dotted key -> (value, variable) of the settings that are given by variables. Raises ConfigError."""
    found: dict[str, tuple[object, str]] = {}
    off = variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or variables.get("OTEL_TRACES_EXPORTER") == "none"
    endpoint, origin = _of_traces(variables, "ENDPOINT")
    if endpoint and not off:
        protocol, other = _of_traces(variables, "PROTOCOL")
        if protocol not in ("", PROTOCOL):
            raise ConfigError(
                f"{other} is {protocol}, but traces are sent by {PROTOCOL} only, which collectors take at port 4318; "
                f"set it to {PROTOCOL} and {origin} to that port, or OTEL_TRACES_EXPORTER to none"
            )
        base = origin == f"{EXPORTER}ENDPOINT"
        found["server.otlp_endpoint"] = (f"{endpoint.rstrip('/')}/v1/traces" if base else endpoint, origin)
        if sampler := variables.get("OTEL_TRACES_SAMPLER", ""):
            found["server.trace_sample"] = _share(sampler, variables.get("OTEL_TRACES_SAMPLER_ARG", ""))
    headers, origin = _of_traces(variables, "HEADERS")
    if headers:
        found["server.otlp_headers"] = (_pairs(headers), origin)
    certificate, origin = _of_traces(variables, "CERTIFICATE")
    if certificate:
        found["server.otlp_certificate"] = (certificate, origin)
    resource = _pairs(variables.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if resource:
        found["server.otlp_resource"] = (resource, "OTEL_RESOURCE_ATTRIBUTES")
    if name := variables.get("OTEL_SERVICE_NAME", ""):
        others = [pair for pair in resource if not pair.startswith("service.name=")]
        found["server.otlp_resource"] = ([*others, f"service.name={name}"], "OTEL_SERVICE_NAME")
    return found


def _of_traces(variables: Mapping[str, str], name: str) -> tuple[str, str]:
    """The value and name of the variable for traces, or else of that for all signals."""
    for variable in (f"{EXPORTER}TRACES_{name}", f"{EXPORTER}{name}"):
        if value := variables.get(variable, "").strip():
            return value, variable
    return "", ""


def _share(sampler: str, argument: str) -> tuple[object, str]:
    """The value of server.trace_sample and the variable it is from. Raises ConfigError."""
    if sampler not in SAMPLERS:
        raise ConfigError(
            f"OTEL_TRACES_SAMPLER is {sampler}, but the server always follows the sampled flag of a client's "
            f"traceparent; set it to one of {', '.join(SAMPLERS)}, or leave it out and give --trace-sample"
        )
    share = SAMPLERS[sampler]
    if share is not None:
        return share, "OTEL_TRACES_SAMPLER"
    try:
        return float(argument or 1), "OTEL_TRACES_SAMPLER_ARG"
    except ValueError:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG is {argument!r}; give a number from 0 to 1") from None


def _pairs(text: str) -> list[str]:
    """NAME=VALUE,... as a list, without percent-encoding."""
    return [unquote(pair.strip()) for pair in text.split(",") if pair.strip()]
