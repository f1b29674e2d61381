"""OTLP over HTTP: sends encoded spans to an OpenTelemetry collector, from one thread."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

import engine
from engine.core.config import ServerConfig
from engine.core.errors import ConfigError

TRACES_PATH = "/v1/traces"
"""Path of a collector whose endpoint names none."""
SEND_TIMEOUT = 10.0
"""Seconds in which the collector must answer."""
MAX_ANSWER = 2**16
"""Bytes of an answer that are read."""
RETRYABLE = frozenset({429, 502, 503, 504})
"""Statuses after which the same spans may be sent again (the specification of OTLP)."""


class UnavailableError(Exception):
    """The collector cannot take spans now; the same spans may be sent again."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        """pause: seconds that the collector asks for."""
        super().__init__(reason)
        self.pause = pause


class RefusedError(Exception):
    """The collector does not take these spans."""


class Collector:
    """One OpenTelemetry collector. The connection is kept open."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for a certificate that cannot be read."""
        url = urlsplit(config.otlp_endpoint)
        path = url.path if url.path.strip("/") else TRACES_PATH
        self.url = f"{url.scheme}://{url.netloc}{path}"
        self._path = f"{path}?{url.query}" if url.query else path
        self._headers = {
            **dict(pair(text) for text in config.otlp_headers),
            "content-type": "application/x-protobuf",
            "user-agent": f"engine/{engine.__version__}",
        }
        host = url.hostname or ""
        if url.scheme == "https":
            context = _tls_context(config.otlp_certificate)
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, url.port, timeout=SEND_TIMEOUT, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(host, url.port, timeout=SEND_TIMEOUT)

    def send(self, data: bytes) -> tuple[int, str]:
        """Send spans; (number of spans that the collector rejected, its reason).

        Raises UnavailableError, RefusedError, or the OSError or HTTPException of a failed connection.
        """
        reused = self._connection.sock is not None
        try:
            status, headers, answer = self._post(data)
        except (OSError, http.client.HTTPException):
            if not reused:
                raise
            status, headers, answer = self._post(data)  # an idle connection may have been closed meanwhile
        if status in RETRYABLE:
            raise UnavailableError(f"it answers {status}", _seconds(headers.get("retry-after", "")))
        if not 200 <= status < 300:
            raise RefusedError(f"it answers {status} {answer[:200].decode(errors='replace')!r}")
        rejected = ExportTraceServiceResponse()
        try:
            rejected.ParseFromString(answer)
        except ValueError:  # some answer in JSON, or with a page
            return 0, ""
        return rejected.partial_success.rejected_spans, rejected.partial_success.error_message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _post(self, data: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        try:
            self._connection.request("POST", self._path, data, self._headers)
            response = self._connection.getresponse()
            answer = response.read(MAX_ANSWER)
            if not response.isclosed():
                self._connection.close()
            return response.status, response.headers, answer
        except BaseException:
            self._connection.close()
            raise


def pair(text: str) -> tuple[str, str]:
    """Name and value of NAME=VALUE."""
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def resource(given: Sequence[str], instance: str) -> dict[str, str]:
    """The attributes of the service that traces name; given: server.otlp_resource. instance: name of the process."""
    return {
        "service.name": "engine",
        "service.version": engine.__version__,
        "service.instance.id": instance,
        **dict(pair(text) for text in given),
    }


def _tls_context(certificate: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificate or None)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"server.otlp_certificate: {certificate} cannot be used ({error.strerror or error}); give a PEM file of "
            "the authority that signed the collector's certificate"
        ) from None


def _seconds(text: str) -> float:
    """Retry-After in seconds; 0 if it is missing or a date."""
    return float(text) if text.isdecimal() else 0.0
