"""The HTTP application: all routes, middleware, and error responses."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.core.errors import InvalidRequestError
from engine.core.plugin_host import Plugins
from engine.server.front_end.errors import ApiError, excerpt
from engine.server.http import admin, chat, completions, openapi, status, tokenize
from engine.server.http.access import PUBLIC, AccessControl
from engine.server.http.errors import error_response, json_response
from engine.server.http.http_counter import HttpCounter
from engine.server.http.limits import RequestLimits
from engine.server.http.page import Page
from engine.server.http.plugin_routes import plugin_routes, starlette_routes
from engine.server.http.request_log import RequestLog
from engine.server.http.request_timeout import RequestTimeout
from engine.server.http.service import Service
from engine.server.http.tracing import Tracing
from engine.server.shared.api_keys import ApiKeys
from engine.server.shared.limits_table import LimitsTable

EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "traceparent",
    "x-skipped-tools",
    "x-parameters-without-effect",
)
"""Headers of responses that pages of other origins may read."""


def make_app(
    service: Service, api_keys: Sequence[str], table: LimitsTable | None, plugins: Plugins, *, warn: bool = True
) -> ASGIApp:
    """Make the application; the engine must have started.

    api_keys: empty if clients need none. table: counts for the limits of each key; None: no limits. plugins: may add
    routes. warn: whether to log a warning for each plugin that fails to add its routes.
    """
    app = FastAPI(title="engine", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routers = [module.routes(service) for module in (completions, chat, tokenize, status, admin)]
    public = PUBLIC
    if service.limits.page:
        page = Page()
        routers.append(page.routes())
        public |= page.paths
    for router in routers:
        app.include_router(router)
    built_in = [*app.routes, Route(openapi.PATH, json_response)]  # taken even if the server does not describe itself
    of_plugins = plugin_routes(service, plugins, built_in, warn=warn)
    added = starlette_routes(of_plugins)
    app.routes.extend(added)
    service.error_bodies |= {one.path: one.error_body for one in of_plugins if one.error_body is not None}
    if service.limits.openapi:
        routers.append(openapi.routes(service, of_plugins, has_keys=len(api_keys) > 0))
        app.include_router(routers[-1])
    counter = HttpCounter(service.client.metrics.http, [*(one for each in routers for one in each.routes), *added])
    service.http_routes = counter.routes
    limits = RequestLimits(service.limits, table)
    if service.limits.request_timeout:
        app.add_middleware(RequestTimeout, seconds=service.limits.request_timeout)
    app.add_middleware(AccessControl, service=service, keys=ApiKeys(api_keys), limits=limits, public=public)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(InvalidRequestError)
    async def invalid_request(request: Request, error: InvalidRequestError) -> Response:
        return error_response(ApiError(400, str(error), param=error.parameter), request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return error_response(_routing_error(request, error), request.scope)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        failure = ApiError(
            500,
            "internal server error; see the server's log",
            headers={"connection": "close"},  # what handles the exception after this response closes it
        )
        return error_response(failure, request.scope)

    config = service.limits
    if not config.allowed_origins:
        return _outermost(service, app, counter)
    return _outermost(
        service,
        CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=EXPOSED,
        ),
        counter,
    )


def _outermost(service: Service, app: ASGIApp, counter: HttpCounter) -> ASGIApp:
    """The application inside the middleware that sees every response: the request log and tracing."""
    logged = RequestLog(app, counter, structured=service.limits.log_format == "json")
    return logged if service.tracer is None else Tracing(logged, service.tracer)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """The error of a request that no route answers."""
    method, path = request.method, excerpt(request.scope["path"])
    message = f"{method} {path}: {error.detail}"
    if error.status_code == 404:
        message = f"there is no {method} {path}; check the path (routes of OpenAI's API begin with /v1)"
    elif error.status_code == 405:
        message = f"{path} does not accept {method}; use {(error.headers or {}).get('Allow', 'another method')}"
    return ApiError(error.status_code, message, headers=error.headers)
