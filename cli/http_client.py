"""A client of a server over HTTP, whose failures are one-sentence errors.

It needs nothing outside the standard library, so that `engine chat --url` runs wherever the package does.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from engine.cli.errors import ServerError
from engine.core.errors import InvalidRequestError

TIMEOUT = 600.0
"""Seconds without a byte from the server after which a request fails."""
MAX_BODY = 16 * 2**20
"""Bytes of a JSON response that are read."""
MAX_ERROR = 64 * 2**10
"""Bytes of an error response that are read."""
MAX_SENTENCE = 400
"""Characters of a server's error that are repeated."""

VISIBLE: Mapping[int, str | None] = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"},
    ord("\r"): None,
    **dict.fromkeys(range(0x7F, 0xA0), "\ufffd"),
}
"""For str.translate: makes control characters visible, so that no server or model commands the terminal."""


class HttpClient:
    """Asks one server. Methods raise InvalidRequestError for what the server refuses, and ServerError for failures."""

    def __init__(self, base: str, key: str, option: str, variables: Sequence[str]) -> None:
        """Raises InvalidRequestError for a URL or a key that cannot be used.

        base: URL before the paths. key: empty: none. option, variables: what gives the key, for errors.
        """
        self.base = base
        self._key_sources = key_sources(option, variables)
        host = split_url(base).hostname or ""
        check_key(key, option)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if _is_this_machine(host):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy would look for the server on its own machine
        self._open = urllib.request.build_opener(*handlers).open

    @contextmanager
    def answer(self, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request (POST with a `body`, sent as JSON). Failures of reading it are errors too."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, self._headers)
        try:
            with self._open(request, timeout=TIMEOUT) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except urllib.error.URLError as error:
            raise ServerError(f"{self.base} cannot be reached: {failure(error.reason, TIMEOUT)}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection to {self.base} failed: {failure(error, TIMEOUT)}") from error

    def json(self, path: str, body: object = None) -> dict[str, Any]:
        """The JSON object with which the server answers."""
        with self.answer(path, body) as response:
            return json_object(response.read(MAX_BODY), path)

    def _refusal(self, error: urllib.error.HTTPError) -> InvalidRequestError | ServerError:
        """The error of a response whose status is not 200."""
        status = f"the server answered {error.code}"
        if 300 <= error.code < 400:
            return InvalidRequestError(f"{status}: it has moved to {error.headers.get('location')}; give that as --url")
        try:
            body = error.read(MAX_ERROR)
        except (OSError, http.client.HTTPException):
            body = b""
        try:
            said = error_sentence(json.loads(body))
        except ValueError:
            said = body.decode(errors="replace").strip()
        text = f"{status}: {_shortened(said or error.reason)}"
        if error.code == 401:
            text += f" ({self._key_sources})"
        return InvalidRequestError(text) if error.code < 500 else ServerError(text)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would become a GET, and the key would go to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def key_sources(option: str, variables: Sequence[str]) -> str:
    """What gives the API key, as a clause."""
    return f"{option}, or the environment variable {' or '.join(variables)}, gives the key"


def check_key(key: str, option: str) -> None:
    """Raise InvalidRequestError for an API key that no header can have. option: gives the key."""
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequestError(f"the API key has characters that no header can have; check {option}", "api_key")


def split_url(url: str, option: str = "--url") -> SplitResult:
    """The parts of the URL of a server. Raises InvalidRequestError for other text. option: gives the URL."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises for one that is no number)
    except ValueError:
        parts = urlsplit("")
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or not plain:
        raise InvalidRequestError(
            f"{option} {url!r} is not the URL of a server; give one as http://localhost:8000", "url"
        )
    return parts


def json_object(text: str | bytes, path: str) -> dict[str, Any]:
    """A JSON object in an answer to `path`. Raises ServerError for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        start = (text if isinstance(text, str) else text.decode(errors="replace")).strip()[:60]
        raise ServerError(f"the server answered {path} with {start!r}..., which is not a JSON object; check --url")
    return found


def error_sentence(body: Any) -> str:
    """The message of an error response, whatever shape the server gives it."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            return error_sentence(body[key])
    return _shortened(body if isinstance(body, str) else json.dumps(body))


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _shortened(text: str) -> str:
    line = " ".join(text.split()).translate(VISIBLE)
    return line if len(line) <= MAX_SENTENCE else f"{line[: MAX_SENTENCE - 3]}..."


def failure(error: object, timeout: float) -> str:
    """Why a connection failed, as a clause. timeout: seconds that it waited for the server."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TimeoutError):
        return f"nothing came for {timeout:g} s"
    return str(error) or type(error).__name__
