"""GET / and /page/NAME: a page to talk to the model in a browser, and the files that it loads.

The files are those of the folder server/page. They hold no data and need no API key; what the page asks for does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from attrs import frozen
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.server.http.errors import READ

FOLDER = Path(__file__).resolve().parents[1] / "page"
INDEX = "index.html"
"""The file at /; the others are at /page/NAME."""
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Ending of a file -> its type; files with another ending are not served."""
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
"""Content-Security-Policy: only this server's own files, no inline code or style, no text that becomes markup."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "; ".join(POLICY),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@frozen
class _File:
    """A file of the page."""

    content: bytes
    media_type: str
    tag: str
    """Its ETag."""

    def response(self, request: Request) -> Response:
        """The file, or status 304 for a browser that has it."""
        headers = {**HEADERS, "etag": self.tag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.tag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


class Page:
    """The files of the page, read once."""

    def __init__(self) -> None:
        self._files = {
            "/" if file.name == INDEX else f"/page/{file.name}": _read(file)
            for file in sorted(FOLDER.iterdir())
            if file.suffix in MEDIA_TYPES
        }
        self.paths = frozenset(self._files)
        """Paths of the files, which need no API key."""

    def routes(self) -> APIRouter:
        """The routes of this module."""
        router = APIRouter()

        async def respond(request: Request) -> Response:
            return self._files[request.scope["path"]].response(request)

        for path in sorted(self.paths):
            router.add_api_route(path, respond, methods=READ, response_model=None)
        return router


def _read(file: Path) -> _File:
    content = file.read_bytes()
    return _File(content, MEDIA_TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
