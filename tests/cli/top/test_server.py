"""What `engine top` asks of a server, and which answers it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.cli.errors import ServerError
from engine.cli.top.server import Health, WatchedServer
from engine.core.errors import ConfigError, EngineError, InvalidRequestError
from tests.cli.top.metrics_server import MetricsServer, metrics_server
from tests.cli.top.scrapes import metrics


@pytest.fixture
def watched(served: MetricsServer) -> Iterator[WatchedServer]:
    server = WatchedServer(served.url)
    yield server
    server.close()


def test_all_answers_come_over_one_connection(served: MetricsServer, watched: WatchedServer) -> None:
    assert watched.scrape().sum("engine_steps_total") == 100
    assert watched.health() == Health(status="ok")
    watched.scrape()
    assert len(served.clients) == 1


def test_a_connection_that_the_server_has_closed_is_opened_again(served: MetricsServer, watched: WatchedServer) -> None:
    served.closing = True
    for _ in range(3):
        watched.scrape()
    assert len(served.clients) == 3


def test_the_key_is_sent_and_a_missing_one_says_how_to_give_it(served: MetricsServer) -> None:
    served.status, served.text = 401, '{"error": {"message": "the API key is missing or wrong"}}'
    server = WatchedServer(served.url, "secret")
    with pytest.raises(ConfigError, match=r"401: the API key is missing or wrong .*ENGINE_API_KEY"):
        server.scrape()
    server.close()
    assert served.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("status", "body", "error", "sentence"),
    [
        (200, metrics(prefix="vllm:").replace("engine_time", "vllm:time"), ConfigError, "--metrics-names both"),
        (200, "vllm:num_requests_running 1\n", ConfigError, "they are vLLM's"),
        (200, "up 1\n", ConfigError, "there is no engine_up among them"),
        (200, metrics().replace("engine_kv_blocks", "engine_blocks"), ConfigError, "engine_kv_blocks, so .* older"),
        (200, "<html>", ServerError, "not Prometheus' text format"),
        (404, "", ConfigError, "is this the address of `engine serve`"),
        (502, "", ServerError, "502: Bad Gateway"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    served: MetricsServer, watched: WatchedServer, status: int, body: str, error: type[EngineError], sentence: str
) -> None:
    served.status, served.text = status, body
    with pytest.raises(error, match=sentence):
        watched.scrape()


def test_health_has_a_sentence_per_fault(served: MetricsServer, watched: WatchedServer) -> None:
    served.health = {"status": "failed", "level": "loop", "reason": "it hangs", "restart": "in 3 s"}
    assert watched.health() == Health(status="failed", faults=("failed: it hangs; in 3 s",))
    fine = {"replica": 0, "status": "ok"}
    served.health = {
        "status": "degraded",
        "replicas": [fine, {"replica": 1, "status": "starting", "reason": "it exited"}],
    }
    assert watched.health() == Health(status="degraded", faults=("replica 1: starting: it exited",))


def test_a_server_that_is_gone_is_said() -> None:
    with metrics_server() as server:
        url = server.url
    with pytest.raises(ServerError, match="cannot be reached: Connection refused"):
        WatchedServer(url).scrape()


def test_a_path_before_the_servers_own_is_kept(served: MetricsServer) -> None:
    server = WatchedServer(served.url + "/prefix/v1")
    server.scrape()
    assert server.url == served.url + "/prefix"
    server.close()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:x", "http://host/?a", "http://h\n"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not the URL of a server"):
        WatchedServer(url)
