"""Decides which requests reach a route: by host, origin, API key, limits of the key, and while the server drains."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.server.front_end.errors import ApiError, excerpt
from engine.server.http.errors import ERROR_BODY, ErrorBody, error_response, invalid
from engine.server.http.hosts import AllowedHosts, is_cross_site
from engine.server.http.limits import RequestLimits
from engine.server.http.service import Service
from engine.server.shared.api_keys import ApiKeys

PUBLIC = frozenset({"/health", "/ping"})
"""Paths that never need an API key."""

ADMIN = frozenset(
    {"/reset_prefix_cache", "/start_profile", "/stop_profile", "/start_layer_profile", "/stop_layer_profile"}
)
"""Paths that need an admin key, which opens nothing else, instead of an API key."""


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
        self._admin_keys = ApiKeys(service.limits.admin_api_key)
        self._hosts = AllowedHosts(service.limits, has_keys=len(keys) > 0)
        self._origins = service.limits.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the application, or refuse the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (error_body := _nearest(self._service.error_bodies, scope["path"])) is not None:
            scope["state"][ERROR_BODY] = error_body
        with ExitStack() as stack:
            try:
                key = self._check(scope)
                if scope["method"] == "POST":
                    if scope["path"] not in self._public and scope["path"] not in ADMIN:
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
        if scope["path"] in ADMIN:
            self._check_admin_key(scope["path"], headers)
        elif self._keys and scope["path"] not in self._public:
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

    def _check_admin_key(self, path: str, headers: Headers) -> None:
        """Raise ApiError unless administration is on and the client has sent an admin key."""
        if not self._admin_keys:
            raise ApiError(
                403,
                f"administration is off, so {path} cannot be used; start the server with --admin-api-key or the "
                "environment variable ENGINE_ADMIN_API_KEY, and send that key",
                code="admin_off",
            )
        if _key_number(self._admin_keys, headers) is None:
            raise ApiError(
                401,
                f"{path} needs an admin key (server.admin_api_key), which other API keys are not; send the header "
                "`Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_key(self, headers: Headers) -> int:
        """The number of the client's API key. Raises ApiError."""
        number = _key_number(self._keys, headers)
        if number is None:
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return number


def _key_number(keys: ApiKeys, headers: Headers) -> int | None:
    """The number of the key that the client has sent, in either of two headers; None if there is none of `keys`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    number = keys.number(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else None
    return keys.number(headers.get("x-api-key", "").strip().encode("latin-1")) if number is None else number


def _nearest(error_bodies: Mapping[str, ErrorBody], path: str) -> ErrorBody | None:
    """The shape of errors of a path: its own, or that of the nearest path above it; None: OpenAI's."""
    while path and error_bodies:
        if path in error_bodies:
            return error_bodies[path]
        path = path.rpartition("/")[0]
    return None
