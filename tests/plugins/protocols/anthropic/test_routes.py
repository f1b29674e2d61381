"""The routes, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from engine.core.protocols import AnswerWriter, Call, Conversation, Routes
from engine.plugins.protocols.anthropic.bodies import MessagesBody
from engine.plugins.protocols.anthropic.routes import MessagesApi

BODY = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


class FakeRoutes:
    """Stands for the server: keeps the writer of an answer, and what its response has besides."""

    model = "tiny"
    chat_template = "{{ messages }}"

    def __init__(self) -> None:
        self.writer: AnswerWriter | None = None
        self.headers: Mapping[str, str] = {}

    def check_model(self, model: str) -> None:
        assert model == self.model

    def new_call_id(self) -> str:
        return "id"

    async def respond(
        self, name: str, conversation: Conversation, writer: AnswerWriter, *, stream: bool, headers: Any
    ) -> Callable[[], None]:
        self.writer, self.headers = writer, headers
        return lambda: None


def answered(**given: Any) -> FakeRoutes:
    """The server after a request with these parameters."""
    routes = FakeRoutes()
    body = msgspec.convert(BODY | given, MessagesBody)
    asyncio.run(MessagesApi(cast(Routes, routes)).respond(body, Call()))
    return routes


def test_a_stream_is_kept_alive_by_pings() -> None:
    writer = answered(stream=True).writer
    assert writer is not None
    assert writer.keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'
