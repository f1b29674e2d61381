"""The server that `engine top` watches: its /metrics and /health, over one connection."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from engine.cli.api_key import KEY_VARIABLES
from engine.cli.errors import ServerError
from engine.cli.http_client import check_key, error_sentence, failure, key_sources, split_url
from engine.cli.metrics.scrape import Scrape
from engine.core.errors import ConfigError

TIMEOUT = 10.0
"""Seconds within which the server must answer."""
NEEDED = (
    "engine_up",
    "engine_restarts_total",
    "engine_num_requests_running",
    "engine_num_requests_waiting",
    "engine_requests_finished_total",
    "engine_time_to_first_token_seconds_bucket",
    "engine_inter_token_latency_seconds_bucket",
    "engine_prompt_tokens_total",
    "engine_prompt_tokens_by_source_total",
    "engine_generation_tokens_total",
    "engine_kv_blocks",
    "engine_prefix_cache_queries_total",
    "engine_num_preemptions_total",
    "engine_steps_total",
    "engine_admission_rejections_total",
)
"""Metrics that every server of this version exports under our names."""


@frozen(kw_only=True)
class Health:
    """What /health answers."""

    status: str
    """ok, degraded, starting, failed or draining."""
    faults: tuple[str, ...] = ()
    """A sentence per replica that is not healthy."""


class WatchedServer:
    """Asks one server over one connection, so that the same front end answers as long as the connection lives."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """url: http://localhost:8000, or with a path before the server's own. Raises InvalidRequestError otherwise."""
        parts = split_url(url, "URL")
        check_key(api_key, "--api-key")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def scrape(self) -> Scrape:
        """The server's metrics now. Raises ConfigError if they cannot be shown, ServerError if none come."""
        status, body = self._get("/metrics")
        if status != 200:
            raise self._refusal(status, body)
        found = Scrape.of(body.decode(errors="replace"), {}, time.monotonic())
        if (objection := refusal_of(self.url, found)) is not None:
            raise ConfigError(objection)
        return found

    def health(self) -> Health:
        """The state of the server and of its replicas. Raises ServerError."""
        _, body = self._get("/health")
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("status"), str):
            raise ServerError(f"{self.url} answers /health with {body[:60]!r}, which is not an answer of engine serve")
        return Health(status=found["status"], faults=tuple(_faults(found)))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET request; a connection that the server has closed meanwhile is opened again."""
        used = self._connection.sock is not None
        try:
            try:
                return self._get_once(path)
            except (ConnectionError, http.client.BadStatusLine):
                if not used:
                    raise
                self._connection.close()
                return self._get_once(path)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerError(f"{self.url} cannot be reached: {failure(error, TIMEOUT)}") from error

    def _get_once(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", self._path + path, headers=self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def _refusal(self, status: int, body: bytes) -> ConfigError | ServerError:
        """The error of an answer to /metrics whose status is not 200."""
        try:
            said = error_sentence(json.loads(body))
        except ValueError:
            said = http.client.responses.get(status, "")
        text = f"{self.url}/metrics answers {status}: {said}"
        if status == 401:
            text += f" ({key_sources('--api-key', KEY_VARIABLES)})"
        elif status == 404:
            text += "; is this the address of `engine serve`?"
        return ConfigError(text) if status < 500 else ServerError(text)


def refusal_of(url: str, scrape: Scrape) -> str | None:
    """Why the metrics of a server cannot be shown; None if they can."""
    missing = [name for name in NEEDED if name not in scrape.samples]
    if not missing:
        return None
    vllm = any(name.startswith("vllm:") for name in scrape.samples)
    if vllm and "engine_up" in scrape.samples:
        return (
            f"{url} exports its metrics under vLLM's names, and `engine top` reads our own; start the server with "
            "--metrics-names both, or without --metrics-names vllm"
        )
    if "engine_up" in scrape.samples:
        return (
            f"{url} does not export {missing[0]}, so the server is older than this command; upgrade the server, or run "
            "`engine top` of the server's version"
        )
    who = "they are vLLM's" if vllm else "there is no engine_up among them"
    return f"the metrics of {url} are not those of `engine serve`: {who}; give the address of an engine server"


def _faults(body: Mapping[str, Any]) -> list[str]:
    """A sentence per replica that is not healthy, or for the only one."""
    replicas = body.get("replicas")
    if isinstance(replicas, list):
        return [
            f"replica {one.get('replica')}: {text}"
            for one in replicas
            if isinstance(one, dict)
            for text in _faults(one)
        ]
    if body.get("status") == "ok":
        return []
    words = [str(body[key]) for key in ("reason", "restart") if body.get(key)]
    return [f"{body.get('status')}: {'; '.join(words)}" if words else str(body.get("status"))]
