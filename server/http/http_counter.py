"""Counts HTTP requests by route, method and status."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from starlette.routing import BaseRoute

from engine.server.metrics.reports import Route
from engine.server.shared.request_metrics import HTTP_SLOTS, HttpMetrics

NOT_COUNTED = frozenset({"/metrics", "/health", "/ping", "/version"})
"""Paths that monitoring asks for, which would hide how clients fare."""
OTHER: Route = ("other", "other")
"""Stands for requests that no route answers, and for routes beyond the table's slots."""


class HttpCounter:
    """This front end's counts. All front ends have the same routes, and so the same slots."""

    def __init__(self, metrics: HttpMetrics, routes: Iterable[BaseRoute]) -> None:
        self._metrics = metrics
        found = [
            (method, path, getattr(route, "endpoint", None))
            for route in routes
            if (path := getattr(route, "path", "")) and path not in NOT_COUNTED
            for method in sorted(getattr(route, "methods", None) or ())
        ][: HTTP_SLOTS - 1]
        self.routes: Sequence[Route] = [OTHER, *((method, path) for method, path, _ in found)]
        """By slot."""
        self._by_path = {(method, path): slot for slot, (method, path, _) in enumerate(found, 1)}
        self._by_endpoint = {(method, endpoint): slot for slot, (method, _, endpoint) in enumerate(found, 1)}

    def observe(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        """Count a request whose response has ended. scope: as the application has left it."""
        method, path = scope["method"], scope["path"]
        if path in NOT_COUNTED:
            return
        slot = self._by_path.get((method, path))
        if slot is None:  # a route with parameters
            slot = self._by_endpoint.get((method, scope.get("endpoint")), 0)
        self._metrics.observe(slot, status, seconds)
