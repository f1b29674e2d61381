"""Decides which requests reach a route: by host, origin, API key, limits of the key, and while the server drains."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.server.front_end.errors import ApiError, excerpt
from engine.server.http.errors import ERROR_BODY, error_response, invalid
from engine.server.http.hosts import AllowedHosts, is_cross_site
from engine.server.http.limits import RequestLimits
from engine.server.http.service import Service
from engine.server.shared.api_keys import ApiKeys

PUBLIC = frozenset({"/health", "/ping"})
"""Paths that never need an API key."""


class AccessControl:
    """Middleware that refuses requests before they reach a route, and counts those being answered."""

    def __init__(
        self, app: ASGIApp, service: Service, keys: ApiKeys, limits: RequestLimits, public: Collection[str] = PUBLIC
    ) -> None:
        """public: paths that need no API key."""
        self._app = app
        self._public = public
        self._limits = limits
        self._service = service
        self._keys = keys
        self._hosts = AllowedHosts(service.limits, has_keys=len(keys) > 0)
        self._origins = service.limits.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the application, or refuse the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (error_body := self._service.error_bodies.get(scope["path"])) is not None:
            scope["state"][ERROR_BODY] = error_body
        with ExitStack() as stack:
            try:
                key = self._check(scope)
                if scope["method"] == "POST":
                    if scope["path"] not in self._public:
                        stack.enter_context(self._limits.admit(max(0, key - 1)))
                    stack.enter_context(self._service.answering())
            except ApiError as refusal:
                self._service.client.metrics.count_rejected(refusal.code)
                await error_response(refusal, scope)(scope, receive, send)
                return
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> int:
        """The number of the client's API key, or 0. Raises ApiError unless the request may be answered."""
        headers = Headers(scope=scope)
        posted = scope["method"] == "POST"
        self._check_host(scope, headers)
        if posted and is_cross_site(headers, self._origins):
            raise ApiError(
                403,
                f"a page of {excerpt(headers.get('origin', 'another site'))} must not send this request; send "
                "application/json, and allow the origin with --allowed-origins",
                code="cross_site",
            )
        key = 0
        if self._keys and scope["path"] not in self._public:
            key = scope["state"]["key"] = self._check_key(headers)
        if self._service.draining and posted:
            raise ApiError(
                503,
                "the server is shutting down and accepts no new requests; send this request to another server",
                code="shutting_down",
                headers={"connection": "close", "retry-after": "10"},
            )
        return key

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 and (hosts or scope["http_version"] != "1.0"):
            raise invalid("a request must have exactly one Host header; send one with the server's name")
        if hosts and not self._hosts.allows(hosts[0]):
            raise ApiError(
                403,
                f"this server does not answer to the name {excerpt(hosts[0])!r}; use localhost or its address, or "
                "allow the name with --allowed-hosts",
                code="host_not_allowed",
            )

    def _check_key(self, headers: Headers) -> int:
        """The number of the client's API key, which either of two headers has. Raises ApiError."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        number = self._keys.number(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
        if number is None:
            number = self._keys.number(headers.get("x-api-key", "").strip().encode("latin-1"))
        if number is None:
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return number
