"""The deployment `front-end`: answers HTTP, tokenizes, and sends requests to the engine replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.collector import finish_start
from engine.core.config import EngineConfig, ModelConfig
from engine.core.executors import MessageDecoder
from engine.core.hub import locate
from engine.core.logs import Process
from engine.core.parsers import Parser
from engine.core.plugin_host import Plugins, choose_parser, load_plugins
from engine.core.text import Tokenizer
from engine.server.front_end.errors import ApiError
from engine.server.front_end.logs import configure_logs
from engine.server.http.app import make_app
from engine.server.ray_serve.asgi import with_connections
from engine.server.ray_serve.cluster_state import POLL_SECONDS, ClusterState, RayService
from engine.server.ray_serve.options import engine_config
from engine.server.ray_serve.ray_link import RayClient
from engine.server.shared.api_keys import read_api_keys
from engine.server.shared.limits_table import LimitsTable, has_limits
from engine.server.shared.messages import LIMITS_FILE, METRICS_FILE, Started
from engine.server.shared.metrics_table import MetricsTable

log = logging.getLogger(__name__)

OpenTokenizer = Callable[[ModelConfig], Tokenizer]


class FrontEnd:
    """A replica of the deployment."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: bytes, engines: Any, open_tokenizer: OpenTokenizer | None = None
    ) -> None:
        """config: the EngineConfig. engines: Ray's handle of the engine replicas.

        Waits until one engine replica has started. Raises EngineError.
        """
        decoded = MessageDecoder[EngineConfig](EngineConfig).decode(config)
        configure_logs(Process("server", {"process": "front end"}), decoded.server)
        self._config = engine_config(attrs.evolve(decoded, model=await asyncio.to_thread(locate, decoded.model)))
        tokenizer, parser, plugins = await asyncio.to_thread(self._load, open_tokenizer or Tokenizer.of_model)
        started = MessageDecoder[Started](Started).decode(await engines.describe.remote())
        self._state = ClusterState(engines, self._config.server.health_timeout)
        await self._state.update()
        with tempfile.TemporaryDirectory(prefix="engine-") as directory:  # what is mapped stays
            keys = read_api_keys(self._config.server)
            metrics = MetricsTable.map(Path(directory) / METRICS_FILE, 1, 1, create=True)
            limits: LimitsTable | None = None
            if has_limits(self._config.server):
                LimitsTable.create(Path(directory) / LIMITS_FILE, 1, len(keys))
                limits = LimitsTable.map(Path(directory) / LIMITS_FILE, 1, len(keys), 0)
        self._client = RayClient(self._config, metrics, engines, self._state.fault)
        self._client.metrics.pid = os.getpid()
        service = RayService(self._config, self._client, tokenizer, started, int(time.time()), parser)
        service.state, service.cache = self._state, started.cache
        self.application: ASGIApp = with_connections(make_app(service, keys, limits, plugins))
        finish_start(freeze=self._config.server.gc_freeze)
        self._client.metrics.gc_pauses.listen()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def _load(self, open_tokenizer: OpenTokenizer) -> tuple[Tokenizer, Parser[Any], Plugins]:
        """The tokenizer, the output parser for its templates, and the plugins. Raises EngineError."""
        tokenizer = open_tokenizer(self._config.model)
        plugins = load_plugins(self._config.plugins, quiet=True)
        parser, choice = choose_parser(self._config, plugins, tokenizer.templates)
        if choice.notice:
            log.warning("%s", choice.notice)
        return tokenizer, parser, plugins

    async def _watch(self) -> None:
        """Keep the metrics and the state of the engines up to date; end requests that wait for a replica in vain."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self._client.metrics.beat()
            self._client.phases.update()
            await self._state.update()
            fault = self._state.fault()
            if fault is not None and time.time() - fault.since > self._config.server.health_timeout:
                message = f"the engine failed: {fault.reason}; Ray Serve has not replaced it yet, so try again later"
                self._client.fail(ApiError(503, message, code="engine_failed"))


def dispatcher() -> ASGIApp:
    """The application that Ray Serve calls: that of the replica in this process, once it has been made."""

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        from ray import serve

        if scope["type"] == "lifespan":  # comes before the replica is made, and there is nothing to do
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await serve.get_replica_context().servable_object.application(scope, receive, send)

    return dispatch
