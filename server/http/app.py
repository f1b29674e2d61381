"""The HTTP application: all routes, the API key check, and error responses."""

from __future__ import annotations

import hmac

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.errors import InvalidRequestError
from engine.server.front_end.errors import ApiError
from engine.server.http import chat, completions, status, tokenize
from engine.server.http.errors import error_response
from engine.server.http.request_timeout import RequestTimeout
from engine.server.http.service import Service


def make_app(service: Service) -> FastAPI:
    """Make the application; the engine must have started."""
    app = FastAPI(title="engine", docs_url=None, redoc_url=None, openapi_url=None)
    for module in (completions, chat, tokenize, status):
        app.include_router(module.routes(service))
    if service.limits.request_timeout:
        app.add_middleware(RequestTimeout, seconds=service.limits.request_timeout)
    app.add_middleware(AccessControl, service=service)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(InvalidRequestError)
    async def invalid_request(_: Request, error: InvalidRequestError) -> Response:
        return error_response(ApiError(400, str(error), param=error.parameter))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def internal_error(_: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "internal server error; see the server's log"))

    return app


class AccessControl:
    """Middleware that refuses requests without the API key (except /health), and POST requests while draining."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._key = service.limits.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the application, or refuse the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif refusal := self._refusal(scope):
            await error_response(refusal)(scope, receive, send)
        elif scope["method"] == "POST":
            self._service.active += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._service.active -= 1
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._key and scope["path"] != "/health":
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            received = key.strip().encode("latin-1")
            if not hmac.compare_digest(received, self._key) or scheme.lower() != "bearer":
                return ApiError(
                    401,
                    "the API key is missing or wrong; send the header `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        if self._service.draining and scope["method"] == "POST":
            return ApiError(
                503,
                "the server is shutting down and accepts no new requests; send this request to another server",
                code="shutting_down",
                headers={"connection": "close", "retry-after": "10"},
            )
        return None
