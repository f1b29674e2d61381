"""A client of any server with OpenAI's HTTP API: lists the models, and streams the answers of chats."""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.cli.api_key import KEY_VARIABLES
from engine.cli.errors import ServerError
from engine.cli.http_client import HttpClient, error_sentence, json_object, split_url

CHAT = "/chat/completions"
MAX_LINE = 16 * 2**20
"""Bytes of the longest line of a stream that is read."""
DONE = "[DONE]"
"""Data of the last event of a stream."""

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
        self._http = HttpClient(self.base, api_key, "--api-key", KEY_VARIABLES)

    def models(self) -> list[str]:
        """The names of the server's models."""
        found = self._http.json("/models").get("data")
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
        with self._http.answer(CHAT, body) as response:
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


class _Call:
    """A tool call, as its pieces come."""

    def __init__(self) -> None:
        self.name = self.arguments = ""


def api_base(url: str) -> str:
    """The address below which the API's routes are: `url`, with /v1 if it has no path. Raises InvalidRequestError."""
    return url.rstrip("/") + ("" if split_url(url).path.strip("/") else "/v1")


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events; the only one of a server that does not stream."""
    kind = response.headers.get_content_type()
    if kind != "text/event-stream":
        yield json_object(response.read(MAX_LINE), CHAT)
        return
    for data in sse_data(iter(lambda: response.readline(MAX_LINE + 1), b"")):
        if data == DONE:
            return
        yield json_object(data, CHAT)


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
