"""What all routes share: the engine's client, the tokenizer, the model's facts, and whether new work is taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.core.config import EngineConfig, ServerConfig
from engine.core.text import Tokenizer
from engine.core.types import Request, SamplingParams
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.engine_link import Link
from engine.server.front_end.errors import ApiError
from engine.server.http.errors import invalid
from engine.server.http.prometheus import EngineReport
from engine.server.http.request_bodies import Message
from engine.server.shared.heartbeat import Fault
from engine.server.shared.messages import Probe, Started

TEMPLATE_ARGUMENTS = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")
"""The parameters of Tokenizer.chat itself, which chat_template_kwargs must not hold."""
LOOK_AGAIN = 0.01
"""Seconds between two looks for the proof that a step was computed."""
THREAD_CHARS = 8192
"""A longer text is tokenized in a thread, so that it does not hold up running streams."""


class Service:
    """The server behind the routes."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        tokenizer: Tokenizer,
        started: Started,
        created: int,
    ) -> None:
        """started: what a replica of the engine has said. created: when the server was started, time.time()."""
        self.limits: ServerConfig = config.server
        self.client = client
        self.tokenizer = tokenizer
        self.name = served_name(config)
        self.created = created
        self.max_len = started.max_len
        self.vocab_size = started.vocab_size
        self.default_params: SamplingParams = started.default_params
        self.draining = False
        self.active = 0
        """Requests with a body that are being answered."""

    def engines(self) -> list[EngineReport]:
        """What /metrics tells of each replica."""
        return [
            EngineReport(
                up=link.failure is None,
                stats=link.stats,
                startup=link.started.cache.phases if link.started is not None else (),
                restarts=link.life,
            )
            for link in self.client.links
        ]

    def faults(self) -> list[Fault | None]:
        """What is wrong with each replica, as far as that is known without asking it for anything."""
        return [link.fault(self.limits.health_timeout) for link in self.client.links]

    async def probe(self) -> list[float | Fault]:
        """Have a step computed by each replica: the seconds until one was, or what is wrong."""
        return await asyncio.gather(*map(self._probe, self.client.links))

    async def _probe(self, link: Link) -> float | Fault:
        limit = self.limits.health_timeout
        begun = time.monotonic()
        if link.failure is None:
            link.send(Probe())
        while True:
            if (fault := link.fault(limit)) is not None:
                return fault
            assert link.pulse is not None
            if link.pulse.proved > begun:
                return time.monotonic() - begun
            if time.monotonic() - begun > limit:
                return link.pulse.no_step(begun)
            await asyncio.sleep(LOOK_AGAIN)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError unless `model` is the one served (None: not named)."""
        if model is not None and model != self.name:
            raise ApiError(
                404,
                f"this server has no model {model!r}; it serves {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def requests(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        priority: int | None,
        salt: str | None,
    ) -> list[Request]:
        """One request for each of the `params`, which are the choices of the prompts in order, equally many each.

        Raises ApiError for more than the server ever takes.
        """
        now = time.monotonic()
        each = len(params) // len(prompts)
        if len(params) > self.limits.max_waiting:
            raise invalid(
                f"the request asks for {len(params)} choices, but the server takes at most {self.limits.max_waiting} "
                "at a time (server.max_waiting); ask for fewer",
                "n" if each > 1 else "prompt",
            )
        tokens = [tuple(prompt) for prompt in prompts]  # of which all choices have the same, as routing.py sees at once
        return [
            Request(
                id=f"{name}-{index}",
                prompt=tokens[index // each],
                params=choice,
                priority=priority or 0,
                arrival=now,
                salt=salt or "",
            )
            for index, choice in enumerate(params)
        ]

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of `text`."""
        if len(text) < THREAD_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=special)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=special)

    async def encode_chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of a chat, ready for the assistant's answer; variables: further ones of the chat template.

        Raises ApiError or InvalidRequestError.
        """
        for name in variables or ():
            if name in TEMPLATE_ARGUMENTS:
                raise invalid(f"chat_template_kwargs must not hold {name}", "chat_template_kwargs")
        plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
        chat = partial(self.tokenizer.chat, plain, **(variables or {}))
        if sum(len(message["content"]) for message in plain) < THREAD_CHARS:
            return chat()
        return await asyncio.to_thread(chat)


def served_name(config: EngineConfig) -> str:
    """The model's name in the HTTP interface."""
    return config.model.served_name or Path(config.model.path).resolve().name


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles a message may have, and what the chat template calls them (OpenAI renamed system to developer)."""


def _plain(message: Message, where: str) -> dict[str, Any]:
    """A message as chat templates want it: role and text."""
    if message.role not in ROLES:
        raise invalid(f"{where}.role is {message.role!r}; it must be one of {', '.join(ROLES)}", f"{where}.role")
    if isinstance(message.content, str):
        return {"role": ROLES[message.role], "content": message.content}
    texts = []
    for index, part in enumerate(message.content):
        try:
            texts.append(msgspec.convert(part, TextPart).text)
        except msgspec.ValidationError:
            name = f"{where}.content[{index}]"
            raise invalid(
                f'{name} must be {{"type": "text", "text": "..."}}; other parts are not supported', name
            ) from None
    return {"role": ROLES[message.role], "content": "\n".join(texts)}


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message's content."""

    text: str
