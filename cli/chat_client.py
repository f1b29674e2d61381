"""A client of any server with OpenAI's HTTP API: lists the models, and streams the answers of chats.

It needs nothing outside the standard library, so that `engine chat --url` runs wherever the package does.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from engine.cli.errors import ServerError
from engine.core.errors import InvalidRequestError

TIMEOUT = 600.0
"""Seconds without a byte from the server after which a request fails."""
MAX_LINE = 16 * 2**20
"""Bytes of the longest line of a stream that is read."""
MAX_ERROR = 64 * 2**10
"""Bytes of an error response that are read."""
MAX_SENTENCE = 400
"""Characters of a server's error that are repeated."""
DONE = "[DONE]"
"""Data of the last event of a stream."""

VISIBLE: Mapping[int, str | None] = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"},
    ord("\r"): None,
    **dict.fromkeys(range(0x7F, 0xA0), "\ufffd"),
}
"""For str.translate: makes control characters visible, so that no server or model commands the terminal."""

CONTENT, REASONING, CALL = "content", "reasoning", "call"


class Piece(NamedTuple):
    """A part of an answer, as it comes."""

    kind: str
    """CONTENT, REASONING, or CALL: a whole tool call as text."""
    text: str


class ChatClient:
    """Asks one server. Methods raise InvalidRequestError for what the server refuses, and ServerError for failures."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """url: of the server (http://localhost:8000), or of its API (https://host/prefix/v1). api_key: empty: none."""
        self.base = api_base(url)
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequestError("the API key has characters that no header can have; check --api-key", "api_key")
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if _is_this_machine(urlsplit(self.base).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy would look for the server on its own machine
        self._open = urllib.request.build_opener(*handlers).open

    def models(self) -> list[str]:
        """The names of the server's models."""
        with self._answer("/models") as response:
            body = _object(response.read(MAX_LINE), "/models")
        found = body.get("data")
        listed = found if isinstance(found, list) else []
        return [one["id"] for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]

    def stream(
        self, model: str, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any] = {}
    ) -> Generator[Piece]:
        """The answer to a chat. Closing the generator closes the connection, whereupon the server stops.

        parameters: further fields of the request.
        """
        body = {"model": model, "messages": messages, "stream": True, **parameters}
        calls: dict[int, _Call] = {}
        finished = False
        with self._answer("/chat/completions", json.dumps(body).encode()) as response:
            for chunk in _chunks(response):
                if "error" in chunk:
                    raise ServerError(f"the server ended the answer: {error_sentence(chunk)}")
                for choice in _objects(chunk.get("choices")):
                    delta = choice.get("delta") or choice.get("message")
                    if isinstance(delta, dict):
                        yield from _pieces(delta, calls)
                    finished = finished or choice.get("finish_reason") is not None
        if not finished:
            raise ServerError("the connection ended before the answer was complete; try again")
        yield from (Piece(CALL, f"{call.name} {call.arguments}") for _, call in sorted(calls.items()))

    @contextmanager
    def _answer(self, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request (POST with a `body`). Failures, also of reading it, become one-sentence errors."""
        request = urllib.request.Request(self.base + path, body, self._headers)
        try:
            with self._open(request, timeout=TIMEOUT) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from error
        except urllib.error.URLError as error:
            raise ServerError(f"{self.base} cannot be reached: {_reason(error.reason)}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the connection to {self.base} failed: {_reason(error)}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would become a GET, and the key would go to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Call:
    """A tool call, as its pieces come."""

    def __init__(self) -> None:
        self.name = self.arguments = ""


def api_base(url: str) -> str:
    """The address below which the API's routes are: `url`, with /v1 if it has no path. Raises InvalidRequestError."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises for one that is no number)
    except ValueError:
        parts = urlsplit("")
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or not plain:
        raise InvalidRequestError(f"--url {url!r} is not the URL of a server; give one as http://localhost:8000", "url")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events; the only one of a server that does not stream."""
    kind = response.headers.get_content_type()
    if kind != "text/event-stream":
        yield _object(response.read(MAX_LINE), "/chat/completions")
        return
    for data in sse_data(iter(lambda: response.readline(MAX_LINE + 1), b"")):
        if data == DONE:
            return
        yield _object(data, "/chat/completions")


def sse_data(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each server-sent event of a stream of lines. Raises ServerError for a line longer than MAX_LINE."""
    data: list[str] = []
    for line in lines:
        if len(line) > MAX_LINE:
            raise ServerError(f"the server sent an event of more than {MAX_LINE} bytes")
        text = line.decode(errors="replace").rstrip("\r\n")
        field, _, value = text.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []
    if data:  # the connection has ended; an event that was cut is no JSON
        yield "\n".join(data)


def _pieces(delta: Mapping[str, Any], calls: dict[int, _Call]) -> Iterator[Piece]:
    """What a delta says; tool calls are joined in `calls`, by index."""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        yield Piece(REASONING, reasoning)
    for name in ("content", "refusal"):
        text = delta.get(name)
        if isinstance(text, str) and text:
            yield Piece(CONTENT, text)
    for position, part in enumerate(_objects(delta.get("tool_calls"))):
        index = part.get("index")
        call = calls.setdefault(index if isinstance(index, int) else position, _Call())
        function = part.get("function")
        if isinstance(function, dict):
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; nothing of another value."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _object(text: str | bytes, path: str) -> dict[str, Any]:
    """A JSON object. Raises ServerError for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        start = (text if isinstance(text, str) else text.decode(errors="replace")).strip()[:60]
        raise ServerError(
            f"the server answered {path} with {start!r}..., which is not what OpenAI's API says; check --url"
        )
    return found


def _refusal(error: urllib.error.HTTPError) -> InvalidRequestError | ServerError:
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
        text += " (--api-key, or the environment variable ENGINE_API_KEY or OPENAI_API_KEY, gives the key)"
    return InvalidRequestError(text) if error.code < 500 else ServerError(text)


def error_sentence(body: Any) -> str:
    """The message of an error response, whatever shape the server gives it."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            return error_sentence(body[key])
    return _shortened(body if isinstance(body, str) else json.dumps(body))


def _shortened(text: str) -> str:
    line = " ".join(text.split()).translate(VISIBLE)
    return line if len(line) <= MAX_SENTENCE else f"{line[: MAX_SENTENCE - 3]}..."


def _reason(error: object) -> str:
    """Why a connection failed."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TimeoutError):
        return f"nothing came for {TIMEOUT:.0f} s"
    return str(error) or type(error).__name__
