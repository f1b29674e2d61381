"""Routes of plugins: calls the hook `register_routes`, and implements Routes, what they use of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from engine.core.config import ServerConfig
from engine.core.errors import InvalidRequestError, PluginError
from engine.core.plugin_host import EXITS, Plugins, raise_interrupt, said, shown
from engine.core.protocols import API, AnswerWriter, ApiError, Call, Conversation, Reply, Routes
from engine.core.types import SamplingParams
from engine.server.http.conversation import encode, respond
from engine.server.http.errors import READ, ErrorBody, json_response
from engine.server.http.plugin_writer import PluginWriter
from engine.server.http.request_bodies import read
from engine.server.http.responses import prepared
from engine.server.http.service import Service

log = logging.getLogger(__name__)

BodyT = TypeVar("BodyT")


@frozen(kw_only=True)
class PluginRoute:
    """One route of a plugin."""

    plugin: str
    """With its distribution and version."""
    path: str
    methods: list[str]
    endpoint: Callable[[Request], Awaitable[Response]]
    body: type | None = None
    """The type of a POST request's JSON body."""
    summary: str = ""
    """For /openapi.json, which describes the route if this is not empty."""
    answer: type | None = None
    """The type of the JSON answer, if the plugin says it."""
    streams: bool = False
    error_body: ErrorBody | None = None


def plugin_routes(
    service: Service, plugins: Plugins, others: Iterable[BaseRoute], *, warn: bool = True
) -> list[PluginRoute]:
    """The routes of all plugins. A plugin that fails adds none.

    others: routes whose paths are taken. warn: whether to log a warning for each plugin that fails.
    """
    taken = list(others)
    found: list[PluginRoute] = []
    for plugin, manager in zip(plugins.loaded, plugins.managers, strict=True):
        routes = _PluginRoutes(service, str(plugin), taken, found)
        try:
            returned = manager.hook.register_routes(routes=routes)
            if returned:
                raise PluginError(f"its register_routes() returns {returned[0]!r}; it must return nothing")
        except BaseException as error:
            raise_interrupt(error)
            if warn:
                reason = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {said(error)}"
                log.warning("%s could not add its routes: %s", plugin, reason)
        else:
            found += routes.staged
            routes.staged = []
    return found


