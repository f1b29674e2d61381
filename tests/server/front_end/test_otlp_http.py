from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.config import ServerConfig
from engine.core.errors import ConfigError
from engine.server.front_end.otlp_http import Collector, RefusedError, UnavailableError
from tests.server.otlp_receiver import receiver


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector/otlp/v1/traces", "http://collector/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_that_of_traces(endpoint: str, url: str) -> None:
    assert Collector(ServerConfig(otlp_endpoint=endpoint)).url == url


def test_the_status_of_a_collector_says_whether_spans_may_be_sent_again() -> None:
    with receiver() as found:
        collector = Collector(ServerConfig(otlp_endpoint=f"{found.url}/here", otlp_headers=("a=b=c",)))
        assert collector.send(b"") == (0, "")
        assert found.paths == ["/here"]
        assert found.headers[0]["a"] == "b=c"
        found.status = 503
        with pytest.raises(UnavailableError, match="it answers 503"):
            collector.send(b"")
        found.status = 404
        with pytest.raises(RefusedError, match="it answers 404"):
            collector.send(b"")
        collector.close()


def test_a_certificate_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    config = ServerConfig(otlp_endpoint="https://localhost", otlp_certificate=str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"otlp_certificate: .*missing.pem cannot be used \(No such file"):
        Collector(config)
