"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import uuid

from engine.core.errors import InvalidRequestError
from engine.core.protocols import API, ApiError, Call, Conversation, Reply, Routes, invalid
from engine.plugins.protocols.anthropic.bodies import CountTokensBody, MessagesBody
from engine.plugins.protocols.anthropic.conversation import ASSISTANT, SYSTEM, USER, TemplateMessages
from engine.plugins.protocols.anthropic.errors import NO_THREADS, error_body
from engine.plugins.protocols.anthropic.options import conversation_of
from engine.plugins.protocols.anthropic.writer import MessageWriter

PATH = "/v1/messages"
WITHOUT_EFFECT = "x-parameters-without-effect"
"""Header of a response that names the parameters for which this model's chat template has no place."""
BLOCKS_AT_A_TIME = 500
"""Blocks that are decoded without a pause."""
_PROBE = "9b1e52"
"""A text that no chat template has."""


class MessagesApi:
    """Answers the requests of both routes."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._system_anywhere: bool | None = None

    def register(self) -> None:
        """Add the routes."""
        self._routes.post(
            PATH,
            MessagesBody,
            self.respond,
            api=API,
            summary="Anthropic's Messages API",
            streams=True,
            error_body=error_body,
        )
        self._routes.post(
            f"{PATH}/count_tokens",
            CountTokensBody,
            self.count_tokens,
            api=API,
            summary="The number of tokens of a request to Anthropic's Messages API",
            error_body=error_body,
        )

    async def respond(self, body: MessagesBody, call: Call) -> Reply:
        """Check and tokenize a request. Raises ApiError or InvalidRequestError."""
        routes = self._routes
        if body.thread is not None:
            message = "thread is not supported: this server stores no conversation; send all of it without thread"
            raise invalid(message, "thread", NO_THREADS)
        conversation, without_effect = await self._conversation(body)
        name = f"msg_{uuid.uuid4().hex}"
        asked = body.diagnostics is not None and body.diagnostics.previous_message_id is not None
        writer = MessageWriter(
            name,
            routes.model,
            routes.new_call_id,
            max_tokens=body.max_tokens,
            show_thinking=body.thinking is None or body.thinking.display != "omitted",
            fields={"diagnostics": {"cache_miss_reason": {"type": "unavailable"}}} if asked else {},
        )
        headers = {WITHOUT_EFFECT: ", ".join(without_effect)} if without_effect else None
        try:
            return await routes.respond(name, conversation, writer, stream=bool(body.stream), headers=headers)
        except ApiError as error:
            if error.param == "stop":
                raise invalid(f"stop_sequences: {error.message}", "stop_sequences") from None
            raise

    async def count_tokens(self, body: CountTokensBody, call: Call) -> Reply:
        """Count the tokens of a request's prompt. Raises ApiError or InvalidRequestError."""
        conversation, _ = await self._conversation(body)
        return self._routes.json({"input_tokens": await self._routes.count_tokens(conversation)})

    async def _conversation(self, body: CountTokensBody) -> tuple[Conversation, list[str]]:
        """The request as a Conversation, and its parameters without effect. Raises ApiError."""
        self._routes.check_model(body.model)
        if not body.messages:
            raise invalid("messages is empty; give at least one", "messages")
        if body.messages[-1].role == ASSISTANT:
            raise invalid(
                "messages must not end with a message of the assistant: this server does not continue it; end with one "
                "of the user",
                "messages",
            )
        late_system = any(message.role == SYSTEM for message in body.messages)
        found = TemplateMessages(system_anywhere=not late_system or self._takes_system_anywhere())
        blocks = 0
        for steps in (
            found.add_system(body.system),
            *(found.add(message, f"messages[{index}]") for index, message in enumerate(body.messages)),
        ):
            for _ in steps:
                blocks += 1
                if blocks % BLOCKS_AT_A_TIME == 0:
                    await asyncio.sleep(0)
        return conversation_of(body, found.found(), self._routes.chat_template, found.references)

    def _takes_system_anywhere(self) -> bool:
        """Whether the model's chat template has a place for system messages after the first message."""
        if self._system_anywhere is None:
            said = [(USER, "a"), (ASSISTANT, "b"), (SYSTEM, _PROBE), (USER, "c")]
            try:
                rendered = self._routes.render([{"role": role, "content": content} for role, content in said])
            except InvalidRequestError:
                rendered = ""
            self._system_anywhere = _PROBE in rendered
        return self._system_anywhere