class _PluginRoutes(Routes):
    """See engine.core.protocols.Routes; collects the routes of one plugin."""

    def __init__(
        self, service: Service, plugin: str, taken: Iterable[BaseRoute], of_plugins: Iterable[PluginRoute]
    ) -> None:
        self.staged: list[PluginRoute] = []
        self._service = service
        self._plugin = plugin
        self._taken = list(taken)
        self._of_plugins = list(of_plugins)

    def post(
        self,
        path: str,
        body: type[BodyT],
        handler: Callable[[BodyT, Call], Awaitable[Reply]],
        *,
        api: str,
        summary: str = "",
        answer: type | None = None,
        streams: bool = False,
        error_body: Callable[[ApiError], object] | None = None,
    ) -> None:
        _check_types(f"POST {path}", body, answer)

        async def endpoint(request: Request) -> Response:
            given: Any = await read(request, body, self._service.limits)
            return prepared(partial(self._guarded, path, partial(handler, given, _call(request))))

        self._add(
            api,
            PluginRoute(
                plugin=self._plugin,
                path=path,
                methods=["POST"],
                endpoint=endpoint,
                body=body,
                summary=summary,
                answer=answer,
                streams=streams,
                error_body=error_body,
            ),
        )

    def get(
        self,
        path: str,
        handler: Callable[[Call], Awaitable[Reply]],
        *,
        api: str,
        summary: str = "",
        answer: type | None = None,
        error_body: Callable[[ApiError], object] | None = None,
    ) -> None:
        _check_types(f"GET {path}", answer)

        async def endpoint(request: Request) -> Response:
            return prepared(partial(self._guarded, path, partial(handler, _call(request))))

        self._add(
            api,
            PluginRoute(
                plugin=self._plugin,
                path=path,
                methods=READ,
                endpoint=endpoint,
                summary=summary,
                answer=answer,
                error_body=error_body,
            ),
        )

    @property
    def model(self) -> str:
        return self._service.name

    @property
    def max_len(self) -> int:
        return self._service.max_len

    @property
    def limits(self) -> ServerConfig:
        return self._service.limits

    @property
    def chat_template(self) -> str:
        return self._service.chat_template

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._service.render(messages)

    @property
    def default_params(self) -> SamplingParams:
        return self._service.default_params

    def check_model(self, model: str | None) -> None:
        self._service.check_model(model)

    async def respond(
        self,
        name: str,
        conversation: Conversation,
        writer: AnswerWriter,
        *,
        stream: bool,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        named = PluginWriter(writer, self._plugin)
        return await respond(self._service, name, conversation, named, stream=stream, headers=headers)

    async def count_tokens(self, conversation: Conversation) -> int:
        return len((await encode(self._service, conversation)).tokens)

    def token_bytes(self, token: int) -> bytes:
        return self._service.tokenizer.token_bytes(token)

    def new_call_id(self) -> str:
        return self._service.new_call_id()

    def json(self, body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
        return json_response(body, status=status, headers=headers)

    def _add(self, api: str, route: PluginRoute) -> None:
        """Stage a route. Raises PluginError."""
        path, what = route.path, f"{route.methods[0]} {route.path}"
        if api != API:
            raise PluginError(
                f"{what} is for version {api!r} of the contract of routes, but this engine has version {API!r}; "
                "install a version of the plugin made for it"
            )
        if not isinstance(path, str) or not path.startswith("/") or any(char in path for char in "{}?#"):
            raise PluginError(f"{path!r} is no path; give a literal one, such as /v1/mine")
        for method in ("GET", "POST"):
            scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
            if any(one.matches(scope)[0] is Match.FULL for one in self._taken):
                raise PluginError(f"the path {path} belongs to the server; choose another")
        for other in self._of_plugins:
            if other.path == path:
                raise PluginError(f"the path {path} is taken by {other.plugin}; choose another")
        for other in self.staged:
            if other.path == path and other.methods == route.methods:
                raise PluginError(f"it adds {what} twice")
            if other.path == path and other.error_body != route.error_body:
                raise PluginError(f"the routes of {path} have different error_body; a path has one shape of errors")
        self.staged.append(route)

    async def _guarded(self, path: str, handle: Callable[[], Awaitable[Reply]]) -> Reply:
        """Call a handler; what it raises or returns by mistake is logged with the plugin's name and becomes a 500."""
        try:
            reply = await handle()
            if not callable(reply):
                raise TypeError(f"the handler returned {shown(reply)}, not a Reply, which methods of Routes return")
            return reply
        except (ApiError, InvalidRequestError):
            raise
        except (Exception, asyncio.CancelledError, *EXITS) as error:
            raise_interrupt(error)
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise  # the request was cancelled, rather than something that the handler awaited
            log.exception("%s failed in its route %s", self._plugin, path)
            raise ApiError(500, f"the plugin of {path} failed; see the server's log") from None


def starlette_routes(routes: Iterable[PluginRoute]) -> list[Route]:
    """The routes as the application has them: one for each route of a plugin."""
    return [Route(one.path, one.endpoint, methods=one.methods) for one in routes]


def _check_types(what: str, *kinds: type | None) -> None:
    """Raise PluginError for a type that msgspec cannot decode or describe."""
    for kind in kinds:
        if kind is not None:
            try:
                msgspec.json.Decoder(kind)
                msgspec.json.schema(kind)
            except TypeError as error:
                raise PluginError(f"{what} has the type {kind!r}, which msgspec does not take: {error}") from None


def _call(request: Request) -> Call:
    return Call(headers=dict(request.headers), query=dict(request.query_params))
